"""Memory walls: the limits of control groups that follow from allocations, and the groups of containers."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests import clock
from tests.cgroups import cgroup  # noqa: F401
from tests.conditions import needs
from vgpud.model.device import Device, Node
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.marks import MarkKind
from vgpud.model.tenancy import (
    Allocation,
    Lifetime,
    Mode,
    Owner,
    Request,
    Slice,
    State,
    SuspendedProcess,
    Way,
)
from vgpud.modes.walls import Walls, WallWorld, wall_limits

GIB = 1 << 30
DEVICES = tuple(Device(uuid=f"GPU-{name}", index=at) for at, name in enumerate("abc"))


def allocation(name: str, *slices: Slice, group: Path | None = None) -> Allocation:
    lifetime = Lifetime(1, 1, "" if group is None else f"{group.stat().st_ino} {group}")
    return Allocation(name, Request(name, Owner(0, 0), lifetime=lifetime), State.ACTIVE, slices)


def part(device: str, gib: int, mode: Mode = Mode.PRELOAD, other: str = "") -> Slice:
    return Slice(f"GPU-{device}", mode, gib * GIB, other_uuid=other)


def suspended(name: str, *slices: Slice, gone: int, stays: int) -> Allocation:
    process = SuspendedProcess(1, 1, gone * GIB, Way.SWAP, stays * GIB)
    return replace(allocation(name, *slices), state=State.SUSPENDED, suspended=(process,))


@pytest.mark.parametrize(
    ("holders", "own", "limits"),
    [
        ([allocation("x", part("a", 2))], False, {"GPU-a": 2}),
        ([allocation("x", part("a", 2))], True, {"GPU-a": 2, "GPU-b": 0, "GPU-c": 0}),
        ([allocation("x", part("a", 2), part("b", 1))], False, {"GPU-a": 2, "GPU-b": 1}),
        ([allocation("x", part("a", 2)), allocation("y", part("a", 3))], False, {"GPU-a": 5}),
        ([allocation("x", part("a", 2, other="GPU-c"))], False, {"GPU-a": 2, "GPU-c": 2}),
        ([suspended("x", part("a", 2), gone=1, stays=1)], False, {"GPU-a": 2}),
        ([suspended("x", part("a", 2), gone=2, stays=1)], False, {"GPU-a": 3}),
        ([allocation("x", part("a", 2, Mode.MPS))], False, {"GPU-a": 2}),
        ([allocation("x", part("a", 2, Mode.EXCLUSIVE))], False, {}),
    ],
    ids=[
        "one",
        "own group",
        "two devices",
        "two allocations",
        "in a move",
        "suspended",
        "suspended above its limit",
        "mps",
        "a whole card",
    ],
)
def test_the_memory_limits_of_a_control_group_are_those_of_its_allocations(
    holders: list[Allocation], own: bool, limits: dict[str, int]
) -> None:
    assert wall_limits(holders, DEVICES, own) == {uuid: gib * GIB for uuid, gib in limits.items()}


@dataclass
class Driver:
    """Takes the place of NVML, and records the limits by device and control group."""

    told: dict[tuple[str, str], int | None] = field(default_factory=dict)
    error: VgpuError | None = None
    refusal: VgpuError | None = None

    def memory_limit(self, uuid: str, group: str) -> int | None:
        if self.error is not None:
            raise self.error
        return self.told.get((uuid, group))

    def set_memory_limit(self, uuid: str, group: str, limit_bytes: int | None) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.told[uuid, group] = limit_bytes


@dataclass
class Container:
    """The control group of a container, made outside of vgpud, with a process in it."""

    folder: Path
    walls: Walls
    driver: Driver
    allocations: list[Allocation]
    init: subprocess.Popen[bytes]

    def limits(self) -> dict[str, int | None]:
        return {uuid: limit for (uuid, group), limit in self.driver.told.items() if group == str(self.folder)}

    def add(self, name: str, *slices: Slice) -> Allocation:
        held = allocation(name, *slices, group=self.folder)
        self.allocations.append(held)
        clock.run(self.walls.build(held))
        return held

    def drop(self, held: Allocation) -> None:
        self.allocations.remove(held)
        clock.run(self.walls.drop(held))

    def end(self) -> None:
        self.init.kill()
        self.init.wait()


@pytest.fixture
def container(cgroup: Path) -> Iterator[Container]:  # noqa: F811
    folder = cgroup / "container"
    folder.mkdir()
    allocations: list[Allocation] = []
    driver = Driver()
    world = WallWorld(driver, lambda: tuple(allocations), lambda: Node(DEVICES), lambda _: True)
    init = subprocess.Popen(["sleep", "infinity"])
    (folder / "cgroup.procs").write_text(str(init.pid))
    made = Container(folder, Walls(f"{cgroup.name}/own", world), driver, allocations, init)
    yield made
    made.end()


@needs("cgroups")
def test_the_control_group_of_a_container_has_the_memory_limit_of_its_allocations(
    container: Container,
) -> None:
    first = container.add("x", part("a", 2))
    second = container.add("y", part("a", 3), part("b", 1))
    assert container.limits() == {"GPU-a": 5 * GIB, "GPU-b": GIB}
    assert container.walls.stands("x") and container.walls.stands("y")
    container.drop(second)
    # the container no longer has a slice on this device, so its limit there is 0
    assert container.limits() == {"GPU-a": 2 * GIB, "GPU-b": 0}
    container.end()
    container.drop(first)
    assert container.limits() == {"GPU-a": None, "GPU-b": 0}
    assert not container.walls.stands("x")


@needs("cgroups")
def test_the_memory_wall_of_an_ended_container_is_removed(container: Container) -> None:
    """The inode distinguishes the group's folder from a later folder with the same name."""
    held = container.add("x", part("a", 2))
    container.end()
    container.folder.rmdir()
    (container.folder.parent / "other").mkdir()
    container.folder.mkdir()
    container.driver.told.clear()
    container.drop(held)
    assert container.limits() == {}


