"""The reasons why a device was not chosen and why a request is refused: a row for each cause, with its
figures.
"""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from vgpud.model.device import ComputeMode, Device, DeviceProcess, Health, Mig, Node, Virtualisation
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import Mode, Request, Selector
from vgpud.planner.choose import choose
from vgpud.planner.use import EMPTY, DeviceUse
from vgpud.policy.model import Policy

from .cards import (
    AUTO,
    COMPUTE,
    H200_PROFILES,
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

BUSY = (DeviceProcess(41, GIB, "compute"), DeviceProcess(42, None, "compute"))
SMALL = request(memory=GIB)
MPS = request(memory=GIB, isolation=COMPUTE)
MIG = request(mig_profile="3g.71gb")


def refused(
    wanted: Request, node: Node, rules: Policy = AUTO, use: Mapping[str, DeviceUse] | None = None
) -> VgpuError:
    decision = choose(wanted, node, rules, use or {})
    assert decision.slices == ()
    assert decision.refusal is not None
    assert len(decision.reasons) == len(node.devices)
    assert not any(reason.taken for reason in decision.reasons)
    return decision.refusal


@pytest.mark.parametrize(
    ("wanted", "device", "rules", "use", "code", "sentence"),
    [
        pytest.param(
            SMALL,
            h200(0, health=Health.LOST, health_reason="Xid 79"),
            AUTO,
            EMPTY,
            ErrorCode.GPU_LOST,
            "the device is lost: Xid 79",
            id="lost",
        ),
        pytest.param(
            SMALL,
            h200(0, health=Health.SILENT, health_reason="no answer within 5 s"),
            AUTO,
            EMPTY,
            ErrorCode.NVML_TIMEOUT,
            "the device is silent: no answer within 5 s",
            id="silent",
        ),
        pytest.param(
            SMALL,
            h200(0, health=Health.FAILED),
            AUTO,
            EMPTY,
            ErrorCode.GPU_LOST,
            "the device is failed",
            id="failed",
        ),
        pytest.param(
            SMALL,
            h200(0),
            policy({"mode": "unmanaged"}),
            EMPTY,
            ErrorCode.DENIED_BY_POLICY,
            "the policy leaves it unmanaged",
            id="unmanaged",
        ),
        pytest.param(
            SMALL,
            h200(0, virtualisation=Virtualisation.HOST_VGPU),
            AUTO,
            EMPTY,
            ErrorCode.UNSUPPORTED,
            "it serves virtual machines (mode host_vgpu)",
            id="vgpu-host",
        ),
        pytest.param(
            SMALL,
            h200(0, mig=Mig(capable=True, current=False, pending=True, profiles=H200_PROFILES)),
            AUTO,
            EMPTY,
            ErrorCode.RESET_NEEDED,
            "MIG mode becomes on at its next reset, which is due",
            id="mig-pending",
        ),
        pytest.param(
            SMALL,
            h200(0, compute_mode=ComputeMode.PROHIBITED),
            AUTO,
            EMPTY,
            ErrorCode.UNSUPPORTED,
            "its compute mode is prohibited, which lets no process use it",
            id="prohibited",
        ),
        pytest.param(
            request(),
            h200(0),
            policy({"mode": "preload"}),
            EMPTY,
            ErrorCode.DENIED_BY_POLICY,
            "the policy fixes mode preload and the request needs exclusive",
            id="mode-fixed",
        ),
        pytest.param(
            request(memory=GIB + 1, isolation=COMPUTE),
            h200(0),
            AUTO,
            EMPTY,
            ErrorCode.UNSUPPORTED,
            "MPS takes memory limits in whole MiB, and 1073741825 bytes is not",
            id="mps-part-of-a-mib",
        ),
        pytest.param(
            request(memory=GIB, isolation=COMPUTE, count=2),
            h200(0),
            AUTO,
            EMPTY,
            ErrorCode.UNSUPPORTED,
            "a process reaches one MPS control daemon, which serves one device, not 2",
            id="mps-two-devices",
        ),
        pytest.param(
            request(),
            h200(0, mig_on=True),
            AUTO,
            EMPTY,
            ErrorCode.UNSUPPORTED,
            "MIG mode is on, so only its MIG instances can be allocated",
            id="mig-on",
        ),
        pytest.param(
            request(),
            h200(0),
            AUTO,
            used(Mode.PRELOAD, GIB, GIB),
            ErrorCode.NO_CAPACITY,
            "it is in mode preload with 2 allocations and the request needs exclusive",
            id="other-mode",
        ),
        pytest.param(
            SMALL,
            h200(0),
            policy({"mode": "preload"}),
            used(Mode.MPS, GIB),
            ErrorCode.NO_CAPACITY,
            "it is in mode mps with 1 allocation, whose end the policy's mode preload waits for, and the "
            "request needs preload or mps or mig",
            id="policy-changed",
        ),
        pytest.param(
            request(),
            h200(0),
            AUTO,
            used(Mode.EXCLUSIVE, H200_USABLE),
            ErrorCode.NO_CAPACITY,
            "it holds 1 allocation in mode exclusive",
            id="taken-whole",
        ),
        pytest.param(
            request(),
            h200(0, processes=BUSY),
            AUTO,
            EMPTY,
            ErrorCode.NO_CAPACITY,
            "it has 2 processes that vgpud did not start (pid 41, 42)",
            id="exclusive-processes",
        ),
        pytest.param(
            MPS,
            h200(0, processes=BUSY),
            AUTO,
            EMPTY,
            ErrorCode.NO_CAPACITY,
            "it has 2 processes that vgpud did not start (pid 41, 42), which MPS would shut out",
            id="mps-processes",
        ),
        pytest.param(
            MPS,
            h200(0, mps_capable=False),
            AUTO,
            EMPTY,
            ErrorCode.UNSUPPORTED,
            "the device has no MPS",
            id="no-mps",
        ),
        pytest.param(
            request(memory=GIB, share=30, isolation=QUOTA),
            h200(0),
            AUTO,
            used(Mode.PRELOAD, GIB, share=7500),
            ErrorCode.NO_CAPACITY,
            "a share of 30% is more than the 25% that is free",
            id="preload-share-held",
        ),
        pytest.param(
            request(memory=200 * GIB),
            h200(0),
            AUTO,
            EMPTY,
            ErrorCode.IMPOSSIBLE,
            "200GiB is more than the 139.8GiB that it has to share",
            id="too-big",
        ),
        pytest.param(
            request(memory=H200_USABLE + 1),
            h200(0),
            AUTO,
            EMPTY,
            ErrorCode.IMPOSSIBLE,
            "150109880321B is more than the 146591680KiB that it has to share",
            id="too-big-by-a-byte",
        ),
        pytest.param(
            request(memory=200 * GIB),
            h200(0),
            AUTO,
            used(Mode.MPS, GIB),
            ErrorCode.IMPOSSIBLE,
            "200GiB is more than the 139.8GiB that it has to share",
            id="too-big-and-busy",
        ),
        pytest.param(
            request(memory=200 * GIB, isolation=QUOTA),
            h200(0),
            AUTO,
            used(Mode.MPS, GIB),
            ErrorCode.IMPOSSIBLE,
            "200GiB is more than the 139.8GiB that it has to share",
            id="too-big-and-in-another-mode",
        ),
        pytest.param(
            request(memory=60 * GIB),
            h200(0),
            AUTO,
            used(Mode.PRELOAD, 100 * GIB),
            ErrorCode.NO_CAPACITY,
            "60GiB does not fit in the 39.8GiB free of 139.8GiB",
            id="memory-held",
        ),
        pytest.param(
            SMALL,
            h200(0),
            policy({"mode": "preload", "preload": {"max_tenants": 2}}),
            used(Mode.PRELOAD, GIB, GIB),
            ErrorCode.NO_CAPACITY,
            "it holds 2 allocations in mode preload and the policy allows 2",
            id="tenants",
        ),
        pytest.param(
            request(memory=GIB, share=50.01, isolation=COMPUTE),
            h200(0),
            AUTO,
            used(Mode.MPS, GIB, GIB, share=2500),
            ErrorCode.NO_CAPACITY,
            "a share of 50.01% is more than the 50% that is free",
            id="share-held",
        ),
        pytest.param(
            request(isolation=HARDWARE),
            h200(0, mig=Mig()),
            AUTO,
            EMPTY,
            ErrorCode.UNSUPPORTED,
            "the device has no MIG",
            id="no-mig",
        ),
        pytest.param(
            request(isolation=HARDWARE),
            h200(0, mig=Mig(capable=True)),
            AUTO,
            EMPTY,
            ErrorCode.UNSUPPORTED,
            "the driver lists no MIG profiles for it",
            id="no-profiles",
        ),
        pytest.param(
            MIG,
            h200(0),
            policy({"mode": "mig", "mig": {"change_mode": False}}),
            EMPTY,
            ErrorCode.DENIED_BY_POLICY,
            "MIG mode is off and the policy does not let it be switched (mig.change_mode)",
            id="mig-mode-kept",
        ),
        pytest.param(
            MIG,
            h200(0, processes=BUSY),
            AUTO,
            EMPTY,
            ErrorCode.NO_CAPACITY,
            "MIG mode is off, and cannot be switched on while it has 2 processes (pid 41, 42)",
            id="mig-mode-processes",
        ),
        pytest.param(
            MIG,
            h200(0),
            policy({"mig": {"profiles": ("1g.18gb", "2g.35gb")}}),
            EMPTY,
            ErrorCode.DENIED_BY_POLICY,
            "the policy does not allow profile '3g.71gb', only 1g.18gb, 2g.35gb",
            id="mig-profile-denied",
        ),
        pytest.param(
            request(isolation=HARDWARE),
            h200(0),
            policy({"mig": {"profiles": ("1g.5gb",)}}),
            EMPTY,
            ErrorCode.DENIED_BY_POLICY,
            "the policy allows none of its profiles "
            "(1g.18gb, 1g.18gb+me, 1g.35gb, 2g.35gb, 3g.71gb, 4g.71gb, 7g.141gb)",
            id="mig-no-profile-allowed",
        ),
        pytest.param(
            request(mig_profile="3g.70gb"),
            h200(0),
            AUTO,
            EMPTY,
            ErrorCode.IMPOSSIBLE,
            "it has no profile '3g.70gb', only "
            "1g.18gb, 1g.18gb+me, 1g.35gb, 2g.35gb, 3g.71gb, 4g.71gb, 7g.141gb",
            id="mig-profile-unknown",
        ),
        pytest.param(
            request(mig_profile="1g.18gb", memory=17 * GIB),
            h200(0),
            AUTO,
            EMPTY,
            ErrorCode.IMPOSSIBLE,
            "no profile has 17GiB: 1g.18gb has 16GiB and 12.12% of the multiprocessors",
            id="mig-profile-too-small",
        ),
        pytest.param(
            request(isolation=HARDWARE, memory=150 * GIB, share=50),
            h200(0),
            AUTO,
            EMPTY,
            ErrorCode.IMPOSSIBLE,
            "no profile has 150GiB and a share of 50%: 7g.141gb has 139.8GiB and 100% of the multiprocessors",
            id="mig-too-big",
        ),
        pytest.param(
            MIG,
            h200(0, mig_on=True, instances=(instance(1, 19, 0),)),
            AUTO,
            used_mig((19, 4)),
            ErrorCode.NO_CAPACITY,
            "no place for 3g.71gb beside 2 instances: free are 1g.18gb, 1g.18gb+me, 1g.35gb, 2g.35gb",
            id="mig-fragmented",
        ),
        pytest.param(
            MIG,
            h200(0, mig_on=True),
            AUTO,
            used_mig((0, 0)),
            ErrorCode.NO_CAPACITY,
            "no place for 3g.71gb beside 1 instance: it is full",
            id="mig-full",
        ),
    ],
)
def test_each_refusal_has_its_reason_and_number(
    wanted: Request, device: Device, rules: Policy, use: DeviceUse, code: ErrorCode, sentence: str
) -> None:
    node = node_of(device)
    error = refused(wanted, node, rules, {"GPU-0": use})
    (reason,) = choose(wanted, node, rules, {"GPU-0": use}).reasons
    assert reason.sentence == sentence
    assert error.code is code
    assert error.details == (f"device 0 (GPU-0): {sentence}",)
    assert error.hint


@pytest.mark.parametrize(
    "wanted", [request(mig_profile="3g.70gb"), request(mig_profile="1g.18gb", memory=17 * GIB)]
)
def test_a_refusal_names_the_mig_profile_once(wanted: Request) -> None:
    assert refused(wanted, node_of(h200(0)), AUTO, {}).sentence.count(wanted.mig_profile) == 1


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        (request(count=0), "count is 0: it must be at least 1"),
        (request(isolation=QUOTA), "isolation quota was requested with neither memory nor share"),
        (request(isolation=COMPUTE), "isolation compute was requested with neither memory nor share"),
        (
            request(isolation=WHOLE_DEVICE, memory=GIB),
            "a whole device was requested together with a memory limit or a share",
        ),
        (
            request(isolation=WHOLE_DEVICE, share=10),
            "a whole device was requested together with a memory limit or a share",
        ),
        (
            request(isolation=WHOLE_DEVICE, mig_profile="1g.18gb"),
            "MIG profile '1g.18gb' was requested with isolation device",
        ),
        (
            replace(request(share=10), priority="normal"),
            "priority normal was requested with isolation left out",
        ),
        (
            replace(request(isolation=COMPUTE, share=10), priority="above-normal"),
            "priority above-normal was requested with isolation compute, which has none (MPS)",
        ),
        (
            replace(request(isolation=QUOTA, memory=GIB), priority="above-normal"),
            "priority above-normal was requested without a share, and it applies only within a share",
        ),
    ],
)
def test_a_request_that_contradicts_itself_is_a_bad_request(wanted: Request, sentence: str) -> None:
    error = refused(wanted, h200_node(2))
    assert (error.code, error.sentence) == (ErrorCode.BAD_REQUEST, sentence)


