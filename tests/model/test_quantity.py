"""Quantities are exact: a text is read as exactly its value, or is refused with a hint."""

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import (
    GIB,
    KIB,
    MAX_BYTES,
    MIB,
    TIB,
    UNITS,
    Percent,
    check_bytes,
    check_limit,
    format_bytes,
    parse_bytes,
    show_bytes,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1B", 1),
        ("1KiB", KIB),
        ("1Ki", KIB),
        ("4GiB", 4 * GIB),
        ("4Gi", 4 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("0.5KiB", 512),
        ("1.50GiB", 3 * GIB // 2),
        ("512 MiB", 512 * MIB),
        ("  80GB\n", 80 * 10**9),
        ("1kB", 1000),
        ("0.001kB", 1),
        ("2.5MB", 2_500_000),
        ("1TB", 10**12),
        ("1TiB", TIB),
        ("007MiB", 7 * MIB),
        ("65536TiB", MAX_BYTES),
        ("0.00000000000000001TB", None),
        ("0.000000000931322574615478515625GiB", 1),
    ],
)
def test_a_size_is_read_exactly_or_refused(text: str, value: int | None) -> None:
    if value is None:
        with pytest.raises(VgpuError):
            parse_bytes(text)
    else:
        assert parse_bytes(text) == value


@pytest.mark.parametrize(
    ("text", "sentence", "hint"),
    [
        ("10G", "'G' can mean 1000s or 1024s", "say 10GiB (1024s) or 10GB (1000s)"),
        ("10g", "'g' can mean 1000s or 1024s", "say 10GiB (1024s) or 10GB (1000s)"),
        ("1.5g", "'g' can mean 1000s or 1024s", "say 1.5GiB (1024s) or 1.5GB (1000s)"),
        ("0m", "it must be more than 0", "ask for at least 1MiB, or leave it out"),
        ("0", "it must be more than 0", "ask for at least 1MiB, or leave it out"),
        ("8 K", "'K' can mean 1000s or 1024s", "say 8KiB (1024s) or 8kB (1000s)"),
        ("8KB", "'KB' can mean 1000s or 1024s", "say 8KiB (1024s) or 8kB (1000s)"),
        ("3gb", "'gb' can mean 1000s or 1024s", "say 3GiB (1024s) or 3GB (1000s)"),
        ("4gib", "unit 'gib' is not known", "say 4GiB"),
        ("4b", "unit 'b' is not known", "say 4B"),
        ("4bytes", "unit 'bytes' is not known", "use KiB, MiB, GiB, TiB, kB, MB, GB or TB"),
        ("4PiB", "unit 'PiB' is not known", "use KiB, MiB, GiB, TiB, kB, MB, GB or TB"),
        ("4096", "it has no unit", "say 4096MiB, 4096GiB or 4096B"),
        ("0GiB", "it must be more than 0", "ask for at least 1MiB, or leave it out"),
        ("0.0GiB", "it must be more than 0", "ask for at least 1MiB, or leave it out"),
        ("-4GiB", "it must be more than 0", "ask for at least 1MiB, or leave it out"),
        ("1.5B", "it lies between 1 and 2 bytes", "use a fraction that comes out in whole bytes"),
        ("0.3GiB", "it lies between 322122547 and 322122548 bytes", "use a fraction"),
        ("65537TiB", "it is more than any device holds", "check the unit"),
        ("abc", "it is not a number with a unit", "write it as in 4GiB, 1.5GiB or 80GB"),
        ("", "it is not a number with a unit", "write it as in"),
        ("GiB", "it is not a number with a unit", "write it as in"),
        ("nan", "it is not a number with a unit", "write it as in"),
        ("infGiB", "it is not a number with a unit", "write it as in"),
        ("1e3MiB", "it is not a number with a unit", "write it as in"),
        ("0x10MiB", "it is not a number with a unit", "write it as in"),
        ("1_000MiB", "it is not a number with a unit", "write it as in"),
        ("1,5GiB", "it is not a number with a unit", "write it as in"),
        (".5GiB", "it is not a number with a unit", "write it as in"),
        ("5.GiB", "it is not a number with a unit", "write it as in"),
        ("4\nGiB", "it is not a number with a unit", "write it as in"),
        ("٤GiB", "it is not a number with a unit", "write it as in"),
        ("4GiB 4GiB", "it is not a number with a unit", "write it as in"),
        ("9" * 5000 + "GiB", "it has 5003 characters", "write it as in"),
    ],
)
def test_a_refused_size_is_answered_with_a_hint(text: str, sentence: str, hint: str) -> None:
    with pytest.raises(VgpuError) as caught:
        parse_bytes(text)
    assert caught.value.code is ErrorCode.BAD_QUANTITY
    assert caught.value.sentence.endswith(sentence)
    assert hint in caught.value.hint
    assert len(caught.value.sentence) < 200


def test_digits_beyond_the_28th_of_a_size_are_not_rounded_away() -> None:
    # the default decimal context would round this value to 1 GiB
    with pytest.raises(VgpuError, match="lies between 1073741824 and 1073741825"):
        parse_bytes("1." + "0" * 30 + "1GiB")


@given(
    whole=st.integers(0, 10**18),
    fraction=st.text("0123456789", max_size=20),
    unit=st.sampled_from(sorted(UNITS)),
    gap=st.sampled_from(["", " ", "  "]),
)
@example(whole=1, fraction="5", unit="GiB", gap="")
def test_a_parsed_size_equals_the_one_by_rational_arithmetic(
    whole: int, fraction: str, unit: str, gap: str
) -> None:
    number = f"{whole}.{fraction}" if fraction else str(whole)
    exact = Fraction(number) * UNITS[unit]
    if exact.denominator == 1 and 0 < exact <= MAX_BYTES:
        assert parse_bytes(f"{number}{gap}{unit}") == exact
    else:
        with pytest.raises(VgpuError):
            parse_bytes(f"{number}{gap}{unit}")


@given(st.integers(1, MAX_BYTES) | st.integers(1, MAX_BYTES // GIB).map(lambda n: n * GIB))
def test_a_formatted_size_is_parsed_to_the_same_size(value: int) -> None:
    assert parse_bytes(format_bytes(value)) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0B"), (1, "1B"), (1024, "1KiB"), (1025, "1025B"), (3 * GIB // 2, "1536MiB"), (TIB, "1TiB")],
)
def test_a_size_is_formatted_in_the_largest_unit_that_divides_it(value: int, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (1536, "1.5KiB"),
        (GIB - 1, "1GiB"),
        (150_754_820_096, "140.4GiB"),
        (2 * TIB, "2TiB"),
    ],
)
def test_a_size_for_display_is_rounded(value: int, text: str) -> None:
    assert show_bytes(value) == text


@given(st.integers(1, MAX_BYTES))
def test_a_rounded_size_is_near_the_exact_one_and_below_1024_of_its_unit(value: int) -> None:
    shown = show_bytes(value)
    unit = next(unit for unit in ("TiB", "GiB", "MiB", "KiB", "B") if shown.endswith(unit))
    amount = Fraction(shown.removesuffix(unit))
    assert abs(amount * UNITS[unit] - value) <= Fraction(UNITS[unit], 20)
    assert amount < 1024 or unit == "TiB"
    assert amount >= 1


@pytest.mark.parametrize(
    "value",
    [0, -1, MAX_BYTES + 1, 10**400, -(10**400), 16**5000, -(16**5000)],
    ids=["zero", "negative", "too-large", "huge", "huge-negative", "unprintable", "unprintable-negative"],
)
def test_an_impossible_number_of_bytes_is_refused(value: int) -> None:
    with pytest.raises(VgpuError) as caught:
        check_bytes(value)
    assert caught.value.code is ErrorCode.BAD_QUANTITY
    assert len(caught.value.sentence) < 200


@given(st.text())
def test_any_text_is_parsed_as_a_size_or_refused(text: str) -> None:
    for parser in (parse_bytes, Percent.parse):
        try:
            parser(text)
        except VgpuError as error:
            assert error.hint
            assert error.code in (ErrorCode.BAD_QUANTITY, ErrorCode.BAD_PERCENT)


@pytest.mark.parametrize(
    ("text", "hundredths"),
    [
        ("30", 3000),
        ("12.5", 1250),
        ("12.5%", 1250),
        (" 12.34 % ", 1234),
        ("0.01", 1),
        ("100.00", 10000),
        ("12.500000000000000000000000000000000000", 1250),
        ("007", 700),
    ],
)
def test_a_share_is_read_exactly(text: str, hundredths: int) -> None:
    assert Percent.parse(text).hundredths == hundredths


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0", "from 0.01 to 100"),
        ("0.00", "from 0.01 to 100"),
        ("100.01", "from 0.01 to 100"),
        ("101%", "from 0.01 to 100"),
        ("0.001", "more than two decimals"),
        ("12.50000000000000000000000000000000001", "more than two decimals"),
        ("-5", "not a percentage"),
        ("nan", "not a percentage"),
        ("1e1", "not a percentage"),
        ("half", "not a percentage"),
        ("", "not a percentage"),
        ("%", "not a percentage"),
        ("5%%", "not a percentage"),
        ("9" * 5000, "not a percentage"),
    ],
)
def test_an_impossible_share_is_refused(text: str, why: str) -> None:
    with pytest.raises(VgpuError) as caught:
        Percent.parse(text)
    assert caught.value.code is ErrorCode.BAD_PERCENT
    assert why in caught.value.sentence
    assert len(caught.value.sentence) < 150


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (float("nan"), "not a number"),
        (float("inf"), "not a number"),
        (float("-inf"), "not a number"),
        (0.0, "from 0.01 to 100"),
        (-3.0, "from 0.01 to 100"),
        (100.1, "from 0.01 to 100"),
        (1e308, "from 0.01 to 100"),
        (10**400, "from 0.01 to 100"),
        (5e-324, "more than two decimals"),
        (33.333, "more than two decimals"),
    ],
)
def test_an_impossible_share_from_the_wire_is_refused(value: float, why: str) -> None:
    with pytest.raises(VgpuError) as caught:
        Percent.from_float(value)
    assert caught.value.code is ErrorCode.BAD_PERCENT
    assert why in caught.value.sentence


@given(st.integers(1, 10000))
def test_every_share_is_unchanged_as_a_float_or_a_text_that_is_read_back(hundredths: int) -> None:
    share = Percent(hundredths)
    assert Percent.from_float(share.value) == share
    assert Percent.parse(str(share)) == share
    assert Percent.from_float(float(f"{hundredths / 100:.2f}")) == share


@given(st.floats())
def test_any_float_is_accepted_as_a_share_or_refused(value: float) -> None:
    try:
        share = Percent.from_float(value)
    except VgpuError as error:
        assert error.code is ErrorCode.BAD_PERCENT
    else:
        assert share.value == value


@pytest.mark.parametrize("hundredths", [0, -1, 10001])
def test_a_share_object_cannot_be_made_with_a_value_out_of_range(hundredths: int) -> None:
    with pytest.raises(VgpuError, match=r"from 0\.01 to 100"):
        Percent(hundredths)


def test_a_limit_below_a_mebibyte_is_refused() -> None:
    with pytest.raises(VgpuError, match="bad amount of memory '1KiB': it is less than 1MiB"):
        check_limit(1024)
    assert check_limit(MIB) == MIB
