"""Dashboard and alerts use existing metrics with existing labels, and are valid for Grafana and
Prometheus.
"""

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conditions import needs, unmet
from tests.metrics import grafana_schema
from tests.metrics.samples import observation
from tests.sim import outside
from vgpud.serve.metrics import families
from vgpud.serve.metrics.render import Renderer

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "configs" / "grafana" / "vgpud.json").read_text())
PROMETHEUS = ROOT / "configs" / "prometheus"
RULES = yaml.safe_load((PROMETHEUS / "vgpud.rules.yml").read_text())
KNOWN = {f.name: set(f.labels) for f in families.ALL}
HISTOGRAM = "vgpud_allocation_duration_seconds"
OTHERS = {"instance", "job"}  # labels that Prometheus adds


def expressions() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return panels + [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]


def metrics(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:vgpud|process)_[a-z_]+\b", expression))


def test_every_expression_uses_existing_metrics() -> None:
    for expression in expressions():
        for name in metrics(expression):
            assert name.removesuffix("_bucket") in KNOWN, expression


def test_every_expression_uses_labels_that_the_metric_has() -> None:
    for expression in expressions():
        for name, inner in re.findall(r"\b((?:vgpud|process)_[a-z_]+)\{([^}]*)\}", expression):
            labels = set(re.findall(r"([a-z_]+)(?:=|!)", inner))
            assert labels <= KNOWN[name.removesuffix("_bucket")] | OTHERS, expression
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            used = set(re.findall(r"{{(\w+)}}", target["legendFormat"])) - OTHERS
            have = set().union(*(KNOWN[name.removesuffix("_bucket")] for name in metrics(target["expr"])))
            assert used <= have, panel["title"]


def test_the_panels_of_the_dashboard_have_ids_of_their_own_and_do_not_overlap() -> None:
    """Grafana's schema cannot express these rules."""
    panels = DASHBOARD["panels"]
    assert DASHBOARD["uid"] == "vgpud"
    assert DASHBOARD["schemaVersion"] >= 36
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] in {"timeseries", "stat"}
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert {target["refId"] for target in panel["targets"]} <= set("ABCD")
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "instance"}


#: Mistakes that the check must find, each in another place of the dashboard.
SPOILT: dict[str, Callable[[dict[str, Any]], object]] = {
    '"nonsense"\' does not exist': lambda it: it["panels"][2].update(nonsense=1),
    "Type '\"blue\"' is not assignable": lambda it: it["panels"][0]["options"].update(colorMode="blue"),
    "Property 'schemaVersion' is missing": lambda it: it.pop("schemaVersion"),
    "Type 'string' is not assignable to type 'number'": lambda it: it["panels"][1]["gridPos"].update(x="1"),
}


@needs("npm")
def test_the_dashboard_is_valid_by_grafanas_schema(tmp_path: Path) -> None:
    home = grafana_schema.fetch()
    if home is None:
        unmet("npm", f"@grafana/schema cannot be fetched: {outside.why['grafana']}")
    (tmp_path / "own").mkdir()
    assert grafana_schema.errors(home, DASHBOARD, tmp_path / "own") == ""
    spoilt = copy.deepcopy(DASHBOARD)
    for spoil in SPOILT.values():
        spoil(spoilt)
    (tmp_path / "spoilt").mkdir()
    said = grafana_schema.errors(home, spoilt, tmp_path / "spoilt")
    assert [what for what in SPOILT if what not in said] == []
    assert said.count("error TS") == len(SPOILT)


def test_every_alert_has_a_severity_a_summary_and_a_description() -> None:
    for group in RULES["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in {"critical", "warning", "info"}
            assert rule["annotations"]["summary"]
            assert rule["annotations"]["description"].endswith(".")


@pytest.fixture(scope="module")
def promtool() -> str:
    program = outside.promtool()
    if program is None:
        unmet("debian-archive", outside.why["prometheus"])
    return str(program)


def run(*words: str, folder: Path, text: str | None = None) -> None:
    done = subprocess.run(
        words, cwd=folder, input=text, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs("debian-archive")
def test_promtool_accepts_the_rules_and_their_tests_pass(promtool: str, tmp_path: Path) -> None:
    for name in ("vgpud.rules.yml", "vgpud.rules.test.yml"):
        shutil.copy(PROMETHEUS / name, tmp_path)
    for words in (["check", "rules", "vgpud.rules.yml"], ["test", "rules", "vgpud.rules.test.yml"]):
        run(promtool, *words, folder=tmp_path)


@needs("debian-archive")
def test_promtool_accepts_every_query_of_the_dashboard(promtool: str, tmp_path: Path) -> None:
    rules = [
        {"record": f"dashboard:{number}", "expr": expression.replace("$instance", ".*")}
        for number, expression in enumerate(expressions())
    ]
    (tmp_path / "all.yml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    run(promtool, "check", "rules", "all.yml", folder=tmp_path)


@needs("debian-archive")
def test_promtool_accepts_the_exposition(promtool: str, tmp_path: Path) -> None:
    run(promtool, "check", "metrics", folder=tmp_path, text=Renderer().render(observation()))
