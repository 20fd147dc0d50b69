"""The shipped policies do what their comments say, and the commented defaults are the defaults."""

import re
from pathlib import Path

import pytest

from vgpud.model.device import Device, Mig
from vgpud.model.quantity import parse_bytes
from vgpud.policy.effective import effective
from vgpud.policy.load import check
from vgpud.policy.model import TABLES, DeviceRule, Policy

ROOT = Path(__file__).resolve().parents[2]
MAIN = ROOT / "configs/vgpud.toml"
EXAMPLES = sorted((ROOT / "configs/examples").glob("*.toml"))
CLAIM = re.compile(
    r"#   device: (?P<name>.+), (?P<memory>[0-9.]+GiB), (?P<mig>mig|no mig)(, index (?P<index>\d+))?"
    r" -> (?P<mode>\w+)"
)


def claims(path: Path) -> list[tuple[Device, str]]:
    found = []
    for number, line in enumerate(path.read_text().splitlines()):
        if line.startswith("#   device:"):
            claim = CLAIM.fullmatch(line)
            assert claim, line
            # labels such as 140.4GiB are rounded and need not be whole bytes
            tenths = int(float(claim["memory"].removesuffix("GiB")) * 10)
            device = Device(
                uuid=f"GPU-{number}",
                index=int(claim["index"] or number),
                name=claim["name"],
                memory_total_bytes=tenths * parse_bytes("1GiB") // 10,
                mig=Mig(capable=claim["mig"] == "mig"),
            )
            found.append((device, claim["mode"]))
    return found


def test_the_four_example_policies_exist() -> None:
    assert [path.stem for path in EXAMPLES] == ["dgx-mixed", "hpc", "inference-node", "workstation"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_each_device_of_an_example_gets_the_mode_that_the_comments_claim(path: Path) -> None:
    policy = check(path).policy
    expected = claims(path)
    assert len(expected) >= 5
    assert [policy.rule_for(device).mode for device, _ in expected] == [mode for _, mode in expected]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_comments_of_each_example_name_a_device_for_every_rule(path: Path) -> None:
    policy = check(path).policy
    used = {id(policy.rule_for(device)) for device, _ in claims(path)}
    assert used == {id(rule) for rule in policy.device}


def uncommented(text: str, table: str) -> dict[str, str]:
    """Returns the commented `#key = value` lines below the header of `table`, or those at the top for ""."""
    found: dict[str, str] = {}
    current = ""
    for line in text.splitlines():
        header = re.fullmatch(r"#?\[+([a-z.]+)\]+", line)
        key = re.fullmatch(r"#?([a-z0-9_]+) = (.+)", line)
        if header:
            current = header[1]
        elif key and current == table:
            found[key[1]] = key[2]
    return found


def test_the_shipped_main_policy_file_keeps_all_defaults() -> None:
    assert effective(check(MAIN).policy) == effective(Policy())


@pytest.mark.parametrize("table", sorted(TABLES))
def test_the_main_policy_file_explains_every_key(table: str) -> None:
    tables = {name.rpartition(".")[2] for name in TABLES if name.rpartition(".")[0] == table and name}
    assert set(uncommented(MAIN.read_text(), table)) == set(TABLES[table].model_fields) - tables


def test_the_main_policy_file_without_its_comment_signs_loads_with_the_defaults(tmp_path: Path) -> None:
    text = re.sub(r"^#(?=\[|[a-z0-9_]+ = )", "", MAIN.read_text(), flags=re.MULTILINE)
    text = text.replace(
        "GPU-00000000-0000-0000-0000-000000000000", "GPU-12345678-0000-0000-0000-000000000000"
    )
    path = tmp_path / "vgpud.toml"
    path.write_text(text)
    policy = check(path).policy
    (rule,) = policy.device
    default = DeviceRule()
    assert policy.planner == Policy().planner
    assert rule.mode == default.mode
    assert rule.preload is not None
    # `never`, the default of these keys, cannot be written in TOML
    assert (rule.preload.idle_suspend, rule.preload.turn) == (600, 30)
    never = {"idle_suspend": None, "turn": None, "evictable": None}
    assert rule.preload.model_copy(update=never) == default.settings_preload()
    assert rule.mps == default.settings_mps()
    assert rule.mig is not None
    # `all`, the default of this key, cannot be written in TOML
    assert rule.mig.profiles == ("1g.18gb", "3g.71gb")
    assert rule.mig.change_mode == default.settings_mig().change_mode
    # the default of this key, no layout, cannot be written in TOML
    assert rule.mig.layout == ("all-balanced",)
    assert rule.mig.dynamic is False
    assert rule.mig.foreign == default.settings_mig().foreign
    assert rule.mig.on_top == default.settings_mig().on_top
    assert rule.mig.reset == default.settings_mig().reset
    assert all(value is not None for value in dict(rule.match).values())


def test_the_manual_names_every_key_of_the_policy() -> None:
    manual = (ROOT / "docs/policy.md").read_text()
    for table, model in TABLES.items():
        for key in model.model_fields:
            assert f"`{key}`" in manual or f"[{table}.{key}]".replace("[.", "[") in manual, (table, key)
