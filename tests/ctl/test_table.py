"""vgpuctl's tables are aligned and safe for a terminal, whatever its width."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl import tables
from vgpud.ctl.table import GAP, Column, Table, clean, facts, render, width
from vgpud.ctl.terminal import wants_color

TEXT = st.text(max_size=12)
SHAPES = st.tuples(st.booleans(), st.booleans(), st.booleans())


def test_numbers_are_aligned_right_and_texts_left() -> None:
    table = Table(
        (Column("N", right=True), Column("NAME"), Column("WHY")), [("5", "a", "x"), ("10", "bcdef", "")]
    )
    assert render(table, wide=False, headers=True) == [" N  NAME   WHY", " 5  a      x", "10  bcdef  -"]
    assert render(table, wide=False, headers=False) == [" 5  a      x", "10  bcdef  -"]


def test_wide_columns_are_printed_only_with_the_wide_format() -> None:
    table = Table((Column("A"), Column("B", wide=True)), [("1", "2")])
    assert render(table, wide=False, headers=True) == ["A", "1"]
    assert render(table, wide=True, headers=True) == ["A  B", "1  2"]


def test_an_empty_table_still_prints_its_headers() -> None:
    assert render(Table((Column("A"),), []), wide=False, headers=True) == ["A"]
    assert render(Table((Column("A"),), []), wide=False, headers=False) == []


def test_a_table_of_facts_leaves_out_facts_without_a_value() -> None:
    assert render(facts([("a", "1"), ("long", "2"), ("none", "")]), False, True) == ["a:     1", "long:  2"]


def test_color_does_not_move_columns() -> None:
    table = Table((Column("S", styles={"bad": "red"}), Column("T")), [("bad", "x"), ("good", "y")])
    painted = render(table, False, True, lambda text, style: f"<{text}>" if style else text)
    assert painted == ["<S>     <T>", "<bad>   x", "good  y"]


@pytest.mark.parametrize(
    ("text", "cells"), [("abc", 3), ("träning", 7), ("設定", 4), ("e\N{COMBINING ACUTE ACCENT}", 1), ("", 0)]
)
def test_a_wide_character_counts_two_columns(text: str, cells: int) -> None:
    assert width(text) == cells


def test_a_label_sends_no_control_characters_to_the_terminal() -> None:
    assert clean("a\x1b[2J\r\nb\N{RIGHT-TO-LEFT OVERRIDE}") == "a\\x1b[2J\\r\\nb\\u202e"


@given(st.lists(st.tuples(TEXT, TEXT, TEXT), max_size=6), SHAPES)
def test_every_line_of_a_table_is_aligned_and_printable(
    rows: list[tuple[str, str, str]], right: tuple[bool, ...]
) -> None:
    columns = [Column(name, right=side) for name, side in zip("XYZ", right, strict=True)]
    lines = render(Table(columns, rows), wide=False, headers=True)
    assert len(lines) == len(rows) + 1
    assert all(line.isprintable() for line in lines)
    cleaned = [[clean(cell) or "-" for cell in row] for row in rows]
    first = max([1, *(width(row[0]) for row in cleaned)])
    for line, row in zip(lines[1:], cleaned, strict=True):
        blanks = " " * (first - width(row[0]))
        start = blanks + row[0] if right[0] else row[0] + blanks
        assert line.startswith(start + GAP)
        assert all(cell in line for cell in row)


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("choice", "tty", "environment", "wanted"),
    [
        ("auto", True, {}, True),
        ("auto", False, {}, False),
        ("auto", True, {"NO_COLOR": "1"}, False),
        ("auto", True, {"NO_COLOR": ""}, True),
        ("auto", True, {"TERM": "dumb"}, False),
        ("auto", False, {"FORCE_COLOR": "1"}, True),
        ("auto", False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, True),
        ("always", False, {"NO_COLOR": "1"}, True),
        ("never", True, {"FORCE_COLOR": "1"}, False),
    ],
)
def test_color_depends_on_the_option_the_terminal_and_the_environment(
    choice: str, tty: bool, environment: dict[str, str], wanted: bool
) -> None:
    assert wants_color(choice, Tty() if tty else io.StringIO(), environment) is wanted


def test_devices_with_equal_values_share_a_line() -> None:
    said = [pb.Reason(device_uuid=f"GPU-{n}{n}-4000", sentence="too small") for n in range(3)]
    taken = pb.Reason(device_uuid="GPU-aa-1", taken=True, mode="mig", sentence="fits")
    table = tables.reasons([taken, *said])
    assert table.rows == [("yes", "GPU-aa", "mig", "fits"), ("no", "GPU-00 and 2 more", "", "too small")]


def test_equal_slices_of_an_allocation_are_shown_as_a_count_and_one_size() -> None:
    parts = [pb.Slice(device_uuid=f"GPU-{n}", mode="preload", memory_bytes=2**30) for n in range(2)]
    (row,) = tables.allocations([pb.Allocation(id="a", slices=parts)], 0).rows
    assert row[5] == "2 x 1GiB"


@pytest.mark.parametrize(
    ("mode", "policy", "shown"),
    [
        ("preload", "mps", "preload, mps waits"),
        ("preload", "preload", "preload"),
        ("preload", "auto", "preload"),
        ("", "mps", "idle"),
    ],
)
def test_a_device_row_shows_the_mode_that_the_policy_sets_once_its_tenants_have_left(
    mode: str, policy: str, shown: str
) -> None:
    row = tables.devices([pb.Device(mode=mode, policy_mode=policy)]).rows[0]
    assert row[3] == shown
