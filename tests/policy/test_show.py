"""The output of `policy check` and `policy show --origin`."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.conftest import Etc
from vgpud.model.errors import VgpuError
from vgpud.policy.effective import as_toml, digest, effective, leaves
from vgpud.policy.fields import Match
from vgpud.policy.load import LoadedPolicy, check
from vgpud.policy.locate import spell
from vgpud.policy.model import (
    DeviceRule,
    MigSettings,
    MpsSettings,
    PlannerSettings,
    Policy,
    PoolSettings,
    PreloadSettings,
)


def rows_of(loaded: LoadedPolicy) -> list[tuple[str, str, str]]:
    """Each effective key, its value as TOML, and where it comes from."""
    return [
        (spell(path), as_toml(value), str(loaded.origins[spell(path)]))
        for path, value in leaves(effective(loaded.policy))
    ]


def test_every_effective_policy_key_is_shown_with_its_value_and_origin(etc: Etc) -> None:
    etc.write("lib/conf.d/10-vendor.toml", "[planner]\nstrategy = 'spread'\n")
    etc.write(
        "etc/vgpud.toml",
        "version = 1\n\n[[device]]\nmatch = { name = 'a\"b', memory_min = 1610612736, memory_max = '80GB' }\n"
        "[device.mig]\nprofiles = [\n  '1g.18gb', '2g.35gb' ]\n[[device]]\nmode = 'exclusive'\n",
    )
    rows = [(key, value, origin.removeprefix(f"{etc.root}/")) for key, value, origin in rows_of(etc.load())]
    assert rows == [
        ("version", "1", "etc/vgpud.toml:1"),
        ("planner.strategy", '"spread"', "lib/conf.d/10-vendor.toml:2"),
        ("planner.user_places_percent", "75", "built-in"),
        ("pool.host_memory_reserve", '"2GiB"', "built-in"),
        ("pool.unevictable", '"checkpoint"', "built-in"),
        ("device[0].match.name", '"a\\"b"', "etc/vgpud.toml:4"),
        ("device[0].match.memory_min", '"1536MiB"', "etc/vgpud.toml:4"),
        ("device[0].match.memory_max", '"78125000KiB"', "etc/vgpud.toml:4"),
        ("device[0].mode", '"auto"', "built-in"),
        ("device[0].on_sick", '"drain"', "built-in"),
        ("device[0].preload.max_tenants", "64", "built-in"),
        ("device[0].preload.memory_overcommit", "1.0", "built-in"),
        ("device[0].preload.share_policy", '"hard"', "built-in"),
        ("device[0].preload.engine", '"auto"', "built-in"),
        ("device[0].preload.min_residence", '"1min"', "built-in"),
        ("device[0].preload.memory_limit", '"driver"', "built-in"),
        ("device[0].preload.on_bypass", '"report"', "built-in"),
        ("device[0].mps.max_tenants", "16", "built-in"),
        ("device[0].mps.overcommit_percent", "100.0", "built-in"),
        ("device[0].mps.users", '"same"', "built-in"),
        ("device[0].mps.processes_per_tenant", "1", "built-in"),
        ("device[0].mps.memory", '"driver"', "built-in"),
        ("device[0].mps.exclusive_process", "false", "built-in"),
        ("device[0].mps.static_partitions", "false", "built-in"),
        ("device[0].mps.client_priority", '"normal"', "built-in"),
        ("device[0].mps.check_seconds", "10.0", "built-in"),
        ("device[0].mps.hang_seconds", "30.0", "built-in"),
        ("device[0].mig.profiles", '["1g.18gb", "2g.35gb"]', "etc/vgpud.toml:6"),
        ("device[0].mig.change_mode", "true", "built-in"),
        ("device[0].mig.foreign", '"keep"', "built-in"),
        ("device[0].mig.on_top", "[]", "built-in"),
        ("device[0].mig.reset", "false", "built-in"),
        ("device[1].mode", '"exclusive"', "etc/vgpud.toml:9"),
        ("device[1].on_sick", '"drain"', "built-in"),
        ("metrics.listen", '""', "built-in"),
        ("metrics.workloads", "true", "built-in"),
        ("http.listen", '""', "built-in"),
        ("quota", "[]", "built-in"),
    ]


def test_a_policy_without_rules_is_shown_as_such(etc: Etc) -> None:
    assert rows_of(etc.load()) == [
        ("version", "1", "built-in"),
        ("planner.strategy", '"pack"', "built-in"),
        ("planner.user_places_percent", "75", "built-in"),
        ("pool.host_memory_reserve", '"2GiB"', "built-in"),
        ("pool.unevictable", '"checkpoint"', "built-in"),
        ("device", "[]", "built-in"),
        ("metrics.listen", '""', "built-in"),
        ("metrics.workloads", "true", "built-in"),
        ("http.listen", '""', "built-in"),
        ("quota", "[]", "built-in"),
    ]


def test_a_check_of_one_policy_file_ignores_the_drop_ins(etc: Etc) -> None:
    main = etc.write("etc/vgpud.toml", "version = 1\n")
    etc.write("etc/conf.d/50-x.toml", "not toml")
    assert check(main).files == (main,)


def test_a_drop_in_without_a_version_passes_the_policy_check(
    etc: Etc, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop_in = etc.write("etc/conf.d/50-x.toml", "[planner]\n")
    check(drop_in)
    monkeypatch.chdir(drop_in.parent)
    check(Path(drop_in.name))
    with pytest.raises(VgpuError, match="version: is missing"):
        check(etc.write("other/50-x.toml", "[planner]\n"))


@pytest.mark.parametrize("name", ["nowhere.toml", "a\0b", "x" * 300])
def test_a_check_of_an_absent_policy_file_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(VgpuError, match="cannot be read"):
        check(tmp_path / name)


RULES = st.builds(
    DeviceRule,
    match=st.builds(
        Match,
        name=st.none() | st.text(min_size=1),
        index=st.none() | st.integers(0, 9),
        memory_min=st.none() | st.integers(1, 2**50),
        mig_capable=st.none() | st.booleans(),
    ),
    mode=st.sampled_from(["auto", "mps", "unmanaged"]),
    mps=st.none() | st.builds(MpsSettings, overcommit_percent=st.floats(100, 1000)),
    mig=st.none() | st.builds(MigSettings, profiles=st.none() | st.just(("1g.18gb",))),
    preload=st.none() | st.builds(PreloadSettings, max_tenants=st.integers(1, 9)),
)
POLICIES = st.builds(
    Policy,
    planner=st.builds(PlannerSettings, strategy=st.sampled_from(["pack", "spread"])),
    pool=st.builds(PoolSettings, host_memory=st.none() | st.integers(1, 1 << 56)),
    device=st.lists(RULES, max_size=3).map(tuple),
)


@given(POLICIES)
def test_the_printed_effective_policy_loads_as_the_same_policy(policy: Policy) -> None:
    plain: dict[str, Any] = effective(policy)
    again = Policy.model_validate(plain)
    assert effective(again) == plain
    assert digest(again) == digest(policy)


@given(POLICIES)
def test_every_policy_value_is_shown_as_toml_that_reads_back(policy: Policy) -> None:
    for _, value in leaves(effective(policy)):
        shown = as_toml(value)
        assert len(shown.splitlines()) == 1
        assert tomllib.loads(f"x = {shown}")["x"] == value
