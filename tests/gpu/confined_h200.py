"""vgpud under the restrictions of its systemd unit, in every mode: `python -m tests.gpu.confined_h200`.

Plays the scenes of ./dev demo, and a suspension, a reload and a scrape. tests/gpu/confine.py confines the
daemon as systemd/vgpud.service says; the tenants are not confined. It uses this machine's GPUs, or the
simulated node if there are none. Needs root and build/native. --prepared names a file of `tests.gpu.confine
prepare`, from a machine with systemd; else it is prepared here. The MIG mode of devices is not changed: if it
is off, mode mig is left out. Restrictions that this machine lacks are printed and not checked.

Without systemd the helpers of vgpud are its children, and confined like vgpud. The MPS control daemon has a
unit of its own with far fewer restrictions, so it is more confined here than under systemd.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from tests.demo import scenes
from tests.demo.__main__ import real_gpus
from tests.demo.checks import Checks
from tests.demo.node import BUILD, POLICY, ROOT, DemoNode
from tests.e2e.conftest import end_helpers
from tests.gpu import confine
from tests.ports import free_port
from vgpud.model.errors import VgpuError
from vgpud.model.quantity import MIB

#: The node's folders are in /run, as vgpud's own are, because PrivateTmp= hides /tmp.
FOLDERS = "/run"


class ConfinedNode(DemoNode):
    """A node whose daemon is confined to the folders that the unit leaves writable."""

    def __init__(self, prepared: Path) -> None:
        tempfile.tempdir = FOLDERS
        super().__init__(POLICY)
        tempfile.tempdir = None
        open_folders = [self.folder]
        if "VGPU_SIM_STATE" in os.environ:
            open_folders.append(Path(os.environ["VGPU_SIM_STATE"]).parent)  # replaces /dev/nvidia*
        words = [word for folder in open_folders for word in ("--writable", str(folder))]
        confined = (sys.executable, "-m", "tests.gpu.confine", "run", str(prepared), *words)
        self.command = (*confined, "--", *DemoNode.command)


def closed_in(node: DemoNode, checks: Checks) -> None:
    assert node.daemon is not None
    text = Path(f"/proc/{node.daemon.pid}/status").read_text()
    facts = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    keep = confine.directives()["CapabilityBoundingSet"]
    bounds = sum(1 << confine.CAPABILITIES[name.removeprefix("CAP_")] for name in keep)
    more = [f"{facts[key]} in {key}" for key in ("CapBnd", "CapEff") if int(facts[key], 16) & ~bounds]
    closed = (facts["NoNewPrivs"], facts["Seccomp"]) == ("1", "2")
    checks.check("no new privileges, and seccomp filters", closed, facts["Seccomp_filters"])
    if lacks(node, "CapabilityBoundingSet"):
        checks.skip("no capabilities but the unit's", "they cannot be dropped here")
    else:
        checks.check("no capabilities but the unit's", not more, facts["CapEff"])
    if lacks(node, "ProtectSystem"):
        checks.skip("its / is read-only", "no mounts of its own can be had here")
        return
    mounts = Path(f"/proc/{node.daemon.pid}/mountinfo").read_text().splitlines()
    (root,) = [line.split()[5] for line in mounts if line.split()[4] == "/"]
    checks.check("its / is read-only", "ro" in root.split(","), root)


def lacks(node: DemoNode, what: str) -> bool:
    return f"not applied: {what}" in node.log.read_text()


def suspend(node: DemoNode, checks: Checks) -> None:
    asked = ["--isolation", "quota", "--device", "0", "--memory", "2GiB"]
    tenant = node.tenant(asked, [scenes.PROBE, "hold", str(256 * MIB), "--then-wait-on-stdin"])
    tenant.line()
    (name,) = [item["id"] for item in node.ctl_json("ls")["items"]]
    done = node.ctl("suspend", name, check=False)
    if done.returncode != 0 and "driver" in done.stderr:
        checks.skip("a tenant is suspended and goes on", done.stderr.strip().splitlines()[0])
    else:
        state = node.ctl_json("show", name)["state"]
        back = node.ctl("resume", name, check=False)
        checks.check(
            "a tenant is suspended and goes on",
            (done.returncode, state, back.returncode) == (0, "suspended", 0) and tenant.alive,
            (done.stderr + back.stderr).strip() or f"state {state} between",
        )
    tenant.end()
    scenes.wait_until_empty(node)


def reload(node: DemoNode, checks: Checks) -> None:
    """Metrics are served on the Unix socket. The unit forbids TCP without a drop-in, so a policy with a TCP
    address is refused.
    """
    policy, plain = Path(node.environment["VGPUD_CONFIG"]), POLICY
    policy.write_text(f'{plain}[metrics]\nlisten = "127.0.0.1:{free_port()}"\n')
    tcp = node.ctl("policy", "reload", check=False)
    policy.write_text(plain)
    done = node.ctl("policy", "reload", check=False)
    words = ["curl", "-sf", "--max-time", "10", "--unix-socket", str(node.run_dir / "metrics.sock")]
    got = subprocess.run([*words, "http://localhost/metrics"], capture_output=True, text=True, check=False)
    checks.check(
        "a policy is reloaded, metrics are served by the socket, and TCP is refused",
        done.returncode == 0 and tcp.returncode != 0 and "vgpud_gpu_healthy" in got.stdout,
        done.stderr.strip() or f"{len(got.stdout.splitlines())} lines",
    )


def refused_outside(node: DemoNode, checks: Checks) -> None:
    """Checks that a shell under the same restrictions cannot do what the unit forbids."""
    tries = {
        "write to /usr": "touch /usr/vgpud-was-here",
        "write to /proc/sys": "echo 1 >/proc/sys/vm/swappiness",
        "a namespace": "unshare -m true",
        "a set-user-ID file": f"touch {node.folder}/s && chmod u+s {node.folder}/s",
        "memory to write and execute": f"{sys.executable} -c 'import mmap; mmap.mmap(-1, 4096, prot=7)'",
        "a packet socket": f"{sys.executable} -c 'import socket; socket.socket(17, 3, 0)'",
    }
    if lacks(node, "ProtectSystem"):
        tries = {what: script for what, script in tries.items() if not what.startswith("write")}
    confined = list(node.command[: node.command.index("--") + 1])
    went = [
        what
        for what, script in tries.items()
        if subprocess.run(
            [*confined, "sh", "-c", script], cwd=ROOT, capture_output=True, check=False
        ).returncode
        == 0
    ]
    checks.check(f"closed: {', '.join(tries)}", went == [], f"possible: {went}" if went else "")


def play(node: DemoNode, checks: Checks) -> None:
    node.start()
    print(node.log.read_text(), end="")
    closed_in(node, checks)
    refused_outside(node, checks)
    suspend(node, checks)
    reload(node, checks)
    node.stop()
    scenes.play(node, checks)


def on_simulated_node(words: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="vgpu-sim-") as folder:
        inside = [str(BUILD / "bin" / "vgpu-sim"), "run", "--profile", "h200x8", "--state", f"{folder}/node"]
        return subprocess.call([*inside, "--", sys.executable, "-m", "tests.gpu.confined_h200", *words])


def main() -> int:
    parser = argparse.ArgumentParser(description="vgpud under its unit's own restrictions")
    parser.add_argument("--prepared", type=Path, default=ROOT / "build" / "confine.json")
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("needs root", file=sys.stderr)
        return 2
    if not options.prepared.exists():
        confine.prepare(options.prepared)
    if "VGPU_SIM_STATE" not in os.environ and real_gpus() == 0:
        return on_simulated_node(sys.argv[1:])
    checks = Checks()
    node = ConfinedNode(options.prepared.resolve())
    try:
        play(node, checks)
    except (
        AssertionError,
        RuntimeError,
        VgpuError,
        subprocess.TimeoutExpired,
        OSError,
        json.JSONDecodeError,
    ) as error:
        traceback.print_exc()
        checks.check("it ran to its end", False, error)
    finally:
        if checks.failed:
            print(node.log.read_text()[-4000:], file=sys.stderr)
        end_helpers(node)
        node.remove()
    print(f"\n{checks.table()}")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
