"""The scenes of the demo: every mode that the node allows, tenants at their limits, and a daemon that is
killed and restarted.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tests.demo.checks import Checks
from tests.demo.node import BUILD, DemoNode, Tenant
from vgpud.model.quantity import GIB, MIB, show_bytes

PROBE = str(BUILD / "bin" / "vgpu-probe")
PIECE = 32 * MIB
_EMPTY_SECONDS = 300
TORCH = """
import json, sys, torch
held = []
try:
    while True:
        held.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
except torch.cuda.OutOfMemoryError:
    got = len(held) * (64 << 20)
    free, total = torch.cuda.mem_get_info()
    del held[8:]
    x = torch.arange(1000, device="cuda").sum().item()
    print(json.dumps({"bytes": got, "free": free, "total": total, "works": x == 499500}))
"""


def play(node: DemoNode, checks: Checks) -> None:
    seconds = node.start()
    status = node.ctl_json("status")
    where = "the simulated node" if status["simulated"] else "real GPUs"
    checks.check(f"vgpud serves {where}", status["deviceCount"] > 0, f"ready in {seconds:.2f} s")
    device = node.ctl_json("devices")["items"][0]
    print(f"  device 0: {device['name']}, {show_bytes(int(device['memoryTotalBytes']))}")
    preload(node, checks)
    torch_program(node, checks)
    mps(node, checks, bool(device.get("mpsCapable")))
    mig(node, checks, device, status["simulated"])
    exclusive(node, checks)
    all_released(node, checks)


def kill_and_return(node: DemoNode, checks: Checks, mode: str, tenants: list[Tenant]) -> None:
    """Kills and restarts vgpud while tenants run. Allocations and processes stay the same, without any action
    of the tenants.
    """
    before = {a["id"]: a["slices"] for a in node.ctl_json("ls")["items"]}
    node.kill()
    alive = all(t.alive for t in tenants)
    seconds = node.start()
    after = {a["id"]: a["slices"] for a in node.ctl_json("ls")["items"]}
    alive = alive and all(t.alive for t in tenants)
    checks.check(
        f"{mode}: vgpud killed with -9 and back: allocations and tenants intact",
        before == after and len(before) == len(tenants) and alive,
        f"{len(after)} allocations, {len(tenants)} tenants alive, back in {seconds:.2f} s",
    )


def preload(node: DemoNode, checks: Checks) -> None:
    """Two tenants of different sizes share one device."""
    limits = (4 * GIB, 2 * GIB)
    tenants = []
    for limit in limits:
        options = ["--isolation", "quota", "--device", "0", "--memory", f"{limit // GIB}GiB"]
        tenants.append(node.tenant(options, [PROBE, "hold", str(limit // 4), "--then-wait-on-stdin"]))
    held = [t.line() for t in tenants]
    totals = [int(h["total_bytes"]) for h in held]
    checks.check(
        "preload: two tenants on one device, each sees its own limit as the card's memory",
        totals == list(limits),
        ", ".join(map(show_bytes, totals)),
    )
    options = ["--isolation", "quota", "--device", "0", "--memory", "1GiB"]
    third = node.tenant(options, [PROBE, "fill", "--piece", str(PIECE)])
    filled = third.line()
    third.end()
    checks.check(
        "preload: a tenant is refused at its limit, with CUDA's own out-of-memory error",
        0 < int(filled["total_bytes"]) <= GIB and filled["result"] == "CUDA_ERROR_OUT_OF_MEMORY",
        f"got {show_bytes(int(filled['total_bytes']))} of 1GiB, then {filled['result']}",
    )
    neighbour = tenants[1].alive and tenants[0].alive
    checks.check("preload: its neighbours go on", neighbour)
    kill_and_return(node, checks, "preload", tenants)
    resize(node, checks)
    ended = [t.end()[0] for t in tenants]
    checks.check("preload: tenants end as they would without vgpud", ended == [0, 0], f"exit {ended}")


def resize(node: DemoNode, checks: Checks) -> None:
    first = node.ctl_json("ls")["items"][0]["id"]
    node.ctl("resize", first, "--memory", "6GiB")
    shown = node.ctl_json("show", first)["slices"][0]["memoryBytes"]
    checks.check("preload: a running tenant is resized", int(shown) == 6 * GIB, show_bytes(int(shown)))


def mps(node: DemoNode, checks: Checks, capable: bool) -> None:
    if not capable or shutil.which("nvidia-cuda-mps-control") is None:
        checks.skip("mps", "no nvidia-cuda-mps-control here" if capable else "the device has no MPS")
        return
    options = ["--isolation", "compute", "--device", "0", "--memory", "2GiB", "--cores", "50"]
    tenant = node.tenant(options, [PROBE, "hold", str(256 * MIB), "--then-wait-on-stdin"])
    tenant.line()
    second = node.tenant(options, [PROBE, "fill", "--piece", str(PIECE)])
    filled = second.line()
    second.end()
    checks.check(
        "mps: a tenant is refused at its limit while its neighbour goes on",
        0 < int(filled["total_bytes"]) <= 2 * GIB and "OUT_OF_MEMORY" in filled["result"] and tenant.alive,
        f"got {show_bytes(int(filled['total_bytes']))} of 2GiB, then {filled['result']}",
    )
    kill_and_return(node, checks, "mps", [tenant])
    code, _ = tenant.end()
    checks.check("mps: the tenant ends as it would without vgpud", code == 0, f"exit {code}")


def mig(node: DemoNode, checks: Checks, device: dict[str, object], simulated: bool) -> None:
    state = device.get("mig") or {}
    assert isinstance(state, dict)
    if not state.get("capable"):
        checks.skip("mig", "the device cannot be partitioned")
        return
    if not simulated and not state.get("current"):
        checks.skip("mig", "MIG mode is off on this real card, and a demo does not change a card's mode")
        return
    options = ["--isolation", "hardware", "--device", "0", "--memory", "16GiB"]
    tenants = [
        node.tenant(options, [PROBE, "hold", str(256 * MIB), "--then-wait-on-stdin"]) for _ in range(2)
    ]
    uuids = {str(t.line()["uuid"]) for t in tenants}
    instances = node.ctl_json("devices")["items"][0]["mig"].get("instances", [])
    checks.check(
        "mig: two tenants in instances of their own",
        len(uuids) == 2 and len(instances) == 2,
        ", ".join(sorted(u[:12] + "..." for u in uuids)),
    )
    kill_and_return(node, checks, "mig", tenants)
    codes = [t.end()[0] for t in tenants]
    checks.check("mig: the tenants end as they would without vgpud", codes == [0, 0], f"exit {codes}")


def exclusive(node: DemoNode, checks: Checks) -> None:
    tenant = node.tenant(["--device", "0"], [PROBE, "hold", str(256 * MIB), "--then-wait-on-stdin"])
    tenant.line()
    refused = node.ctl("alloc", "--device", "0", "--memory", "1GiB", check=False)
    checks.check(
        "exclusive: the whole card, with no libvgpu in the process, and nobody beside it",
        "libvgpu.so" not in Path(f"/proc/{tenant.process.pid}/maps").read_text() and refused.returncode == 33,
        refused.stderr.strip().splitlines()[0] if refused.stderr else "",
    )
    kill_and_return(node, checks, "exclusive", [tenant])
    code, _ = tenant.end()
    checks.check("exclusive: the tenant ends as it would without vgpud", code == 0, f"exit {code}")


def torch_program(node: DemoNode, checks: Checks) -> None:
    """Runs only with a real GPU and PyTorch. The simulated libcuda runs no PyTorch kernels."""
    python = torch_python()
    if python is None or node.ctl_json("status")["simulated"]:
        checks.skip("a PyTorch program held to its limit", "no PyTorch with a real GPU here")
        return
    options = ["--isolation", "quota", "--device", "0", "--memory", "8GiB"]
    tenant = node.tenant(options, [python, "-c", TORCH])
    seen = tenant.line()
    code, _ = tenant.end()
    checks.check(
        "preload: a PyTorch program is held to its 8 GiB and meets its own OutOfMemoryError",
        code == 0 and seen["bytes"] <= 8 * GIB and seen["total"] == 8 * GIB and seen["works"],
        f"got {show_bytes(seen['bytes'])}, sees {show_bytes(seen['total'])} in all",
    )


def torch_python() -> str | None:
    """A Python that has PyTorch. The virtual environment of this source tree lacks it."""
    return python_with("torch")


@cache
def python_with(module: str) -> str | None:
    """The first other Python of PATH that has the module; otherwise this Python if it has the module, or
    None.
    """
    own = Path(sys.executable).resolve().parent
    for folder in filter(None, os.environ.get("PATH", "").split(":")):
        candidate = Path(folder) / "python3"
        if not candidate.exists() or candidate.parent.resolve() == own:
            continue
        has = f"import importlib.util, sys; sys.exit(not importlib.util.find_spec({module!r}))"
        if subprocess.run([str(candidate), "-c", has], check=False, capture_output=True).returncode == 0:
            return str(candidate)
    return sys.executable if find_spec(module) is not None else None


def all_released(node: DemoNode, checks: Checks) -> None:
    left = [a["id"] for a in wait_until_empty(node)]
    for allocation in left:
        node.ctl("release", allocation, "--force", check=False)
    leases = list((node.run_dir / "leases").glob("*"))
    specs = list((node.folder / "cdi").glob("*.json"))
    instances = node.ctl_json("devices")["items"][0].get("mig", {}).get("instances", [])
    checks.check(
        "everything is released: no allocation, lease, CDI spec or GPU instance is left",
        not (left or leases or specs or instances),
        f"{len(left)} allocations, {len(leases)} leases, {len(specs)} specs, {len(instances)} instances",
    )
    code = node.stop()
    units = list((node.run_dir / "units").glob("*.pid"))
    checks.check("a clean stop leaves no helper process behind", code == 0 and not units, f"exit {code}")


def wait_until_empty(node: DemoNode) -> list[dict[str, str]]:
    """Waits until no allocation is left. Those of `vgpuctl run` end shortly after their process. Returns
    those that are left.
    """
    items: list[dict[str, str]] = []
    end = time.monotonic() + _EMPTY_SECONDS
    while time.monotonic() < end:
        items = node.ctl_json("ls").get("items", [])
        if not items:
            return []
        time.sleep(0.1)
    return items


def clear_away(node: DemoNode) -> None:
    """Ends every process of the demo, whatever happened before."""
    if node.daemon is not None and node.daemon.poll() != 0 and not node.answers():
        node.kill()
        with suppress(RuntimeError):
            node.start()  # a new daemon adopts the helpers, and ends them when it stops
    if node.daemon is not None and node.daemon.poll() is None:
        for process in node.ctl_json("ps").get("items", []):
            if process.get("allocationId"):  # a tenant that a user's shell has left running
                with suppress(ProcessLookupError):
                    os.kill(process["pid"], signal.SIGKILL)
        for allocation in node.ctl_json("ls").get("items", []):
            node.ctl("release", allocation["id"], "--force", check=False)
        node.stop()
    node.remove()
