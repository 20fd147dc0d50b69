"""The conditions under which a tenant may be suspended and resumed: mode, driver, host memory, device
memory.
"""

from dataclasses import replace

import pytest

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import Allocation, MigSlice, Mode, Slice, State, SuspendedProcess
from vgpud.planner.suspend import (
    MEASURED_KIND,
    HostMemory,
    check_card,
    check_driver,
    check_host,
    check_mode,
    check_room,
    stays_by_kind,
)

from .cards import H200_PROFILES, H200_USABLE, h200, h200_node, node_of, request, used

NODE = h200_node(1)


def tenant(mode: Mode = Mode.PRELOAD, memory_bytes: int = 4 * GIB, uuid: str = "GPU-0") -> Allocation:
    return Allocation("a", request(), State.SUSPENDED, (Slice(uuid, mode, memory_bytes),))


def test_mps_clients_and_tenants_on_mig_are_not_suspended() -> None:
    small = H200_PROFILES[0]
    on_mig = replace(
        tenant(), slices=(Slice("GPU-0", Mode.PRELOAD, GIB, None, MigSlice(19, "1g", small.placements[0])),)
    )
    for allocation, why in ((tenant(Mode.MPS), "MPS clients"), (on_mig, "in a MIG instance")):
        with pytest.raises(VgpuError, match=why) as caught:
            check_mode(allocation)
        assert caught.value.code is ErrorCode.UNSUPPORTED
    check_mode(tenant())


def test_a_driver_before_branch_570_suspends_no_process() -> None:
    with pytest.raises(VgpuError, match=r"driver 550\.163\.01 cannot suspend a process") as caught:
        check_driver(replace(NODE, driver_version="550.163.01"))
    assert caught.value.code is ErrorCode.UNSUPPORTED
    for version in ("570.26", "580.159.04", ""):
        check_driver(replace(NODE, driver_version=version))


@pytest.mark.parametrize(
    ("wanted", "held", "limit", "why"),
    [
        (9, 0, None, "do not fit into host memory"),
        (4, 3, 6, "exceed the host memory for suspended tenants"),
        (8, 0, None, ""),
        (3, 3, 6, ""),
    ],
)
def test_a_suspension_needs_free_host_memory(wanted: int, held: int, limit: int | None, why: str) -> None:
    host = HostMemory(10 * GIB, 2 * GIB, None if limit is None else limit * GIB)
    if not why:
        check_host(wanted * GIB, held * GIB, host)
        return
    with pytest.raises(VgpuError, match=why) as caught:
        check_host(wanted * GIB, held * GIB, host)
    assert caught.value.code is ErrorCode.NO_CAPACITY


@pytest.mark.parametrize(
    ("stays", "unevictable", "reported", "kinds"),
    [
        (
            9,
            7,
            (1, 2, 3, 0),
            {MEASURED_KIND: 5, "managed": 3, "pools": 2, "physical memory": 1, "small allocations": 1},
        ),
        (5, 0, (0, 0, 0, 0), {MEASURED_KIND: 5}),
        # the tenant has written false figures into its lease
        (4, -2, (0, 9, 0, 9), {"pools": 9, "graphs": 9}),
        (0, 0, (0, 0, 0, 0), {}),
    ],
)
def test_memory_that_stays_on_the_device_is_listed_by_kind_with_contexts_as_the_rest(
    stays: int, unevictable: int, reported: tuple[int, ...], kinds: dict[str, int]
) -> None:
    assert dict(stays_by_kind(stays, unevictable, reported)) == kinds


def test_a_device_that_is_absent_or_full_or_in_another_mode_does_not_take_its_tenant_back() -> None:
    def refused(allocation: Allocation, mode: Mode | None = None, memory_bytes: int = 0) -> ErrorCode:
        with pytest.raises(VgpuError) as caught:
            check_room(allocation, NODE, {} if mode is None else {"GPU-0": used(mode, memory_bytes)})
        return caught.value.code

    assert refused(tenant(uuid="GPU-9")) is ErrorCode.NO_SUCH_DEVICE
    assert refused(tenant(), Mode.MPS, GIB) is ErrorCode.DEVICE_IN_USE
    with pytest.raises(
        VgpuError, match=r"^device 0 is in mode mps with 1 allocation, and a needs it in mode pre"
    ):
        check_room(tenant(), NODE, {"GPU-0": used(Mode.MPS, GIB)})
    with pytest.raises(VgpuError, match=r"^device 0 has another allocation, and a needs the whole device"):
        check_room(tenant(Mode.EXCLUSIVE), NODE, {"GPU-0": used(Mode.EXCLUSIVE, GIB)})
    assert refused(tenant(), Mode.PRELOAD, H200_USABLE - 4 * GIB + 1) is ErrorCode.NO_CAPACITY
    check_room(tenant(), NODE, {"GPU-0": used(Mode.PRELOAD, H200_USABLE - 4 * GIB)})


def test_a_resume_is_refused_if_other_programs_leave_too_little_memory() -> None:
    saved = replace(tenant(), suspended=(SuspendedProcess(1, 1, 8 * GIB),))
    full = node_of(h200(0, memory_used_bytes=H200_USABLE - 7 * GIB))
    with pytest.raises(
        VgpuError, match="8GiB of allocation a do not fit on its device: 7GiB are free"
    ) as caught:
        check_card(saved, full)
    assert caught.value.code is ErrorCode.NO_CAPACITY
    check_card(saved, full, kept_bytes=GIB)
