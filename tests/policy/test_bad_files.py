"""Every wrong file under data/ is refused with the mistakes that its lines "# reported for line" list."""

from pathlib import Path

import pytest

from tests.policy.conftest import Etc
from vgpud.model.errors import ErrorCode, Exit, VgpuError
from vgpud.policy.load import check

DATA = Path(__file__).parent / "data"
FILES = sorted(DATA.glob("*/*.toml"))
REPORTED = "# reported for line "


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_mistake_is_reported_with_file_line_and_key(path: Path) -> None:
    lines = path.read_text().splitlines()
    expected = [line.removeprefix(REPORTED) for line in lines if line.startswith(REPORTED)]
    assert expected
    with pytest.raises(VgpuError) as caught:
        check(path)
    error = caught.value
    assert error.code is ErrorCode.BAD_POLICY
    assert error.code.exit_code is Exit.CONFIG
    assert [detail.removeprefix(f"{path}:").replace(": ", " ", 1) for detail in error.details] == expected
    assert all(len(detail.splitlines()) == 1 for detail in error.details)


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        # the messages of the standard parser vary between Python versions, but their positions do not
        ("version = 1\nversion = 1\n", ":2: version: stands twice: first on line 1; keep one of the two"),
        (
            "version = 1\n[[device]]\n[device.match]\n[device.match]\n",
            ":4: device[0].match: stands twice: first on line 3; keep one of the two",
        ),
        (
            "version = 1\n[[device]]\nmode = 'mig'\nmode = 'mps'\n[broken",
            ":4: device[0].mode: stands twice: first on line 3; keep one of the two",
        ),
        ("version = 1\n[planner\n", ":2: is not TOML: expected ']' at the end of a table declaration at"),
        (
            "version = 1\nmode = ",
            ":2: is not TOML: invalid value at the end of the file; text stands in quotes",
        ),
        (
            "version = 1\nmode = auto",
            ":2: is not TOML: invalid value at column 8; text stands in quotes, as in",
        ),
        ("version = 1\nname = 'a\nb'", ":2: is not TOML: "),
        ("version 1", ":1: is not TOML: expected '=' after a key in a key/value pair at column 9"),
        ("\ufeffversion = 1", ":1: is not TOML: invalid statement at column 1; save the file without a byte"),
        ("version = 1\nx = " + "9" * 5000, ": is not TOML: a number has more than 4300 digits"),
        ("version = 1\nx = " + "[" * 5000 + "]" * 5000, ":2: is nested more than 32 levels deep; a policy"),
        ("version = 1\n" + "a." * 100_000 + "a = 1", ":2: is nested more than 32 levels deep; a policy"),
        ("version = 1\n[" + "a." * 32 + "a]", ":2: is nested more than 32 levels deep; a policy"),
        ("version = 1\r\n[planner]\r\nstrategy = 3", ":3: planner.strategy: 3 is not one of pack, spread"),
        ("version = 0x" + "f" * 5000, ":1: version: is not a version known to"),
    ],
    ids=[
        "twice",
        "table twice",
        "key of a rule twice",
        "bracket",
        "end",
        "quotes",
        "newline",
        "equals",
        "bom",
        "digits",
        "nesting",
        "dots",
        "header",
        "crlf",
        "hex",
    ],
)
def test_a_file_that_is_not_toml_is_refused_with_its_line(tmp_path: Path, text: str, detail: str) -> None:
    path = tmp_path / "vgpud.toml"
    path.write_bytes(text.encode())
    with pytest.raises(VgpuError) as caught:
        check(path)
    (got,) = caught.value.details
    assert got.removeprefix(str(path)).startswith(detail)


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vgpud.toml"
    path.write_bytes(b"version = 1\n# caf\xe9\n")
    with pytest.raises(VgpuError, match=r"vgpud.toml:2: byte 17 \(0xe9\) is not UTF-8"):
        check(path)


def test_the_error_about_a_single_mistake_is_only_the_sentence_about_it(tmp_path: Path) -> None:
    path = tmp_path / "vgpud.toml"
    path.write_text("version = 1\nplaner = {}\n")
    with pytest.raises(VgpuError) as caught:
        check(path)
    assert caught.value.sentence == f"{path}:2: planer: is not a key that vgpud knows"
    assert caught.value.hint == "did you mean planner"


def test_the_hint_for_an_unknown_key_names_a_key_of_the_same_table_first(tmp_path: Path) -> None:
    """[[quota]] has no key `memory`. The hint names its `max_memory`, and not the `memory` of
    [device.mps].
    """
    path = tmp_path / "vgpud.toml"
    path.write_text('version = 1\n[[quota]]\nmemory = "100GiB"\n')
    with pytest.raises(VgpuError) as caught:
        check(path)
    assert caught.value.hint == "did you mean max_memory"


def test_mistakes_of_all_files_are_reported_together(etc: Etc) -> None:
    etc.write("lib/conf.d/10-a.toml", "[planner]\nstrategy = 'x'\nfoo = 1\n")
    etc.write("etc/vgpud.toml", "[[device]]\nmode = 1\n")
    etc.write("run/conf.d/20-b.toml", "not toml")
    etc.write("etc/conf.d/30-c.toml", "version = 2\n[planner]\nstrategy = 'pack'\n")
    (etc.root / "etc/conf.d/40-d.toml").mkdir()
    with pytest.raises(VgpuError) as caught:
        etc.load()
    details = [detail.removeprefix(f"{etc.root}/") for detail in caught.value.details]
    assert [":".join(detail.split(": ")[:2]) for detail in details] == [
        "lib/conf.d/10-a.toml:2:planner.strategy",
        "lib/conf.d/10-a.toml:3:planner.foo",
        "etc/vgpud.toml:1:version",
        "etc/vgpud.toml:2:device[0].mode",
        "run/conf.d/20-b.toml:1:is not TOML",
        "etc/conf.d/30-c.toml:1:version",
        "etc/conf.d/40-d.toml:is not a regular file; put a regular file there, or remove it",
    ]
    assert caught.value.sentence.startswith("the policy has 7 errors in 5 files, the first at ")


def test_a_policy_with_too_many_rules_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vgpud.toml"
    path.write_text("version = 1\n" + "[[device]]\n" * 257)
    with pytest.raises(VgpuError, match=":2: device: has 257 entries"):
        check(path)
