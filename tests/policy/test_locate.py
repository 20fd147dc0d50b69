"""The line locator agrees with the standard parser on every key, and with the text on every line."""

import contextlib
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from tests.policy.toml_writer import documents
from vgpud.policy.locate import MAX_DEPTH, KeyPath, TooDeepError, locate, quote, spell


def paths_of(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    children: Any = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    for key, inner in children:
        yield (*path, key), inner
        yield from paths_of(inner, (*path, key))


def test_the_lines_of_toml_headers_dotted_keys_and_arrays_are_found() -> None:
    text = '''\
version = 1 # comment

[planner]
strategy = """
pack"""

[[device]]
mode = "mig"
match.index = 0
[device.mig]
profiles = [ # two
  "1g.18gb",
  "2g.35gb" ]

[[device]]
match = { name = "x = [y]", "memory_min" = '1GiB' }
[ device . "preload" ]
'''
    assert locate(text) == {
        ("version",): 1,
        ("planner",): 3,
        ("planner", "strategy"): 4,
        ("device",): 7,
        ("device", 0): 7,
        ("device", 0, "mode"): 8,
        ("device", 0, "match"): 9,
        ("device", 0, "match", "index"): 9,
        ("device", 0, "mig"): 10,
        ("device", 0, "mig", "profiles"): 11,
        ("device", 0, "mig", "profiles", 0): 12,
        ("device", 0, "mig", "profiles", 1): 13,
        ("device", 1): 15,
        ("device", 1, "match"): 16,
        ("device", 1, "match", "name"): 16,
        ("device", 1, "match", "memory_min"): 16,
        ("device", 1, "preload"): 17,
    }


def test_the_lines_of_keys_in_nested_arrays_of_tables_are_found() -> None:
    text = "[[a]]\n[[a.b]]\nc=1\n[[a.b]]\nc=2\n[[a]]\n[[a.b]]\nc=3\n[a.b.d]\ne=4\n"
    lines = locate(text)
    assert [lines["a", 0, "b", 0, "c"], lines["a", 0, "b", 1, "c"], lines["a", 1, "b", 0, "c"]] == [3, 5, 8]
    assert lines["a", 1, "b", 0, "d", "e"] == 10


@given(documents())
def test_the_locator_of_toml_keys_agrees_with_the_parser_and_the_text(text: str) -> None:
    paths = dict(paths_of(tomllib.loads(text)))
    lines = locate(text)
    assert lines.keys() == paths.keys()
    rows = text.replace("\r\n", "\n").split("\n")
    for path, value in paths.items():
        if not isinstance(value, dict | list):
            mark = str(getattr(value, "year", value))[:4]
            assert mark in rows[lines[path] - 1]


FRAGMENTS = ["a", "b", ".", "=", "1", "[", "]", "[[", "]]", "{", "}", ",", " ", "\n", "\r\n", "#", '"', "'"]
FRAGMENTS += ['"""', "'''", "\\", "a=1\n", "[a]\n", "[[b]]\n", '"x"', "b.a=[", "é", "true"]


@st.composite
def nearly_documents(draw: Any) -> str:
    """Draws a document from which one part is cut out and into which another is inserted. Often it is still
    valid TOML.
    """
    text = draw(documents())
    start = draw(st.integers(0, len(text)))
    end = start + draw(st.integers(0, 5))
    return str(text[:start] + draw(st.sampled_from(["", *FRAGMENTS])) + text[end:])


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join) | nearly_documents())
@example("a = ''''''\nb = ''")
@example('a = """"""\nb = ""')
@example('a = """""x"""""\nb=1')
@example("a = []\n[[b]]\n[b.c]\n[[b]]\n[b.c]")
def test_the_locator_gives_a_line_to_every_key_that_tomllib_parses(text: str) -> None:
    try:
        data = tomllib.loads(text)
    except ValueError:
        event("not TOML")
        return
    event("TOML")
    assert locate(text).keys() == dict(paths_of(data)).keys()


@given(st.text() | st.lists(st.sampled_from(FRAGMENTS)).map("".join))
def test_text_that_is_not_toml_is_refused_in_bounded_time(text: str) -> None:
    with contextlib.suppress(ValueError, TooDeepError):
        locate(text)


@pytest.mark.parametrize(
    "text", ["a", "= 1", "[a", "[[a]", "a = ['x' 2]", "a = {b='' c=2}", "a = [", "a = {b"]
)
def test_broken_toml_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="line 1 is not TOML"):
        locate(text)


def test_the_nesting_of_toml_is_bounded() -> None:
    within = f"a = {'[' * (MAX_DEPTH - 1)}1{']' * (MAX_DEPTH - 1)}"
    assert max(map(len, locate(within))) == MAX_DEPTH
    for beyond in (within.replace("1", "[1]"), "a." * MAX_DEPTH + "a = 1", f"[{'a.' * MAX_DEPTH}a]"):
        with pytest.raises(TooDeepError, match="line 2 is nested more than 32 levels deep"):
            locate(f"\n{beyond}")


def test_a_path_of_toml_keys_is_written_on_one_line() -> None:
    assert spell(()) == ""
    assert spell(("device", 2, "match", "memory_min")) == "device[2].match.memory_min"
    assert spell(("a b", 'c"', "d\ne\x7f\U000e0001")) == '"a b"."c\\""."d\\u000Ae\\u007F\\U000E0001"'


@given(st.text())
def test_a_text_is_quoted_as_valid_toml_on_one_line(text: str) -> None:
    quoted = quote(text)
    assert len(quoted.splitlines()) == 1
    assert tomllib.loads(f"key = {quoted}")["key"] == text
