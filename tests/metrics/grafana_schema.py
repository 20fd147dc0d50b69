"""Grafana's own types of a dashboard, fetched once into build/outside/ and never committed.

Grafana publishes its dashboard schema as TypeScript (npm: @grafana/schema), so the compiler is what judges:
the dashboard becomes a literal of the schema's types, in which a wrong type, a missing field and a field that
the schema does not know are errors. A panel's options and field settings are `unknown` in Panel, and are held
against their panel's own types. Prometheus' query is in another package; its fields are named here.
"""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.sim.outside import FETCH_SECONDS, OUTSIDE

PACKAGES = ("@grafana/schema@13.2.3", "typescript@5.9.3")
COMPILE_SECONDS = 120

#: Enums by their values, as JSON has them.
HEAD = """
import type { DataQuery, Dashboard, FieldConfigSource, GraphFieldConfig, Panel } from '@grafana/schema';
import type * as stat from 'kinds/stat/panelcfg/x/types.gen';
import type * as timeseries from 'kinds/timeseries/panelcfg/x/types.gen';

type Plain<T> = T extends string ? `${T}` : T extends number ? number
  : T extends Array<infer E> ? Array<Plain<E>> : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
type Some<T> = T extends Array<infer E> ? Array<Some<E>>
  : T extends object ? { [K in keyof T]?: Some<T[K]> } : T;

interface PrometheusQuery extends DataQuery { expr: string; legendFormat?: string; instant?: boolean; }
interface Shown<Kind extends string, Options, Custom> extends
  Omit<Panel, 'type' | 'options' | 'fieldConfig' | 'targets'> {
  type: Kind; options: Some<Options>; targets: PrometheusQuery[];
  fieldConfig: Omit<FieldConfigSource, 'defaults'> & {
    defaults: Omit<FieldConfigSource['defaults'], 'custom'> & { custom: Some<Custom> } };
}
type Stat = Shown<'stat', stat.Options, {}>;
type TimeSeries = Shown<'timeseries', timeseries.Options, GraphFieldConfig>;
"""
_TYPES = {"stat": "Stat", "timeseries": "TimeSeries"}
_OPTIONS = {
    "strict": True,
    "noEmit": True,
    "module": "esnext",
    "target": "es2022",
    "moduleResolution": "bundler",
    "skipLibCheck": True,
    "types": [],
    "paths": {"kinds/*": ["./node_modules/@grafana/schema/dist/types/raw/composable/*"]},
}

why = ""


def fetch() -> Path | None:
    """A folder with the schema and a compiler; None, with the reason in `why`, without npm's registry."""
    global why  # noqa: PLW0603
    home = OUTSIDE / "grafana"
    if home.is_dir():
        return home
    if shutil.which("npm") is None or shutil.which("node") is None:
        why = "npm is not here (Debian: npm)"
        return None
    OUTSIDE.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix="grafana-", dir=OUTSIDE))
    (fresh / "package.json").write_text("{}")
    words = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--save-exact", *PACKAGES]
    try:
        done = subprocess.run(
            words, cwd=fresh, capture_output=True, text=True, check=False, timeout=FETCH_SECONDS
        )
        why = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["npm failed"])[-1]
    except subprocess.TimeoutExpired:
        why = f"npm did not end within {FETCH_SECONDS} s"
    if why or home.is_dir():
        shutil.rmtree(fresh)
    else:
        fresh.rename(home)
    return None if why else home


def program(dashboard: dict[str, Any]) -> str:
    """TypeScript that compiles if, and only if, the dashboard is one by the schema."""
    whole = json.dumps({**dashboard, "panels": []}, indent=1)
    panels = "\n".join(
        f"const panel{number}: Plain<{_TYPES[panel['type']]}> = {json.dumps(panel, indent=1)};"
        for number, panel in enumerate(dashboard["panels"])
    )
    return f"{HEAD}\nconst dashboard: Plain<Dashboard> = {whole};\n{panels}\n"


def errors(home: Path, dashboard: dict[str, Any], folder: Path) -> str:
    """What the compiler says of it; empty when there is nothing."""
    (folder / "dashboard.ts").write_text(program(dashboard))
    (folder / "tsconfig.json").write_text(
        json.dumps({"compilerOptions": _OPTIONS, "files": ["dashboard.ts"]})
    )
    (folder / "node_modules").symlink_to(home / "node_modules")
    compiler = home / "node_modules" / "typescript" / "lib" / "tsc.js"
    done = subprocess.run(
        ["node", str(compiler), "-p", "."],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=COMPILE_SECONDS,
    )
    return done.stdout + done.stderr
