"""Compares vgpud's MIG figures with the real NVML, without changes: `python -m tests.gpu.mig_readonly`.

Starts a vgpud in folders of its own (nothing is allocated or applied), and compares its readings and plans
with direct calls of NVML. Meant for a GPU with MIG mode off; runs with it on as well. Needs read access to
/dev/nvidia*, no root. Prints a table and exits 0 if all holds.
"""

import sys
import time
from collections.abc import Callable

import yaml

from tests.demo.node import DemoNode
from vgpud.api.client import Client
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.hardware.gateway import Gateway
from vgpud.model.device import Device
from vgpud.planner.geometry import MigGeometry, geometry_for
from vgpud.planner.layouts import spell, target
from vgpud.planner.pool import NO_POOL, stock_of

results: list[tuple[str, bool, str]] = []


def check(name: str, work: Callable[[], tuple[bool, str]]) -> None:
    try:
        held, said = work()
    except Exception as error:  # an error in one row must not end the whole table
        held, said = False, f"{type(error).__name__}: {error}"
    results.append((name, held, said))
    print(f"{'ok  ' if held else 'FAIL'} {name}: {said}", flush=True)


def modes() -> list[list[int]]:
    import pynvml as n

    n.nvmlInit()
    try:
        found = []
        for index in range(n.nvmlDeviceGetCount()):
            handle = n.nvmlDeviceGetHandleByIndex(index)
            try:
                found.append(list(n.nvmlDeviceGetMigMode(handle)))
            except n.NVMLError_NotSupported:
                found.append([])
        return found
    finally:
        n.nvmlShutdown()


def discovery(device: Device) -> tuple[bool, str]:
    names = ", ".join(f"{p.name} ({p.id}) x{len(p.placements)}" for p in device.mig.profiles)
    sound = all(p.placements and p.slice_count and p.memory_bytes for p in device.mig.profiles)
    return bool(device.mig.profiles) and sound, f"{len(device.mig.profiles)} profiles: {names}"


def tables(device: Device) -> tuple[bool, str]:
    began = time.perf_counter()
    geometry = MigGeometry(device.mig.profiles)
    built = time.perf_counter() - began
    plain = tuple(p for p in device.mig.profiles if "+me" not in p.name)
    states = len(MigGeometry(plain).free_after)
    right = geometry.compute_slices != 7 or states == 723
    return right, f"{len(geometry.free_after)} layouts ({states} without +me), built in {built * 1e3:.1f} ms"


def layouts(device: Device) -> tuple[bool, str]:
    geometry = geometry_for(device.mig.profiles)
    stock = stock_of(geometry, device, (), NO_POOL)
    found = target(geometry, stock.layout, 0, ["all-balanced"])
    return isinstance(found, int), " ".join(spell(geometry, geometry.keys(found))) if isinstance(
        found, int
    ) else ""


def plan(client: Client, index: int) -> tuple[bool, str]:
    asked = pb.MigTarget(selector=pb.Selector(indices=[index]), layout=["all-balanced"])
    reply = client.plan_mig(pb.MigRequest(targets=[asked]))
    if reply.HasField("refusal"):
        return True, f"refused, as it may: {reply.refusal.sentence}"
    steps = [f"{c.kind} {c.profile_name}@{c.placement.start}".strip() for c in reply.changes]
    return bool(steps), ", ".join(steps)


def export(node: DemoNode) -> tuple[bool, str]:
    written = yaml.safe_load(node.ctl("mig", "export").stdout)
    return written["version"] == "v1", str(written["mig-configs"]["current"])


def main() -> int:
    before = modes()
    devices = [d for d in Gateway().snapshot().devices if d.mig.capable]
    if not devices:
        print("no GPU here can be partitioned by MIG")
        return 1
    for device in devices:
        name = f"device {device.index} {device.name}"
        check(f"{name}: discovery", lambda device=device: discovery(device))  # type: ignore[misc]
        check(f"{name}: tables", lambda device=device: tables(device))  # type: ignore[misc]
        check(f"{name}: layouts", lambda device=device: layouts(device))  # type: ignore[misc]
    node = DemoNode()
    try:
        node.start()
        with Client(node.run_dir / "admin.sock", 60) as client:
            for device in devices:
                number = device.index
                check(f"device {number}: plan", lambda number=number: plan(client, number))  # type: ignore[misc]
            check("mig ls", lambda: (len(client.list_mig().devices) == len(devices), "as discovered"))
        print(node.ctl("mig", "ls", "-o", "wide").stdout)
        check("export", lambda: export(node))
        node.stop()
    finally:
        node.remove()
    after = modes()
    check("MIG mode is as it was", lambda: (before == after, f"{after}"))
    return 0 if all(held for _, held, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
