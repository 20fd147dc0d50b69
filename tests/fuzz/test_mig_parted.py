"""Files for mig-parted: the parser returns a configuration, or BAD_REQUEST with one sentence."""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpud.ctl.mig_parted import read
from vgpud.model.errors import ErrorCode, VgpuError

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "devices": st.sampled_from(["all", [0], [0, 7], [-1], [True], "none", None]) | JSON,
        "device-filter": st.sampled_from(["0x233510DE", ["0x233510DE", "0x20B010DE"], "zz", [None]]) | JSON,
        "mig-enabled": st.booleans() | JSON,
        "mig-devices": st.dictionaries(
            st.sampled_from(["1g.5gb", "1c.2g.10gb", ""]) | st.text(max_size=6),
            st.integers() | JSON,
            max_size=3,
        )
        | JSON,
        "other": JSON,
    },
)
FILE = st.fixed_dictionaries(
    {
        "version": st.just("v1"),
        "mig-configs": st.dictionaries(st.text(max_size=6), st.lists(ENTRY, max_size=3)),
    }
)


@pytest.fixture(scope="module")
def path() -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        yield Path(folder) / "config.yaml"


def check(path: Path, content: bytes, config: str | None = None) -> None:
    path.write_bytes(content)
    try:
        name, entries = read(str(path), config)
    except VgpuError as error:
        assert error.code in (ErrorCode.BAD_REQUEST, ErrorCode.UNSUPPORTED)
        assert len(str(error).splitlines()) == 1
    else:
        assert entries
        assert config in (None, name)


@settings(max_examples=examples(20))
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@example(b"2001-99-99")  # this text has the form of a date, but is invalid
@example(b"0b_")  # this text has the form of a number, but is invalid
@example(b"[" * 1200)
@example(b"a: &a [*a]")
@example(b"\xff\xfe")
def test_any_bytes_in_a_mig_parted_file_are_understood_or_refused(path: Path, content: bytes) -> None:
    check(path, content)
    check(path, b"version: v1\nmig-configs:\n  c:\n  - " + content, "c")


@settings(max_examples=examples(25))
@given(FILE | JSON)
def test_any_document_in_a_mig_parted_file_is_understood_or_refused(path: Path, document: object) -> None:
    check(path, json.dumps(document).encode())  # JSON is valid YAML
    if isinstance(document, dict) and isinstance(names := document.get("mig-configs"), dict):
        for name in names:
            check(path, json.dumps(document).encode(), name)
