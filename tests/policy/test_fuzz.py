"""Any file is read as a policy or refused with VgpuError(BAD_POLICY). It never raises another exception."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.policy.toml_writer import documents
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.policy.effective import effective, leaves
from vgpud.policy.layers import PolicyPaths
from vgpud.policy.load import check, load
from vgpud.policy.locate import spell
from vgpud.policy.model import TABLES

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = [
    path.read_text()
    for path in [*sorted((ROOT / "configs/examples").glob("*.toml")), ROOT / "configs/vgpud.toml"]
]
KEYS = sorted({key for model in TABLES.values() for key in model.model_fields})
HEADERS = [f"[{name}]\n" for name in TABLES if name] + ["[[device]]\n"] * 3
SCALARS = ["1", "-1", "0", "true", "nan", "inf", "1e400", '"4GiB"', '"10G"', '"auto"', '"mps"', '""', "''"]
SCALARS += ["[]", "{}", "[1]", '["1g.5gb"]', "1979-05-27", '"""\n"""', "0xffffffffffffffffffff", '"\\u0000"']
LINES = st.builds("{} = {}\n".format, st.sampled_from(KEYS), st.sampled_from(SCALARS))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def try_file(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        loaded = check(path)
    except VgpuError as error:
        assert error.code is ErrorCode.BAD_POLICY
        assert error.details
        for detail in error.details:
            assert detail.startswith(str(path))
            assert len(detail.splitlines()) == 1
            assert len(detail) < 1000
            detail.encode()
    else:
        assert {spell(path) for path, _ in leaves(effective(loaded.policy))} == set(loaded.origins)


@given(st.text())
@example('version = 1\na = "\ud7ff\ue000\U0010ffff"')
def test_any_text_is_read_as_a_policy_or_refused(folder: Path, text: str) -> None:
    try_file(folder / "text.toml", text.encode())


@given(st.binary())
def test_any_bytes_are_read_as_a_policy_or_refused(folder: Path, content: bytes) -> None:
    try_file(folder / "bytes.toml", content)


@given(documents())
def test_any_toml_is_read_as_a_policy_or_refused(folder: Path, text: str) -> None:
    try_file(folder / "toml.toml", f"version = 1\n{text}".encode())


@given(st.lists(LINES | st.sampled_from(HEADERS), max_size=12).map("".join))
def test_a_policy_with_known_keys_in_wrong_places_is_read_or_refused(folder: Path, text: str) -> None:
    try_file(folder / "keys.toml", f"version = 1\n{text}".encode())


@st.composite
def mutated(draw: Any) -> str:
    text = draw(st.sampled_from(SHIPPED)).replace("\n#", "\n" if draw(st.booleans()) else "\n#")
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        cut = draw(st.integers(0, 12))
        put = draw(st.sampled_from(["", '"', "[", "]", "=", "\n", "0", ".", "'''", *SCALARS]) | LINES)
        text = text[:at] + put + text[at + cut :]
    return str(text)


@given(mutated())
def test_a_damaged_copy_of_a_shipped_file_is_read_or_refused(folder: Path, text: str) -> None:
    try_file(folder / "damaged.toml", text.encode())


BROKEN_LAYERS = st.lists(LINES | st.sampled_from(HEADERS), max_size=4).map("".join)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(BROKEN_LAYERS, min_size=3, max_size=3))
def test_any_policy_layers_are_merged_or_refused(folder: Path, texts: list[str]) -> None:
    paths = PolicyPaths(folder / "main.toml", folder / "vendor", None, folder / "admin")
    for directory, text in zip(("vendor", "admin"), texts[1:], strict=True):
        (folder / directory).mkdir(exist_ok=True)
        (folder / directory / "50-x.toml").write_text(text)
    paths.main.write_text(f"version = 1\n{texts[0]}")
    try:
        loaded = load(paths)
    except VgpuError as error:
        assert error.code is ErrorCode.BAD_POLICY
        assert error.details
    else:
        assert {origin.file for origin in loaded.origins.values()} <= {None, *loaded.files}