@pytest.mark.parametrize("memory", [0, -1, 2**60])
def test_an_impossible_amount_is_refused(memory: int) -> None:
    assert refused(request(memory=memory), h200_node(1)).code is ErrorCode.BAD_QUANTITY


@pytest.mark.parametrize(
    ("selector", "sentence"),
    [
        (Selector(uuids=("GPU-1", "GPU-9")), "no device has uuid 'GPU-9'"),
        (Selector(indices=(0, 5)), "no device has index 5"),
        (Selector(name_glob="*A100*"), "no device matches name *A100*"),
        (Selector(uuids=("GPU-0",), indices=(1,)), "no device matches uuid GPU-0 and index 1"),
    ],
)
def test_a_selector_without_a_match_names_the_missing_device(selector: Selector, sentence: str) -> None:
    error = refused(request(selector=selector), h200_node(2))
    assert (error.code, error.sentence) == (ErrorCode.NO_SUCH_DEVICE, sentence)


def test_a_node_without_devices_refuses_every_request() -> None:
    error = refused(request(), node_of())
    assert (error.code, error.sentence) == (ErrorCode.NO_SUCH_DEVICE, "this node has no device")


def test_the_reason_for_a_device_outside_of_the_selector_says_so() -> None:
    decision = choose(request(selector=Selector(indices=(1,))), h200_node(2), AUTO, {})
    assert [piece.device_uuid for piece in decision.slices] == ["GPU-1"]
    assert decision.reasons[0].sentence == "the request asks for other devices"


