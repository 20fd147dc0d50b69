"""The output for Prometheus: fixed names, right values, and a format that Prometheus' parser accepts."""

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.metrics.samples import A, B, C, observation
from vgpud.model.marks import Mark, MarkKind
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import State
from vgpud.serve.metrics import families
from vgpud.serve.metrics.render import Renderer

GOLDEN = Path(__file__).parent / "golden" / "names.txt"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def text() -> str:
    return Renderer().render(observation())


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_names_types_and_labels_of_metrics_do_not_change() -> None:
    """Users' dashboards depend on them. Change the golden file only by additions."""
    now = [f"{f.name} {f.kind} {','.join(f.labels)}".strip() for f in families.ALL]
    assert now == GOLDEN.read_text().splitlines()


def test_metric_names_follow_the_conventions_of_prometheus() -> None:
    for family in families.ALL:
        assert family.name.startswith(("vgpud_", "process_"))
        assert (family.kind == "counter") == family.name.endswith("_total")
        units = ("_mib", "_percent", "_milliseconds", "_ms", "_mhz", "_milliwatts")
        assert not family.name.removesuffix("_total").endswith(units)
        assert not {"pid", "command"} & set(family.labels)


def test_the_official_parser_of_prometheus_reads_every_metric_family(text: str) -> None:
    read = {family.name: family for family in text_string_to_metric_families(text)}
    assert set(read) == {
        f.name.removesuffix("_total") if f.kind == "counter" else f.name for f in families.ALL
    }
    for family in families.ALL:
        name = family.name.removesuffix("_total") if family.kind == "counter" else family.name
        for sample in read[name].samples:
            assert set(sample.labels) == set(family.labels) or family.kind == "histogram"


def test_every_metric_family_has_a_sample_on_a_test_node_that_has_every_case(text: str) -> None:
    assert {f.name for f in families.ALL if f"\n{f.name}" not in text} == set()


def test_the_policy_can_remove_pod_and_claim_names_from_the_labels() -> None:
    renderer, seen = Renderer(), observation()
    names = ("namespace", "pod", "container", "claim")
    for shown, expected in ((True, ("ml", "train-0", "main", "weights")), (False, ("", "", "", ""))):
        found = samples(renderer.render(replace(seen, names_workloads=shown)))["vgpud_allocation_info"]
        assert tuple(found[0][0][name] for name in names) == expected


def test_metric_values_have_base_units(text: str) -> None:
    found = samples(text)

    def one(name: str, **labels: str) -> float:
        (value,) = [v for have, v in found[name] if labels.items() <= have.items()]
        return value

    assert one("vgpud_allocation_memory_limit_bytes", allocation="aaaa00000001") == 4 * GIB
    assert one("vgpud_allocation_memory_peak_bytes", gpu_uuid=A) == 3 * GIB + 1
    assert one("vgpud_allocation_compute_limit_ratio", uid="1000") == 0.125
    assert one("vgpud_allocation_throttled_seconds_total", gpu_uuid=A) == 2.5
    assert one("vgpud_allocation_compute_seconds_total", gpu_uuid=A) == 1
    assert one("vgpud_allocation_memory_refused_total", gpu_uuid=A, cause="limit") == 5
    assert one("vgpud_gpu_power_watts", gpu_uuid=A) == 250.5
    assert one("vgpud_gpu_busy_ratio", gpu_uuid=A) == 0.87
    assert one("vgpud_gpu_healthy", gpu_uuid=C) == 0
    assert one("vgpud_gpu_drained", gpu_uuid=B) == 1
    assert one("vgpud_gpu_mode", gpu_uuid=C, mode="idle") == 1
    assert one("vgpud_gpu_engine", gpu_uuid=A, engine="cut", reason="probed") == 1
    assert one("vgpud_allocations", state="failed") == 1
    assert one("vgpud_allocations", state="allocating") == 0
    assert one("vgpud_allocations_refused_total", reason="NO_CAPACITY") == 3
    assert one("vgpud_simulated") == 1
    assert one("vgpud_allocation_duration_seconds_bucket", le="0.005") == 1
    assert one("vgpud_allocation_duration_seconds_bucket", le="30.0") == 1
    assert one("vgpud_allocation_duration_seconds_bucket", le="+Inf") == 2
    assert one("vgpud_allocation_duration_seconds_count") == 2


def test_an_unknown_figure_has_no_sample_instead_of_the_value_zero(text: str) -> None:
    found = samples(text)
    assert [have["gpu_uuid"] for have, _ in found["vgpud_gpu_busy_ratio"]] == [A]
    assert {have["gpu_uuid"] for have, _ in found["vgpud_gpu_temperature_celsius"]} == {A, B}
    assert [have["gpu_uuid"] for have, _ in found["vgpud_allocation_memory_peak_bytes"]] == [A]
    assert [have["gpu_uuid"] for have, _ in found["vgpud_allocation_compute_limit_ratio"]] == [A]


def test_the_label_of_an_allocation_cannot_break_the_metrics_text(text: str) -> None:
    (info,) = [have for have, _ in samples(text)["vgpud_allocation_info"] if have["uid"] == "1000"]
    assert info["label"] == '<script>alert("1")</script>\n\\'


def test_every_metric_is_in_the_manual() -> None:
    manual = (ROOT / "docs" / "metrics.md").read_text()
    assert {f.name for f in families.ALL if f"`{f.name}`" not in manual} == set()


def test_cached_metric_lines_equal_lines_rendered_without_a_cache() -> None:
    """One tenant's counters grow, one allocation fails, one ends and one starts."""
    first = observation()
    (name, (meter, *rest)), *_ = first.metered.meters.items()
    counted = replace(meter, memory_used_bytes=meter.memory_used_bytes + 1)
    busy = replace(first, metered=replace(first.metered, meters={name: (counted, *rest)}))
    failed = replace(first.allocations[0], state=State.FAILED)
    changed = replace(busy, allocations=(failed, *first.allocations[1:]))
    fewer = replace(changed, allocations=changed.allocations[1:])
    none = replace(fewer, allocations=())
    kept = Renderer()
    for seen in (first, first, busy, changed, fewer, none, first):
        assert kept.render(seen) == Renderer().render(seen)
    assert Renderer().render(first) != Renderer().render(busy) != Renderer().render(changed)


def test_each_mark_of_an_allocation_and_an_unknown_driver_are_samples(text: str) -> None:
    told = samples(text)
    marked = {(labels["allocation"][:4], labels["mark"]) for labels, _ in told["vgpud_allocation_marked"]}
    assert marked == {("aaaa", "bypassed"), ("aaaa", "unknown-calls"), ("bbbb", "unknown-calls")}
    assert [value for _, value in told["vgpud_allocation_bypassed_bytes"]] == [590 * 2**20]
    assert told["vgpud_driver_unknown_calls"] == [({"driver_version": "610.4"}, 5)]
    assert told["vgpud_allocations_stopped_total"] == [({}, 1)]


def test_an_allocation_whose_pause_the_driver_refused_is_counted_in_state_active() -> None:
    renderer, seen = Renderer(), observation()
    paused = replace(seen.allocations[0], paused=True)
    seen = replace(seen, allocations=(paused, *seen.allocations[1:]))
    gated = Mark(paused.id, MarkKind.GATED, "", 0, "status 0x56", 10**18)
    assert 'vgpud_allocations{state="paused"} 1' in renderer.render(seen)
    refused = renderer.render(replace(seen, marks=(*seen.marks, gated)))
    assert 'vgpud_allocations{state="paused"} 0' in refused
    assert 'state="paused",' not in refused
