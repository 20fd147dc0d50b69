"""The mode that a device takes for a request, and the content of the slice."""

import pytest

from vgpud.model.device import DeviceProcess, Placement
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import GIB, MIB, Percent
from vgpud.model.tenancy import MigSlice, Mode, Request, Slice
from vgpud.planner.choose import choose
from vgpud.planner.use import EMPTY, DeviceUse

from .cards import (
    AUTO,
    COMPUTE,
    H200_USABLE,
    HARDWARE,
    QUOTA,
    WHOLE_DEVICE,
    h200,
    h200_node,
    instance,
    node_of,
    policy,
    request,
    used,
    used_mig,
)

NODE = h200_node(1)


def only(wanted: Request, mode: str = "auto", use: DeviceUse = EMPTY) -> Slice:
    decision = choose(wanted, NODE, policy({"mode": mode}), {"GPU-0": use})
    assert decision.refusal is None, decision.refusal
    (piece,) = decision.slices
    (reason,) = decision.reasons
    assert reason.taken
    assert reason.mode is piece.mode
    assert reason.device_uuid == piece.device_uuid
    return piece


@pytest.mark.parametrize(
    ("wanted", "mode"),
    [
        (request(), Mode.EXCLUSIVE),
        (request(isolation=WHOLE_DEVICE), Mode.EXCLUSIVE),
        (request(memory=4 * GIB), Mode.PRELOAD),
        (request(memory=4 * GIB, share=100), Mode.PRELOAD),
        (request(memory=4 * GIB, share=30), Mode.PRELOAD),
        (request(share=30), Mode.PRELOAD),
        (request(share=30, isolation=COMPUTE), Mode.MPS),
        (request(memory=4 * GIB, isolation=QUOTA), Mode.PRELOAD),
        (request(memory=4 * GIB, isolation=COMPUTE), Mode.MPS),
        (request(memory=4 * GIB, isolation=HARDWARE), Mode.MIG),
        (request(mig_profile="1g.18gb"), Mode.MIG),
    ],
)
def test_an_idle_auto_device_takes_the_mode_that_the_request_needs(wanted: Request, mode: Mode) -> None:
    assert only(wanted).mode is mode


@pytest.mark.parametrize("mode", ["preload", "mps", "mig"])
def test_a_request_for_memory_alone_is_served_in_whatever_mode_the_policy_fixes(mode: str) -> None:
    assert only(request(memory=4 * GIB), mode).mode == mode


@pytest.mark.parametrize("mode", [Mode.PRELOAD, Mode.MPS])
def test_a_request_for_memory_alone_takes_the_mode_that_a_device_in_mode_auto_has(mode: Mode) -> None:
    assert only(request(memory=4 * GIB), use=used(mode, GIB)).mode is mode


def test_a_request_for_a_share_can_be_served_in_mode_preload() -> None:
    assert only(request(memory=GIB, share=30)) == Slice("GPU-0", Mode.PRELOAD, GIB, Percent(3000))


def test_a_share_of_100_percent_under_preload_sets_no_compute_limit() -> None:
    assert only(request(memory=GIB, share=100)) == Slice("GPU-0", Mode.PRELOAD, GIB)


def test_an_exclusive_slice_has_all_usable_memory() -> None:
    assert only(request()) == Slice("GPU-0", Mode.EXCLUSIVE, H200_USABLE)


def test_a_request_for_a_share_alone_gets_memory_in_proportion_in_whole_2_mib() -> None:
    piece = only(request(share=12.5, isolation=COMPUTE))
    assert piece.share == Percent(1250)
    assert piece.memory_bytes == H200_USABLE // 8 // (2 * MIB) * (2 * MIB)


def test_the_smallest_share_still_gets_some_memory() -> None:
    tiny = node_of(h200(0, memory_total_bytes=GIB, memory_reserved_bytes=0))
    decision = choose(request(share=0.01, isolation=COMPUTE), tiny, AUTO, {})
    assert decision.slices[0].memory_bytes == 2 * MIB


def test_a_chosen_mig_slice_has_profile_placement_memory_and_share() -> None:
    assert only(request(mig_profile="3g.71gb")) == Slice(
        "GPU-0",
        Mode.MIG,
        71424 * MIB,
        Percent(4545),  # the share is 60 of 132 multiprocessors
        MigSlice(9, "3g.71gb", Placement(4, 4)),
    )


@pytest.mark.parametrize("text", ["1g.18gb+me", "MIG 1g.18gb+me", "mig 1G.18GB+ME", "20", " 20 "])
def test_a_request_names_a_mig_profile_by_name_or_id(text: str) -> None:
    mig = only(request(mig_profile=text)).mig
    assert mig is not None
    assert mig.profile_id == 20


@pytest.mark.parametrize(
    ("wanted", "profile"),
    [
        (request(isolation=HARDWARE), "1g.18gb"),
        (request(isolation=HARDWARE, memory=16 * GIB), "1g.18gb"),
        (request(isolation=HARDWARE, memory=16 * GIB + 1), "1g.35gb"),
        (request(isolation=HARDWARE, share=20), "2g.35gb"),
        (request(isolation=HARDWARE, share=12.12), "1g.18gb"),
        (request(isolation=HARDWARE, share=12.13), "1g.35gb"),
        (request(isolation=HARDWARE, memory=40 * GIB), "3g.71gb"),
        (request(isolation=HARDWARE, share=48), "4g.71gb"),
        (request(isolation=HARDWARE, share=100), "7g.141gb"),
        (request(isolation=HARDWARE, memory=H200_USABLE), "7g.141gb"),
    ],
)
def test_the_smallest_mig_profile_that_meets_the_request_is_taken(wanted: Request, profile: str) -> None:
    mig = only(wanted).mig
    assert mig is not None
    assert mig.profile_name == profile