def test_a_refusal_says_how_much_memory_fits_now() -> None:
    use = {"GPU-0": used(Mode.PRELOAD, 100 * GIB), "GPU-1": used(Mode.PRELOAD, 90 * GIB)}
    error = refused(request(memory=60 * GIB), h200_node(2), AUTO, use)
    assert error.sentence == (
        "no device has 60GiB free in mode preload now: the most is 49.8GiB of memory on device 1"
    )
    assert error.hint == "ask for no more than that, or wait until something is released"


def test_a_refusal_says_how_much_share_fits_now() -> None:
    use = {"GPU-0": used(Mode.MPS, GIB, share=7000)}
    error = refused(request(memory=GIB, share=40), h200_node(1), AUTO, use)
    assert error.sentence == (
        "no device has 1GiB and a share of 40% free in mode mps now: "
        "the most is 138.8GiB of memory and a share of 30% on device 0"
    )


def test_a_refusal_says_which_mig_profile_fits_now() -> None:
    node = node_of(h200(0, mig_on=True))
    error = refused(request(mig_profile="4g.71gb"), node, AUTO, {"GPU-0": used_mig((19, 0))})
    assert error.sentence == "no device has a place for a MIG instance of 4g.71gb now"
    assert error.hint == (
        "free now are 1g.18gb, 1g.18gb+me, 1g.35gb, 2g.35gb, 3g.71gb: ask for one of them, "
        "or wait until something is released"
    )


