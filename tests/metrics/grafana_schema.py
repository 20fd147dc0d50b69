"""Grafana's own dashboard types, fetched once (tests/sim/outside.py) and never committed.

Grafana publishes its dashboard schema in TypeScript (npm: @grafana/schema), so the TypeScript compiler
can check: the dashboard becomes a literal of the schema's types. A wrong type, a missing field and an unknown
field are errors. A panel's options and field settings are `unknown` in Panel, and are checked by their
panel's own types. Prometheus' query is in another package; its fields are listed here.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.sim import outside

PACKAGES = ("@grafana/schema@13.2.3", "typescript@5.9.3")
COMPILE_SECONDS = 120

#: head of the program: replaces the schema's enums by their values, as JSON has them
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


def fetch() -> Path | None:
    """A folder with the schema and a compiler. If npm's registry cannot be reached, returns None, and
    `outside.why` has the reason.
    """
    return outside.once(outside.OUTSIDE / "grafana", _install)


def _install(draft: Path) -> str:
    (draft / "package.json").write_text("{}")
    words = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--save-exact", *PACKAGES]
    return outside.run(words, draft)


def program(dashboard: dict[str, Any]) -> str:
    """A TypeScript program that compiles if, and only if, the dashboard agrees with the schema."""
    whole = json.dumps({**dashboard, "panels": []}, indent=1)
    panels = "\n".join(
        f"const panel{number}: Plain<{_TYPES[panel['type']]}> = {json.dumps(panel, indent=1)};"
        for number, panel in enumerate(dashboard["panels"])
    )
    return f"{HEAD}\nconst dashboard: Plain<Dashboard> = {whole};\n{panels}\n"


def errors(home: Path, dashboard: dict[str, Any], folder: Path) -> str:
    """The compiler's errors; empty if there are none."""
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
