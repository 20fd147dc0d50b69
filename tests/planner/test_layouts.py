"""MIG layouts as users write them, compared with what the device supports."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.planner.geometry import Layout, MigGeometry, geometry_for
from vgpud.planner.layouts import Blocked, parse, spell, target

from .cards import A30_PROFILES, H200_PROFILES, profile

H200, A30 = geometry_for(H200_PROFILES), geometry_for(A30_PROFILES)


def laid(words: str, geometry: MigGeometry = H200, now: str = "", pinned: str = "") -> str:
    current = target(geometry, Layout(), 0, now.split()) if now else 0
    held = target(geometry, Layout(), 0, pinned.split()) if pinned else 0
    assert isinstance(current, int)
    assert isinstance(held, int)
    found = target(geometry, Layout(current), held, words.split())
    if isinstance(found, Blocked):
        return "blocked by " + " ".join(spell(geometry, found.pinned))
    return " ".join(spell(geometry, geometry.keys(found)))


@pytest.mark.parametrize(
    ("words", "places"),
    [
        ("3g.71gb@4 1g.18gb@0", "1g.18gb@0 3g.71gb@4"),
        ("all-1g.18gb", " ".join(f"1g.18gb@{n}" for n in range(7))),
        ("7g.141gb", "7g.141gb@0"),
        ("0", "7g.141gb@0"),
        ("none", ""),
        ("MIG-less 1g.18gb", None),
        ("3g.71gb*3", None),
        ("3g.71gb@2", None),
        ("1g.18gb*99", None),
        ("4g.71gb 4g.71gb", None),
        ("1g.18gb*3 2g.35gb 3g.71gb", None),  # a device has seven compute slices, and 1+1+1+2+3 are eight
    ],
)
def test_each_word_of_a_mig_layout_is_parsed(words: str, places: str | None) -> None:
    if places is None:
        with pytest.raises(VgpuError) as wrong:
            laid(words)
        assert wrong.value.code is ErrorCode.IMPOSSIBLE
    else:
        assert laid(words) == places


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("3g.71gb@4 3g.71gb@4", "the layout has 3g.71gb at memory slice 4 more than once"),
        ("9 9@0 3g.71gb@0", "the layout has 3g.71gb at memory slice 0 more than once"),
        ("off none", "'off' is a whole layout"),
        ("1g.18gb all-balanced", "'all-balanced' is a whole layout"),
        ("all-1g.18gb 3g.71gb", "'all-1g.18gb' is a whole layout"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(words: str, sentence: str) -> None:
    with pytest.raises(VgpuError) as wrong:
        laid(words)
    assert wrong.value.sentence == sentence


@pytest.mark.parametrize(("word", "meant"), [("all-balancd", "all-balanced"), ("3g.70gb", "3g.71gb")])
def test_the_refusal_of_an_unknown_layout_word_suggests_the_nearest_one(word: str, meant: str) -> None:
    with pytest.raises(VgpuError) as wrong:
        laid(word)
    assert wrong.value.hint.startswith(f"did you mean {meant}? it has ")


def test_the_layout_all_balanced_is_a_half_a_quarter_and_two_eighths() -> None:
    """`all-balanced` in the configuration that mig-parted ships means the same, for devices of 7 and of 4
    slices.
    """
    assert sorted(w.partition("@")[0] for w in laid("all-balanced").split()) == [
        "1g.18gb",
        "1g.18gb",
        "2g.35gb",
        "3g.71gb",
    ]
    assert sorted(w.partition("@")[0] for w in laid("all-balanced", A30).split()) == [
        "1g.6gb",
        "1g.6gb",
        "2g.12gb",
    ]


def test_a_new_mig_layout_reuses_existing_instances() -> None:
    assert laid("1g.18gb*2", now="1g.18gb@3 1g.18gb@0 2g.35gb@4") == "1g.18gb@0 1g.18gb@3"


def test_the_refusal_of_a_mig_layout_names_the_pinned_instances_that_prevent_it() -> None:
    now = "1g.18gb@1 1g.18gb@6"
    assert laid("4g.71gb 1g.18gb", now=now, pinned=now) == "blocked by 1g.18gb@1"
    assert laid("4g.71gb 1g.18gb", now=now, pinned="1g.18gb@6") == "4g.71gb@0 1g.18gb@6"


@given(st.sampled_from(sorted(H200.free_after)))
def test_a_mig_layout_that_is_written_is_read_back(state: int) -> None:
    words = spell(H200, H200.keys(state))
    assert target(H200, Layout(), 0, words) == state


def test_a_profile_name_that_two_mig_profiles_share_needs_an_id() -> None:
    twins = (
        profile(14, "1g.6gb", 1, 4, 14, 5836, (0, 1, 2, 3), 1),
        profile(47, "1g.6gb", 1, 4, 14, 5836, (0, 1, 2, 3), 1),
    )
    geometry = geometry_for(twins)
    with pytest.raises(VgpuError) as wrong:
        target(geometry, Layout(), 0, ["1g.6gb"])
    assert wrong.value.code is ErrorCode.BAD_REQUEST
    found = target(geometry, Layout(), 0, ["47@2"])
    assert isinstance(found, int)
    assert spell(geometry, geometry.keys(found)) == ("47@2",)


@pytest.mark.parametrize("word", ["", "@3", "1g.18gb@", "1g.18gb*0", "1g.18gb@1*2", "1g 18gb"])
def test_an_unknown_layout_word_is_refused(word: str) -> None:
    with pytest.raises(VgpuError) as wrong:
        parse([word])
    assert wrong.value.code is ErrorCode.BAD_REQUEST