def test_a_refusal_says_how_many_whole_devices_are_free() -> None:
    use = {"GPU-0": used(Mode.EXCLUSIVE, H200_USABLE)}
    error = refused(request(count=2), h200_node(2), AUTO, use)
    assert error.code is ErrorCode.NO_CAPACITY
    assert error.sentence == "2 devices asked, 1 with room in mode exclusive now"
    assert error.hint == "ask for 1, or wait until something is released"
    both = {**use, "GPU-1": used(Mode.MPS, GIB)}
    assert refused(request(), h200_node(2), AUTO, both).sentence == "no whole device is free now"


def test_a_refusal_says_how_much_memory_an_idle_node_could_give() -> None:
    small = h200(1, memory_total_bytes=24 * GIB, memory_reserved_bytes=0)
    error = refused(request(memory=200 * GIB), node_of(h200(0), small))
    assert error.code is ErrorCode.IMPOSSIBLE
    assert error.hint == "ask for at most 139.8GiB"
    assert error.sentence == (
        "no device can hold 200GiB, even idle: device 0: 200GiB is more than the 139.8GiB that it has "
        "to share"
    )
    alike = refused(request(memory=200 * GIB), node_of(h200(0), h200(1), small))
    assert alike.sentence.endswith("to share (and 1 device more alike)")