@needs("cgroups")
@pytest.mark.parametrize("slices", [(part("a", 1, Mode.EXCLUSIVE),), (part("a", 1), part("gone", 1))])
def test_an_allocation_has_no_memory_wall_unless_each_of_its_slices_can_have_one(
    container: Container, slices: tuple[Slice, ...]
) -> None:
    container.add("x", *slices)
    assert not container.walls.stands("x") and container.limits() == {}


@needs("cgroups")
def test_all_users_can_read_a_control_group_that_vgpud_makes(container: Container, cgroup: Path) -> None:  # noqa: F811
    """Programs of a tenant look for their limits in the group. The umask is that of vgpud's unit."""
    here = Lifetime(os.getpid(), 1)  # the start time is that of another process, so no process is moved
    request = Request("x", Owner(0, 0), lifetime=here, own_cgroup=True)
    held = Allocation("x", request, State.ACTIVE, (part("a", 2),))
    before = os.umask(0o077)
    try:
        clock.run(container.walls.build(held))
    finally:
        os.umask(before)
    own = cgroup / "own"
    assert [folder.stat().st_mode & 0o777 for folder in (own, own / "x")] == [0o755, 0o755]
    clock.run(container.walls.drop(held))
    assert not (own / "x").exists()


@needs("cgroups")
def test_no_control_group_is_made_for_a_driver_without_memory_walls(
    container: Container,
    cgroup: Path,  # noqa: F811
) -> None:
    container.driver.error = VgpuError(ErrorCode.UNSUPPORTED, "this driver does not have it", "")
    container.add("x", part("a", 2))
    assert not container.walls.stands("x") and not (cgroup / "own").exists()


@needs("cgroups")
@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ("refusal", "the driver is busy (E503); libvgpu alone enforces the memory limit"),
        (
            "error",
            "the driver is busy (E503); without it libvgpu or MPS alone enforces memory limits on the device",
        ),
    ],
)
def test_a_tenant_whose_memory_wall_the_driver_refuses_is_marked_with_the_reason(
    container: Container, call: str, sentence: str
) -> None:
    setattr(container.driver, call, VgpuError(ErrorCode.NVML_FAILED, "the driver is busy", ""))
    held = container.add("x", part("a", 2))
    mark = container.walls.refusal(held)
    assert mark is not None and not container.walls.stands("x")
    assert (mark.allocation_id, mark.kind, mark.sentence) == ("x", MarkKind.NO_WALL, sentence)
