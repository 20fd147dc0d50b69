"""Policy rules that hide others. A rule that could apply is never reported as hidden."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpud.model.device import Device, Mig
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import Mode
from vgpud.policy.fields import Match
from vgpud.policy.model import DeviceRule, MigSettings, MpsSettings, Policy, PreloadSettings
from vgpud.policy.rules import subsumes

H200 = Device("GPU-h", 3, "NVIDIA H200", memory_total_bytes=140 * GIB, mig=Mig(capable=True))


def sizes(**words: str) -> dict[str, Any]:
    """Sizes as texts, which pydantic parses as from a file."""
    return dict(words)


@pytest.mark.parametrize(
    ("match", "covers"),
    [
        (Match(), True),
        (Match(uuid="GPU-h"), True),
        (Match(uuid="GPU-"), False),
        (Match(index=(3,)), True),
        (Match(index=(0,)), False),
        (Match(name="NVIDIA H200"), True),
        (Match(name="NVIDIA*"), True),
        (Match(name="*H[12]00"), True),
        (Match(name="H200"), False),
        (Match(name="nvidia*"), False),
        (Match(**sizes(memory_min="140GiB")), True),
        (Match(memory_min=140 * GIB + 1), False),
        (Match(**sizes(memory_max="140GiB")), True),
        (Match(**sizes(memory_max="139.5GiB")), False),
        (Match(mig_capable=True), True),
        (Match(mig_capable=False), False),
        (Match(index=(3,), name="NVIDIA*", mig_capable=False), False),
        (Match(index=(3,), name="NVIDIA*", mig_capable=True), True),
    ],
)
def test_a_match_covers_a_device_if_all_its_keys_agree(match: Match, covers: bool) -> None:
    assert match.covers(H200) is covers


@pytest.mark.parametrize(
    ("wide", "narrow", "hides"),
    [
        (Match(), Match(), True),
        (Match(), Match(name="*", index=(1,), mig_capable=True), True),
        (Match(name="NVIDIA*"), Match(name="NVIDIA H200*"), True),
        (Match(name="NVIDIA*"), Match(name="NVIDIA H?00"), True),
        # the first rule hides the second one, but the check does not analyse character classes such as [AH]
        (Match(name="*"), Match(name="[AH]100"), False),
        (Match(name="NVIDIA H200*"), Match(name="NVIDIA*"), False),
        (Match(name="NVIDIA H?00"), Match(name="NVIDIA H*00"), False),
        (Match(name="N[*]"), Match(name="N*"), False),
        (Match(name="N*]"), Match(name="N[ab]"), False),
        # the first rule hides the second one, but the check does not find it
        (Match(name="*"), Match(index=(1,)), False),
        (Match(**sizes(memory_min="10GiB")), Match(**sizes(memory_min="20GiB")), True),
        (Match(**sizes(memory_min="20GiB")), Match(**sizes(memory_min="10GiB")), False),
        (Match(**sizes(memory_max="20GiB")), Match(**sizes(memory_max="10GiB")), True),
        (Match(**sizes(memory_min="10GiB")), Match(**sizes(memory_max="20GiB")), False),
        (Match(mig_capable=True), Match(mig_capable=True, index=(2,)), True),
        (Match(mig_capable=True), Match(mig_capable=False), False),
        (Match(uuid="GPU-a"), Match(uuid="GPU-a", index=(2,)), True),
        (Match(uuid="GPU-a"), Match(index=(2,)), False),
        (Match(index=(0,)), Match(), False),
        (Match(index=(0,)), Match(index=(0,)), True),
    ],
)
def test_a_match_hides_another_if_it_covers_all_devices_of_the_other(
    wide: Match, narrow: Match, hides: bool
) -> None:
    assert subsumes(wide, narrow) is hides


def maybe(values: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.none() | values


PATTERNS = st.text("ab*?[]!", min_size=1, max_size=5)
SIZES = st.integers(1, 4)
MATCHES = st.builds(
    Match,
    uuid=maybe(st.sampled_from(["GPU-a", "GPU-b"])),
    index=maybe(st.integers(0, 2)),
    name=maybe(PATTERNS),
    memory_min=maybe(SIZES),
    memory_max=maybe(SIZES),
    mig_capable=maybe(st.booleans()),
)
DEVICES = st.builds(
    Device,
    uuid=st.sampled_from(["GPU-a", "GPU-b"]),
    index=st.integers(0, 2),
    name=st.text("ab[]*?", max_size=4),
    memory_total_bytes=SIZES,
    mig=st.builds(Mig, capable=st.booleans()),
)


@given(MATCHES, MATCHES, st.lists(DEVICES, min_size=1, max_size=8))
def test_a_hidden_match_covers_only_devices_that_the_hiding_match_covers(
    wide: Match, narrow: Match, devices: list[Device]
) -> None:
    if subsumes(wide, narrow):
        assert all(wide.covers(device) for device in devices if narrow.covers(device))


@given(PATTERNS, PATTERNS, st.lists(st.text("ab[]*?!", max_size=5), min_size=1, max_size=20))
def test_a_wider_name_pattern_matches_all_names_of_the_narrower_pattern(
    wide: str, narrow: str, names: list[str]
) -> None:
    if subsumes(Match(name=wide), Match(name=narrow)):
        for name in names:
            device = Device("GPU-a", 0, name)
            assert Match(name=wide).covers(device) or not Match(name=narrow).covers(device)


@given(st.lists(MATCHES, max_size=4), DEVICES)
def test_a_rule_hidden_by_an_earlier_one_never_applies(matches: list[Match], device: Device) -> None:
    rules = tuple(DeviceRule(match=match) for match in matches)
    taken = Policy(device=rules).rule_for(device)
    for number, rule in enumerate(rules):
        if any(subsumes(earlier.match, rule.match) for earlier in rules[:number]):
            assert taken is not rule


def test_a_setting_that_a_rule_lacks_has_its_default() -> None:
    assert DeviceRule().settings_preload() == PreloadSettings(max_tenants=64)
    assert DeviceRule().settings_mps() == MpsSettings(max_tenants=16, overcommit_percent=100.0)
    assert DeviceRule().settings_mig() == MigSettings(profiles=None, change_mode=True)
    assert DeviceRule(mps=MpsSettings(max_tenants=3)).settings_mps().max_tenants == 3


@pytest.mark.parametrize("mode", [mode for mode in Mode if mode is not Mode.UNMANAGED])
def test_a_rule_allows_only_its_mode_and_mode_auto_allows_all(mode: Mode) -> None:
    assert DeviceRule().allows(mode)
    assert [m for m in Mode if DeviceRule(mode=mode.value).allows(m)] == [mode]


def test_an_unmanaged_device_is_never_allocated() -> None:
    assert not any(DeviceRule(mode="unmanaged").allows(mode) for mode in Mode)
    assert not DeviceRule().allows(Mode.UNMANAGED)