def test_the_refusal_of_an_unknown_mig_profile_suggests_the_nearest_name() -> None:
    error = refused(request(mig_profile="3g.70gb"), h200_node(1))
    assert error.hint == "did you mean '3g.71gb'"
    assert error.sentence.count("3g.71gb") == 1, "the profiles are listed once"


def test_a_mig_profile_too_small_for_the_requested_memory_is_not_suggested() -> None:
    error = refused(request(mig_profile="1g.18gb", memory=30 * GIB), h200_node(1))
    assert error.hint == "ask for less than the profile has, or leave the profile out"


@pytest.mark.parametrize("wanted", [request(), MPS])
def test_a_refusal_for_processes_outside_vgpud_does_not_wait_for_a_release(wanted: Request) -> None:
    node = node_of(h200(0, processes=BUSY))
    assert refused(wanted, node).hint == "wait until those processes end"
    shared = node_of(h200(0, processes=BUSY), h200(1))
    held = {shared.devices[1].uuid: used(Mode.EXCLUSIVE, GIB)}
    assert refused(wanted, shared, AUTO, held).hint == "wait until something is released"


def test_a_request_for_more_devices_than_the_node_has_is_refused_as_impossible() -> None:
    error = refused(request(count=3), h200_node(2))
    assert error.code is ErrorCode.IMPOSSIBLE
    assert error.sentence == "3 devices requested, and 2 of the 2 selected devices can serve in one mode"


def test_a_refusal_names_the_lost_device_that_is_missing() -> None:
    node = node_of(h200(0), h200(1, health=Health.LOST))
    assert refused(request(count=2), node).code is ErrorCode.GPU_LOST


def test_all_slices_of_an_allocation_have_the_same_mode() -> None:
    rules = policy({"index": 0, "mode": "preload"}, {"index": 1, "mode": "mps"})
    error = refused(request(memory=GIB, count=2), h200_node(2), rules)
    assert error.sentence == "2 devices requested, and 1 of the 2 selected devices can serve in one mode"


def test_a_request_is_refused_for_capacity_only_if_enough_devices_could_ever_serve_it() -> None:
    rules = policy({"index": 0, "mode": "unmanaged"})
    use = {"GPU-1": used(Mode.MPS, GIB)}
    assert refused(request(), h200_node(2), rules, use).code is ErrorCode.NO_CAPACITY
    assert refused(request(count=2), h200_node(2), rules, use).code is ErrorCode.IMPOSSIBLE


def test_sentences_of_reasons_and_refusals_are_lower_case_without_full_stop() -> None:
    """Names and units keep their spelling."""
    node = node_of(h200(0, health=Health.LOST), h200(1, processes=BUSY), h200(2, mig_on=True), h200(3))
    wants = [request(), request(memory=GIB), MPS, MIG, request(count=9), request(memory=999 * GIB)]
    for wanted in wants:
        decision = choose(wanted, node, AUTO, {})
        texts = [reason.sentence for reason in decision.reasons]
        if decision.refusal is not None:
            texts += [decision.refusal.sentence, decision.refusal.hint]
        for text in texts:
            assert text
            assert not text.endswith(".")
            assert text.startswith(("MIG", "2 ", "9 ", "999GiB")) or text[0].islower()
