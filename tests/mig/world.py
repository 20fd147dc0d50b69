"""Requests of the MIG tests to the daemon, and changes that bypass it."""

import json
import subprocess
import sys
from typing import Any

from tests.demo.node import DemoNode
from tests.e2e.support import PROBE, client
from vgpud.api.gen import vgpud_pb2 as pb


def target(layout: str, *indices: int) -> pb.MigRequest:
    """A request for `layout`, on device 0 unless others are named."""
    selector = pb.Selector(indices=indices or (0,))
    return pb.MigRequest(targets=[pb.MigTarget(selector=selector, layout=layout.split())])


def device(node: DemoNode, index: int = 0) -> pb.MigDevice:
    with client(node) as calls:
        return next(d for d in calls.list_mig().devices if d.device_index == index)


def standing(node: DemoNode, index: int = 0) -> set[str]:
    """PROFILE@START of every instance on the device."""
    return {
        f"{i.profile_name}@{i.placement.start}"
        for i in device(node, index).instances
        if i.HasField("gpu_instance_id")
    }


def apply(node: DemoNode, layout: str, *indices: int) -> pb.MigPlanReply:
    with client(node) as calls:
        return calls.apply_mig(target(layout, *indices))


def allocate(node: DemoNode, profile: str, index: int = 0, **asked: Any) -> pb.Allocation:
    with client(node) as calls:
        return calls.allocate(
            pb.AllocateRequest(mig_profile=profile, selector=pb.Selector(indices=[index]), **asked)
        )


def place(allocation: pb.Allocation) -> str:
    mig = allocation.slices[0].mig
    return f"{mig.profile_name}@{mig.placement.start}"


def fill(node: DemoNode, held: pb.Allocation) -> dict[str, Any]:
    """Runs a program that allocates all the memory that it can. Returns its result."""
    done = subprocess.run(
        [PROBE, "fill", "--piece", "256MiB"],
        env={**node.environment, **held.edits.env, **held.edits.host_env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def nvml(node: DemoNode, code: str) -> str:
    """Runs Python with NVML on the node, as an administrator could. In `code`, `h` is device 0."""
    head = "import ctypes, pynvml as n\nn.nvmlInit()\nh = n.nvmlDeviceGetHandleByIndex(0)\n"
    done = subprocess.run(
        [sys.executable, "-c", head + code],
        env=node.environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


MAKE = """
at = n.c_nvmlGpuInstancePlacement_t({start}, {size})
gi = n.nvmlDeviceCreateGpuInstanceWithPlacement(h, {profile}, ctypes.byref(at))
"""
WHOLE = "n.nvmlGpuInstanceCreateComputeInstance(gi, {compute})\n"


def make_by_hand(node: DemoNode, profile: int, start: int, size: int, compute: int | None = 0) -> None:
    """Makes an instance without vgpud. `compute` is the profile of its compute instance."""
    code = MAKE.format(profile=profile, start=start, size=size)
    nvml(node, code + ("" if compute is None else WHOLE.format(compute=compute)))
