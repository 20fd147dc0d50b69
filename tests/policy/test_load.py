"""Merging the layers of a policy, and the origin of each effective key."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.policy.conftest import Etc
from vgpud.model.device import Device
from vgpud.policy.load import LoadedPolicy, deep_merge
from vgpud.policy.model import Policy

MAIN = """\
version = 1

[planner]
strategy = "spread"

[[device]]
mode = "mig"
match = { mig_capable = true }

[[device]]
mode = "mps"
[device.mps]
max_tenants = 8
"""


def modes(loaded: LoadedPolicy) -> list[str]:
    return [rule.mode for rule in loaded.policy.device]


def test_tables_of_the_policy_layers_merge_key_by_key(etc: Etc) -> None:
    """A drop-in that changes one key of a table must not drop the table's other keys."""
    etc.write("etc/vgpud.toml", MAIN)
    etc.write("etc/conf.d/50-x.toml", "[planner]\n")
    loaded = etc.load()
    assert loaded.policy.planner.strategy == "spread"
    assert etc.origin(loaded, "planner.strategy") == "etc/vgpud.toml:4"


def test_the_rules_of_a_drop_in_replace_all_rules_of_lower_layers(etc: Etc) -> None:
    etc.write("etc/vgpud.toml", MAIN)
    assert modes(etc.load()) == ["mig", "mps"]
    etc.write("etc/conf.d/50-x.toml", "[[device]]\nmode = 'exclusive'\n")
    loaded = etc.load()
    assert modes(loaded) == ["exclusive"]
    assert etc.origin(loaded, "device[0].mode") == "etc/conf.d/50-x.toml:2"
    assert "device[1].mode" not in loaded.origins


def test_a_rule_of_a_drop_in_takes_nothing_from_the_rule_it_replaces(etc: Etc) -> None:
    """Rule 0 of the drop-in has no max_tenants, so the default applies, and not the value of rule 0 in the
    main file.
    """
    etc.write("etc/vgpud.toml", "version = 1\n[[device]]\nmode = 'mps'\nmps.max_tenants = 3\n")
    etc.write("etc/conf.d/50-x.toml", "[[device]]\nmode = 'mps'\n")
    loaded = etc.load()
    assert loaded.policy.device[0].settings_mps().max_tenants == 16
    assert etc.origin(loaded, "device[0].mps.max_tenants") == "built-in"


def test_an_empty_array_in_a_drop_in_removes_the_rules_of_lower_layers(etc: Etc) -> None:
    etc.write("etc/vgpud.toml", MAIN)
    etc.write("etc/conf.d/50-x.toml", "device = []\n")
    loaded = etc.load()
    assert loaded.policy.device == ()
    assert etc.origin(loaded, "device") == "etc/conf.d/50-x.toml:1"


def test_every_effective_policy_key_has_its_origin(etc: Etc) -> None:
    etc.write("etc/vgpud.toml", MAIN)
    etc.write("run/conf.d/50-x.toml", "version = 1\nplanner.strategy = 'pack'\n")
    loaded = etc.load()
    assert {key: etc.origin(loaded, key) for key in loaded.origins} == {
        "version": "run/conf.d/50-x.toml:1",
        "planner.strategy": "run/conf.d/50-x.toml:2",
        "planner.user_places_percent": "built-in",
        "pool.host_memory_reserve": "built-in",
        "pool.unevictable": "built-in",
        "device[0].match.mig_capable": "etc/vgpud.toml:8",
        "device[0].mode": "etc/vgpud.toml:7",
        "device[0].on_sick": "built-in",
        "device[0].mig.change_mode": "built-in",
        "device[0].mig.foreign": "built-in",
        "device[0].mig.on_top": "built-in",
        "device[0].mig.reset": "built-in",
        "device[1].mode": "etc/vgpud.toml:11",
        "device[1].on_sick": "built-in",
        "device[1].mps.max_tenants": "etc/vgpud.toml:13",
        "device[1].mps.overcommit_percent": "built-in",
        "device[1].mps.users": "built-in",
        "device[1].mps.processes_per_tenant": "built-in",
        "device[1].mps.memory": "built-in",
        "device[1].mps.exclusive_process": "built-in",
        "device[1].mps.static_partitions": "built-in",
        "device[1].mps.client_priority": "built-in",
        "device[1].mps.check_seconds": "built-in",
        "device[1].mps.hang_seconds": "built-in",
        "metrics.listen": "built-in",
        "metrics.workloads": "built-in",
        "http.listen": "built-in",
        "quota": "built-in",
    }