def test_the_full_mig_profile_has_at_most_the_cards_memory() -> None:
    assert only(request(mig_profile="7g.141gb")).memory_bytes == H200_USABLE


def test_a_larger_mig_profile_serves_if_the_policy_excludes_the_smaller() -> None:
    rules = policy({"mode": "mig", "mig": {"profiles": ("2g.35gb", "7g.141gb")}})
    decision = choose(request(memory=GIB), NODE, rules, {})
    assert decision.slices[0].mig == MigSlice(14, "2g.35gb", Placement(4, 2))


def test_the_placement_of_a_foreign_mig_instance_is_not_used() -> None:
    node = node_of(h200(0, mig_on=True, instances=(instance(3, 19, 6),)))
    decision = choose(request(mig_profile="3g.71gb"), node, AUTO, {})
    assert decision.slices[0].mig == MigSlice(9, "3g.71gb", Placement(0, 4))


def test_the_placement_of_an_allocated_mig_slice_is_taken_even_before_nvml_lists_it() -> None:
    decision = choose(request(mig_profile="9"), NODE, AUTO, {"GPU-0": used_mig((9, 4))})
    assert decision.slices[0].mig == MigSlice(9, "3g.71gb", Placement(0, 4))


def test_a_device_with_mig_on_serves_memory_from_an_instance() -> None:
    decision = choose(request(memory=GIB), node_of(h200(0, mig_on=True)), AUTO, {})
    assert decision.slices[0].mode is Mode.MIG


def test_overcommit_lets_shares_pass_a_whole_card() -> None:
    rules = policy({"mode": "mps", "mps": {"overcommit_percent": 150.0}})
    use = {"GPU-0": used(Mode.MPS, GIB, GIB, share=5000)}
    assert choose(request(memory=GIB, share=50), NODE, rules, use).slices
    assert choose(request(memory=GIB, share=50.01), NODE, rules, use).refusal


def test_with_overcommit_the_limits_on_a_card_may_exceed_its_memory() -> None:
    rules = policy({"mode": "preload", "preload": {"memory_overcommit": 1.5}})
    use = {"GPU-0": used(Mode.PRELOAD, H200_USABLE)}
    half = H200_USABLE // 2 // GIB * GIB
    decision = choose(request(memory=half), NODE, rules, use)
    assert decision.slices == (Slice("GPU-0", Mode.PRELOAD, half),)
    assert decision.reasons[0].sentence.endswith("69GiB of 69.9GiB free, overcommit included")
    over = decision.refused(VgpuError(ErrorCode.OVER_QUOTA, "too much for uid 5", ""))
    assert {(one.taken, one.sentence) for one in over.reasons} == {(False, "too much for uid 5")}
    assert choose(request(memory=half), NODE, policy({"mode": "preload"}), use).refusal
    refusal = choose(request(memory=half + GIB), NODE, rules, use).refusal
    assert refusal is not None and refusal.code is ErrorCode.NO_CAPACITY
    # even with overcommitment a single tenant gets no more than the device has
    refusal = choose(request(memory=H200_USABLE + 1), NODE, rules, {}).refusal
    assert refusal is not None and refusal.code is ErrorCode.IMPOSSIBLE


def test_overcommit_applies_to_preload_alone() -> None:
    rules = policy({"mode": "auto", "preload": {"memory_overcommit": 2.0}})
    use = {"GPU-0": used(Mode.MPS, H200_USABLE - GIB)}
    assert choose(request(memory=2 * GIB, isolation=COMPUTE), NODE, rules, use).refusal


def test_an_mps_slice_without_a_share_does_not_count_in_the_sum_of_shares() -> None:
    use = used(Mode.MPS, GIB, share=10000)
    assert only(request(memory=GIB, isolation=COMPUTE), use=use) == Slice("GPU-0", Mode.MPS, GIB)


def test_processes_outside_vgpud_do_not_exclude_a_device_from_mode_preload() -> None:
    node = node_of(h200(0, processes=(DeviceProcess(7, GIB, "compute"),)))
    assert choose(request(memory=GIB), node, AUTO, {}).slices
    graphics = node_of(h200(0, processes=(DeviceProcess(7, GIB, "graphics"),)))
    assert choose(request(memory=GIB, isolation=COMPUTE), graphics, AUTO, {}).slices


@pytest.mark.parametrize("start", [0, 4])
def test_a_request_can_name_the_memory_slice_of_its_mig_profile(start: int) -> None:
    piece = only(request(mig_profile=f"3g.71gb@{start}"))
    assert piece.mig is not None
    assert (piece.mig.profile_name, piece.mig.placement.start) == ("3g.71gb", start)


@pytest.mark.parametrize("text", ["3g.71gb@", "@4", "3g.71gb@x", "3g.71gb@-1", "3g.71gb@444"])
def test_an_impossible_mig_placement_is_refused(text: str) -> None:
    refusal = choose(request(mig_profile=text), NODE, AUTO, {}).refusal
    assert refusal is not None
    assert "is not a MIG profile and a memory slice" in refusal.sentence


def test_a_taken_or_absent_mig_placement_is_refused() -> None:
    taken = used_mig((9, 4))
    for text, use in (("3g.71gb@4", taken), ("3g.71gb@1", EMPTY)):
        decision = choose(request(mig_profile=text), NODE, AUTO, {"GPU-0": use})
        assert decision.refusal is not None
        assert "no place for 3g.71gb" in str(decision.refusal.details)
    assert choose(request(mig_profile="3g.71gb@0"), NODE, AUTO, {"GPU-0": taken}).refusal is None