def test_a_device_gets_the_first_policy_rule_that_covers_it(etc: Etc) -> None:
    etc.write(
        "etc/vgpud.toml", "version = 1\n[[device]]\nmode='mig'\nmatch.name='*A100*'\n[[device]]\nmode='mps'\n"
    )
    policy = etc.load().policy
    assert policy.rule_for(Device("GPU-1", 0, "NVIDIA A100-SXM4-40GB")).mode == "mig"
    assert policy.rule_for(Device("GPU-2", 1, "Tesla T4")).mode == "mps"
    assert Policy().rule_for(Device("GPU-2", 1, "Tesla T4")).mode == "auto"


def test_the_digest_of_a_policy_covers_its_effective_keys(etc: Etc) -> None:
    built_in = etc.load().digest
    etc.write("etc/vgpud.toml", "# stated defaults change nothing\nversion = 1\nplanner.strategy = 'pack'")
    assert etc.load().digest == built_in
    etc.write("etc/conf.d/50-x.toml", "planner.strategy = 'spread'")
    changed = etc.load().digest
    assert changed != built_in
    etc.write("etc/vgpud.toml", "version = 1\n[[device]]\nmatch.memory_min = '1GiB'")
    in_gib = etc.load().digest
    etc.write("etc/vgpud.toml", "version = 1\n[[device]]\nmatch = { memory_min = 1073741824 }\nmode = 'auto'")
    assert etc.load().digest == in_gib
    assert len({built_in, changed, in_gib}) == 3


KEYS = st.sampled_from("abc")
# Keys with values, and tables with such keys. A key is a table either in every layer or in none, because all
# layers have the same model.
VALUES = st.integers() | st.lists(st.integers(), max_size=2)
TABLES = st.fixed_dictionaries(
    {},
    optional={
        "a": VALUES,
        "b": VALUES,
        "t": st.dictionaries(KEYS, VALUES, max_size=3),
        "u": st.fixed_dictionaries(
            {}, optional={"a": VALUES, "v": st.dictionaries(KEYS, VALUES, max_size=3)}
        ),
    },
)


def flat(table: dict[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for key, value in table.items():
        found |= flat(value, (*path, key)) if isinstance(value, dict) else {(*path, key): value}
    return found


@given(TABLES, TABLES, TABLES)
def test_merging_of_policy_layers_is_associative(
    a: dict[str, Any], b: dict[str, Any], c: dict[str, Any]
) -> None:
    assert deep_merge(deep_merge(a, b), c) == deep_merge(a, deep_merge(b, c))


@given(TABLES, TABLES)
def test_merging_keeps_every_key_and_the_value_of_the_higher_layer(
    low: dict[str, Any], high: dict[str, Any]
) -> None:
    before = repr((low, high))
    assert flat(deep_merge(low, high)) == flat(low) | flat(high)
    assert repr((low, high)) == before


@given(TABLES)
def test_merging_a_layer_with_nothing_or_with_itself_changes_nothing(table: dict[str, Any]) -> None:
    assert deep_merge(table, {}) == deep_merge({}, table) == deep_merge(table, table) == table


@given(TABLES, TABLES)
def test_policy_layers_that_share_no_key_may_come_in_any_order(a: dict[str, Any], b: dict[str, Any]) -> None:
    moved = {f"{key}2": value for key, value in b.items()}
    assert deep_merge(a, moved) == deep_merge(moved, a)
