"""A Debian 12 with the packages, from installation to purge, on the simulated node.

The tests share one machine and restore its state. The last test removes the packages.
"""

import json
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytest

from tests.conditions import needs, unmet
from tests.kubelet import official
from tests.packaging.conftest import Installed, listing
from tests.packaging.debs import as_later
from tests.packaging.machine import Machine
from tests.simnode import ROOT
from vgpud.model.journal import Message

pytestmark = [needs("machine", "debhelper", "root"), pytest.mark.xdist_group("packaging")]

MIB = 1 << 20
SIM = ("vgpu-sim", "run", "--state", "/run/vgpud-sim/node", "--")
PROBE = "/usr/lib/vgpud-sim/bin/vgpu-probe"
HELPERS = ("vgpud-arbiter.service", "vgpud-mps@*.service")
#: systemd-run returns after the program has been executed, so the file of its output exists
STARTED = ("--quiet", "--service-type=exec")


@pytest.fixture
def machine(installed: Installed) -> Machine:
    return installed.machine


def ctl(
    machine: Machine,
    *words: str,
    user: str = "root",
    check: bool = True,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    return machine.run("vgpuctl", *words, user=user, check=check, env=env)


def allocations(machine: Machine) -> dict[str, Any]:
    items = json.loads(ctl(machine, "ls", "-o", "json").stdout)["items"]
    return {item["id"]: item["slices"] for item in items}


def holds_memory(machine: Machine, unit: str) -> bool:
    return "total_bytes" in machine.shell(f"cat /tmp/{unit}")


class Tenants:
    """Alice's programs, which hold memory on the simulated GPUs: one preload tenant and one MPS tenant."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.asked = {
            "tenant-quota": ("--isolation", "quota", "--device", "0", "--memory", "1GiB"),
            "tenant-mps": ("--isolation", "compute", "--device", "1", "--memory", "1GiB", "--cores", "50"),
        }

    def begin(self) -> None:
        machine = self.machine
        machine.shell("rm -f /tmp/tenant-*")
        for unit, asked in self.asked.items():
            options = [
                *STARTED,
                f"--unit={unit}",
                "--uid=alice",
                f"--property=StandardOutput=file:/tmp/{unit}",
            ]
            hold = (PROBE, "hold", str(256 * MIB), "--seconds", "3600")
            machine.run("systemd-run", *options, *SIM, "vgpuctl", "run", *asked, "--", *hold)
        for unit in self.asked:
            machine.eventually(partial(holds_memory, machine, unit), f"{unit} holds memory")
        self.began = self.state()

    def state(self) -> tuple[object, ...]:
        """The facts that must not change while the tenants live: their processes, helpers and allocations."""
        pids = tuple(self.machine.unit(f"{unit}.service", "MainPID") for unit in self.asked)
        helpers = self.machine.shell(f"systemctl show -p Id,MainPID,NRestarts {HELPERS[0]} '{HELPERS[1]}'")
        return pids, helpers, allocations(self.machine)

    def probe_pid(self, unit: str) -> str:
        """The pid of the unit's program, a child of the process that enters the simulated node."""
        outer = self.machine.unit(f"{unit}.service", "MainPID")
        return self.machine.shell(f"cat /proc/{outer}/task/{outer}/children")

    def assert_undisturbed(self) -> None:
        assert self.state() == self.began
        for unit in self.asked:
            assert self.machine.unit(f"{unit}.service", "ActiveState") == "active"

    def end(self) -> None:
        for unit in self.asked:
            self.machine.run("systemctl", "stop", f"{unit}.service", check=False)
            self.machine.run("systemctl", "reset-failed", f"{unit}.service", check=False)
        self.machine.eventually(lambda: not allocations(self.machine), "nothing is allocated")


@pytest.fixture
def tenants(machine: Machine) -> Iterator[Tenants]:
    made = Tenants(machine)
    try:
        made.begin()
        yield made
    finally:
        made.end()


def main_pid(machine: Machine) -> str:
    return machine.unit("vgpud.service", "MainPID")


def ready_again(machine: Machine, old_pid: str) -> None:
    def holds() -> bool:
        return machine.unit("vgpud.service", "ActiveState") == "active" and main_pid(machine) not in (
            "0",
            old_pid,
        )

    machine.eventually(holds, "vgpud.service is up again")


def test_the_daemon_serves_after_the_installation(installed: Installed) -> None:
    machine = installed.machine
    print(f"dpkg -i of the three packages to READY: {installed.install_seconds:.1f} s")
    status = json.loads(ctl(machine, "status", "-o", "json").stdout)
    assert (status["simulated"], status["deviceCount"]) == (True, 8)
    assert "8 devices" in machine.unit("vgpud.service", "StatusText")
    assert (
        machine.run("systemctl", "is-enabled", "vgpud.service", "vgpud.socket").stdout.split()
        == ["enabled"] * 2
    )
    assert machine.shell("systemctl list-units --failed --no-legend 'vgpud*'") == ""


def test_every_module_can_be_loaded(machine: Machine) -> None:
    """Loads every module of vgpud, and the modules of other packages that vgpud loads only after an error."""
    code = """
import importlib, pkgutil, structlog.dev, vgpud
for module in pkgutil.walk_packages(vgpud.__path__, "vgpud."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
    machine.run("/usr/lib/vgpud/bin/python3", "-I", "-c", code)


def test_each_socket_has_the_owner_group_and_mode_of_its_rights(machine: Machine) -> None:
    shown = machine.shell(
        "cd /run/vgpud; stat -c '%n %a %U:%G' . admin.sock ro.sock runtime.sock vgpud.sock"
    ).splitlines()
    assert shown == [
        ". 711 root:root",
        "admin.sock 600 root:root",
        "ro.sock 666 root:root",
        "runtime.sock 600 root:vgpu",
        "vgpud.sock 660 root:vgpu",
    ]
    for name in ("vgpud.socket", "vgpud-ro.socket", "vgpud-admin.socket", "vgpud-runtime.socket"):
        assert machine.unit(name, "ActiveState") == "active"


def test_the_start_corrects_folder_permissions_of_an_older_version_and_makes_the_cdi_folder(
    machine: Machine,
) -> None:
    pid = main_pid(machine)
    machine.shell("systemctl stop vgpud.service; chmod 0755 /run/vgpud; rm -r /run/cdi")
    machine.run("systemctl", "start", "vgpud.service")
    ready_again(machine, pid)
    assert machine.shell("stat -c %a /run/vgpud /run/cdi").split() == ["711", "755"]
    machine.run("nsenter", "-t", main_pid(machine), "-m", "sh", "-c", "rm $(mktemp -p /run/cdi)")


def test_a_call_to_runtime_sock_starts_a_stopped_daemon_and_gets_its_answer(machine: Machine) -> None:
    pid = main_pid(machine)
    machine.run("systemctl", "stop", "vgpud.service")
    ask = (
        "import socket; s = socket.socket(socket.AF_UNIX); s.settimeout(120);"
        "s.connect('/run/vgpud/runtime.sock'); s.sendall(bytes(20)); print(s.recv(4096))"
    )
    # the call fails with an error message
    assert "E103" in machine.run("python3", "-c", ask).stdout
    ready_again(machine, pid)


def test_the_daemon_runs_under_the_restrictions_of_its_unit(machine: Machine) -> None:
    shown = machine.shell(f"cat /proc/{main_pid(machine)}/status")
    facts = dict(line.split(":\t", 1) for line in shown.splitlines() if ":\t" in line)
    assert (facts["NoNewPrivs"], facts["Seccomp"], facts["Umask"]) == ("1", "2", "0077")
    # capabilities by their numbers in linux/capability.h: SYS_ADMIN 21, SYS_PTRACE 19, MKNOD 27, KILL 5,
    # CHOWN 0, FOWNER 3, DAC_OVERRIDE 1
    assert int(facts["CapBnd"], 16) == sum(1 << bit for bit in (0, 1, 3, 5, 19, 21, 27))
    done = machine.run("nsenter", "-t", main_pid(machine), "-m", "touch", "/usr/lib/vgpud/x", check=False)
    assert "Read-only file system" in done.stderr


def test_a_member_of_group_vgpu_can_allocate_and_another_user_cannot(machine: Machine) -> None:
    asked = ("alloc", "--isolation", "quota", "--memory", "1GiB", "-o", "name")
    allocation = ctl(machine, *asked, user="alice").stdout.strip().split("/")[-1]
    try:
        assert allocation in allocations(machine)
        refused = ctl(machine, *asked, user="bob", check=False)
        assert refused.returncode == 4
        assert allocation not in ctl(machine, "release", allocation, user="bob", check=False).stdout
        assert allocation in allocations(machine)
        assert ctl(machine, "status", user="bob").returncode == 0
    finally:
        ctl(machine, "release", allocation, user="alice")
    assert allocations(machine) == {}


HOSTILE = """
import ctypes, os, sys, time
usage = os.open(sys.argv[1], os.O_RDWR)
print("open", flush=True)
while os.fstat(usage).st_nlink:
    time.sleep(0.01)
fallocate = ctypes.CDLL(None).fallocate
fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
at, length = 5 << 20, 1 << 30
while length >= 4096:
    if fallocate(usage, 1, at, length):
        length //= 2
    else:
        at += length
for number in range(3000):
    try:
        os.setxattr(usage, f"user.{number}", bytes(65536))
    except OSError:
        break
print("full", flush=True)
time.sleep(3600)
"""


def test_a_tenant_that_fills_its_usage_file_after_its_end_takes_nothing_from_others(machine: Machine) -> None:
    """An attack: a removed `usage` that a process keeps open uses up its file system, by blocks and by
    extended attributes.
    """
    words = ("alloc", "--isolation", "quota", "--memory", "1GiB", "-o", "name")
    allocation = ctl(machine, *words, user="alice").stdout.strip().split("/")[-1]
    usage, said = f"/run/vgpud/leases/{allocation}/usage", "/tmp/hostile"
    place = machine.shell(f"dirname $(readlink -f /run/vgpud/leases/{allocation})").strip()
    # the path within the file system, by which a container's process belongs to a lease, has /leases/
    assert machine.shell(f"findmnt -n -o TARGET -T {place}").strip() == place.removesuffix("/leases")
    options = (*STARTED, "--unit=hostile", "--uid=alice", f"--property=StandardOutput=file:{said}")
    machine.run("systemd-run", *options, "python3", "-c", HOSTILE, usage)
    try:
        machine.eventually(lambda: "open" in machine.shell(f"cat {said}"), "usage is open")
        ctl(machine, "release", "--force", allocation)
        machine.eventually(lambda: "full" in machine.shell(f"cat {said}"), "the file system is full")
        # the attack has used up the file system of alice, and no other
        assert int(machine.shell(f"stat -f -c %a {place}")) == 0
        assert int(machine.shell("stat -f -c %a /run")) > 0
        run = ("vgpuctl", "run", "--isolation", "quota", "--memory", "1GiB", "--")
        machine.run(*SIM, *run, PROBE, "hold", str(256 * MIB))
    finally:
        machine.run("systemctl", "stop", "hostile.service", check=False)
        ctl(machine, "release", "--force", allocation, check=False)
    ctl(machine, "release", ctl(machine, *words, user="alice").stdout.strip().split("/")[-1])


def test_a_tenant_is_held_to_its_limit(machine: Machine) -> None:
    command = [*SIM, "vgpuctl", "run", "--isolation", "quota", "--memory", "2GiB", "--"]
    done = machine.run(*command, PROBE, "fill", "--piece", str(32 * MIB), user="alice")
    filled = json.loads(done.stdout.splitlines()[-1])
    assert filled["result"] == "CUDA_ERROR_OUT_OF_MEMORY"
    assert 0 < int(filled["total_bytes"]) <= 2048 * MIB


def test_a_users_program_that_drops_libvgpu_is_behind_a_memory_wall(machine: Machine) -> None:
    """The installed unit runs on a simulated node of driver branch 615."""
    node, dropped = "/run/vgpud-sim/walls", "/run/systemd/system/vgpud.service.d"
    machine.run("vgpu-sim", "create", "--state", node, "--profile", "h200x8", "--driver", "615")
    machine.shell(
        f"mkdir -p {dropped}; printf '[Service]\\nEnvironment=VGPU_SIM_STATE={node}\\n' >{dropped}/90.conf"
    )
    machine.shell("systemctl daemon-reload; systemctl restart vgpud.service")
    run = ("vgpu-sim", "run", "--state", node, "--", "vgpuctl", "run", "--isolation", "quota")
    bare = f"env -i LD_LIBRARY_PATH=/usr/lib/vgpud-sim/lib VGPU_SIM_STATE={node}"
    script = f"vgpuctl show $VGPU_ALLOCATION; {bare} {PROBE} fill --piece {32 * MIB}"
    try:
        said = machine.run(*run, "--memory", "2GiB", "--", "sh", "-ec", script, user="alice").stdout
        assert re.search(r"memory limit: +by the driver", said)
        filled = json.loads(said.splitlines()[-1])
        assert filled["result"] == "CUDA_ERROR_OUT_OF_MEMORY"
        assert 0 < int(filled["total_bytes"]) <= 2048 * MIB
        machine.eventually(lambda: not allocations(machine), "the allocation ends with its program")
        assert machine.shell("find /sys/fs/cgroup/ -mindepth 2 -path '*/vgpud/*' -type d") == ""
    finally:
        machine.shell(
            f"rm -r {dropped}; systemctl daemon-reload; systemctl restart vgpud.service; rm -r {node}*"
        )


def test_the_confined_arbiter_preempts_a_tenant(machine: Machine) -> None:
    """The engine probe runs in vgpud's sandbox. The arbiter runs in a sandbox of its own, and preempts
    another user's process.
    """
    own = "/etc/vgpud/conf.d/50-test.toml"
    command = [*SIM, "vgpuctl", "run", "--isolation", "quota", "--memory", "1GiB", "--cores", "20", "--"]
    count = (PROBE.replace("vgpu-probe", "vgpu-spin"), "--kernel-us", "1000", "--seconds", "4")
    try:
        machine.shell(f"printf '[[device]]\\n[device.preload]\\nengine = \"cut\"\\n' >{own}")
        machine.run("systemctl", "reload", "vgpud.service")
        env = {"VGPU_SIM_KERNEL_US": "1000"}
        done = machine.run(*command, *count, user="alice", env=env)
        shown = json.loads(ctl(machine, "devices", "-o", "json").stdout)["items"]
        engines = {item["engineReason"]: (item["engine"], item["engineWhy"]) for item in shown}
        assert "probed" in engines, engines
        counted = json.loads(done.stdout.splitlines()[-1])
        assert counted["libvgpu"] is True
        assert 0 < counted["per_second"] < 400, "of 1000 kernels of 1 ms"
        assert "refused" not in machine.shell("journalctl -b -u vgpud-arbiter.service -o cat --no-pager")
    finally:
        machine.shell(f"rm -f {own}; systemctl reload vgpud.service")


def test_a_tenant_is_suspended_and_resumed(machine: Machine, tenants: Tenants) -> None:
    (allocation,) = (name for name, slices in allocations(machine).items() if slices[0]["mode"] == "preload")
    ctl(machine, "suspend", allocation)
    try:
        shown = json.loads(ctl(machine, "show", allocation, "-o", "json").stdout)
        assert shown["state"] == "suspended"
    finally:
        ctl(machine, "resume", allocation)
    tenants.assert_undisturbed()


def test_a_good_policy_is_reloaded_and_a_bad_one_refused(machine: Machine) -> None:
    pid, before = main_pid(machine), json.loads(ctl(machine, "status", "-o", "json").stdout)
    own = "/etc/vgpud/conf.d/50-test.toml"
    try:
        machine.shell(f"printf '[planner]\\nstrategy = \"spread\"\\n' >{own}")
        machine.run("systemctl", "reload", "vgpud.service")
        shown = ctl(machine, "policy", "show", "--origin").stdout
        assert own in shown
        machine.shell(f"printf '[planner]\\nstrategy = \"sideways\"\\n' >{own}")
        refused = machine.run("systemctl", "reload", "vgpud.service", check=False)
        assert refused.returncode != 0
        # the wrong policy has changed nothing: the policy in force and the daemon are the same
        status = json.loads(ctl(machine, "status", "-o", "json").stdout)
        assert status["policyDigest"] != before["policyDigest"]
        assert machine.unit("vgpud.service", "ActiveState") == "active"
        assert "sideways" in machine.shell("journalctl -b -u vgpud.service -o cat --no-pager")
    finally:
        machine.shell(f"rm -f {own}; systemctl reload vgpud.service")
    assert main_pid(machine) == pid


def test_systemd_does_not_start_the_daemon_again_after_a_wrong_policy(machine: Machine) -> None:
    bad = "/etc/vgpud/conf.d/99-bad.toml"
    machine.shell(f"printf 'nonsense = 1\\n' >{bad}; systemctl restart vgpud.service || true")
    try:
        assert machine.unit("vgpud.service", "ActiveState") == "failed"
        assert machine.unit("vgpud.service", "ExecMainStatus") == "78"
        assert "99-bad.toml" in machine.shell("journalctl -b -u vgpud.service -o cat --no-pager")
    finally:
        machine.shell(f"rm {bad}; systemctl reset-failed vgpud.service; systemctl start vgpud.service")


#: A kubelet for one registration, and an API server that only notes that it was called.
KUBELET = """
import asyncio, fcntl, pathlib, socket, struct, sys, threading
sys.path.insert(0, "/root")
from double import Kubelet
address = struct.pack("16sHH4s8x", b"lo:1", socket.AF_INET, 0, socket.inet_aton("192.0.2.1"))
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
    fcntl.ioctl(asked, 0x8916, address)  # SIOCSIFADDR
api = socket.create_server(("192.0.2.1", 6443))
def note():
    while True:
        api.accept()[0].close()
        pathlib.Path("%s").touch()
threading.Thread(target=note, daemon=True).start()
async def main():
    await Kubelet(pathlib.Path("/var/lib/kubelet")).start()
    await asyncio.Event().wait()
asyncio.run(main())
"""
CALLED = "/run/api-called"
KUBERNETES = """[dra]
enabled = true
[[kubelet.resource]]
name = "vgpud.io/memory-gib"
kind = "memory"
"""
KUBECONFIG = """apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://192.0.2.1:6443", insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: x}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
"""
SITE = "usr/lib/vgpud/lib/python3/site-packages"


@needs("python-index")
def test_the_drop_in_for_kubernetes_lets_vgpud_reach_kubelet_and_api_server(machine: Machine) -> None:
    """The documented drop-in works below the restrictions of the unit. The API server has an address that is
    not a loopback address of this machine.
    """
    client = official.client() or unmet("python-index", official.why)
    new = [path for path in client.iterdir() if not (machine.root / SITE / path.name).exists()]
    for path in new:
        subprocess.run(["cp", "-r", str(path), str(machine.root / SITE)], check=True)
    double = (ROOT / "tests" / "kubelet" / "double.py").read_text()
    (machine.root / "root/double.py").write_text(double.replace('root.parent / "device', 'root / "device'))
    (machine.root / "root/kubelet.py").write_text(KUBELET % CALLED)
    (machine.root / "etc/vgpud/conf.d/50-kubernetes.toml").write_text(KUBERNETES)
    machine.shell("mkdir -p /etc/kubernetes /var/lib/kubelet/plugins_registry")
    (machine.root / "etc/kubernetes/vgpud.conf").write_text(KUBECONFIG)
    examples, dropped = "/usr/share/doc/vgpud/examples/kubernetes", "/etc/systemd/system/vgpud.service.d"
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    steps = re.findall(
        r"^\$ (install .*50-kubernetes.conf.*|systemctl daemon-reload .*)$", page, re.MULTILINE
    )
    assert len(steps) == 2 and examples in steps[0] and dropped in steps[0]
    try:
        kubelet = ("--quiet", "--unit=kubelet", "/usr/lib/vgpud/bin/python3", "-IB", "/root/kubelet.py")
        machine.run("systemd-run", *kubelet)
        for step in steps:
            machine.shell(step)
        machine.eventually(lambda: registered(machine), "the kubelet has vgpud's resource")
        machine.eventually(lambda: machine.shell(f"ls {CALLED} || true"), "vgpud calls the API server")
    finally:
        own = ("/root/double.py", "/root/kubelet.py", "/etc/vgpud/conf.d/50-kubernetes.toml", CALLED)
        places = (dropped, "/etc/kubernetes", "/var/lib/kubelet", *(f"/{SITE}/{path.name}" for path in new))
        machine.shell(f"systemctl stop kubelet || true; rm -rf {' '.join((*own, *places))}")
        machine.shell("systemctl daemon-reload")
        machine.run("systemctl", "restart", "vgpud.service")


def registered(machine: Machine) -> bool:
    log = machine.shell("journalctl -b -u vgpud.service -o cat --no-pager")
    return "registered_with_kubelet" in log


def test_callers_of_a_daemon_that_cannot_start_cause_no_endless_restarts_and_close_no_sockets(
    machine: Machine,
) -> None:
    """Each caller causes at most one attempt to start the daemon, gets an error, and leaves the socket
    open.
    """
    bad = "/etc/vgpud/conf.d/99-bad.toml"
    names = ("vgpud", "ro", "admin", "runtime")
    units = [f"vgpud{'' if name == 'vgpud' else f'-{name}'}.socket" for name in names]
    ask = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.settimeout(100); s.connect(sys.argv[1])\n"
        "try: print(s.recv(1) == b'')\nexcept ConnectionResetError: print(True)"
    )
    machine.shell(f"printf 'nonsense = 1\\n' >{bad}; systemctl restart vgpud.service || true")
    try:
        cursor = machine.shell("journalctl -n 0 --show-cursor | sed -n 's/-- cursor: //p'")
        for name in names:
            asked = machine.run("python3", "-c", ask, f"/run/vgpud/{name}.sock")
            assert asked.stdout.strip() == "True"
        time.sleep(3)  # another start, if one was requested, would happen within this time
        journal = machine.run(
            "journalctl", "-u", "vgpud.service", "-o", "cat", f"--after-cursor={cursor}"
        ).stdout
        assert 1 <= journal.count("Starting vgpud.service") <= len(names)
        assert [machine.unit(name, "ActiveState") for name in units] == ["active"] * len(units)
    finally:
        machine.shell(f"rm {bad}; systemctl reset-failed vgpud.service; systemctl start vgpud.service")
    for name in ("ro", "admin"):
        assert ctl(machine, "status", env={"VGPUD_SOCKET": f"/run/vgpud/{name}.sock"}).returncode == 0


def test_a_kill_of_the_daemon_disturbs_no_tenant(machine: Machine, tenants: Tenants) -> None:
    pid = main_pid(machine)
    machine.run("systemctl", "kill", "--signal=KILL", "--kill-who=main", "vgpud.service")
    ready_again(machine, pid)
    tenants.assert_undisturbed()


def udev_runs(machine: Machine, event: str, module: str) -> list[str]:
    """The commands that udev would run for the kernel's event about a module. sysfs is replaced, so the
    module need not exist.
    """
    made_up = f"mount -t tmpfs none /sys; mkdir -p /sys/module/{module}; echo >/sys/module/{module}/uevent"
    asked = f"SYSTEMD_DEVICE_VERIFY_SYSFS=0 udevadm test --action={event} /sys/module/{module}"
    said = machine.run("unshare", "--mount", "sh", "-ec", f"{made_up}; {asked}")
    return re.findall(r"^run: '(.*)'$", said.stdout, re.MULTILINE)


def test_the_daemon_is_restarted_when_a_driver_is_loaded(machine: Machine, tenants: Tenants) -> None:
    """udev's rule for the driver's module restarts vgpud, because vgpud may open only devices that existed
    when it started.
    """
    assert udev_runs(machine, "add", "nvidia_drm") == []
    assert udev_runs(machine, "remove", "nvidia") == []
    assert udev_runs(machine, "add", "nvidia_uvm") == udev_runs(machine, "add", "nvidia")
    (command,) = udev_runs(machine, "add", "nvidia")
    pid = main_pid(machine)
    machine.shell(command)
    ready_again(machine, pid)
    tenants.assert_undisturbed()
    machine.run("systemctl", "stop", "vgpud.service")
    machine.shell(command)  # a daemon that an administrator has stopped must stay stopped
    assert main_pid(machine) == "0"
    machine.run("systemctl", "start", "vgpud.service")


def test_a_daemon_that_hangs_is_started_again(machine: Machine, tenants: Tenants) -> None:
    """The watchdog restarts the daemon. Its time here is shorter than the unit's."""
    folder = "/run/systemd/system/vgpud.service.d"
    machine.shell(f"mkdir -p {folder}; printf '[Service]\\nWatchdogSec=5s\\n' >{folder}/90-test.conf")
    machine.shell("systemctl daemon-reload; systemctl restart vgpud.service")
    try:
        pid = main_pid(machine)
        machine.run("systemctl", "kill", "--signal=STOP", "--kill-who=main", "vgpud.service")
        ready_again(machine, pid)
        tenants.assert_undisturbed()
    finally:
        machine.shell(f"rm {folder}/90-test.conf; systemctl daemon-reload; systemctl restart vgpud.service")


def test_log_events_have_their_fields_in_the_journal(machine: Machine) -> None:
    lines = machine.shell("journalctl -b -u vgpud.service -o json --no-pager").splitlines()
    entries = [json.loads(line) for line in lines]
    (ready, *_) = [entry for entry in entries if entry.get("MESSAGE", "").startswith("ready: ")]
    assert ready["SYSLOG_IDENTIFIER"] == "vgpud"
    assert "8 devices" in ready["VGPUD_STATUS"]
    assert ready["PRIORITY"] == "6"
    assert ready["MESSAGE_ID"] == Message.READY


def test_an_upgrade_disturbs_no_tenant(installed: Installed, tenants: Tenants) -> None:
    machine = installed.machine
    library = "/usr/lib/vgpud/libvgpu.so"
    inode = machine.shell(f"stat -L -c %i {library}")
    probe = tenants.probe_pid("tenant-quota")
    sockets = [machine.unit(name, "ActiveEnterTimestamp") for name in ("vgpud.socket", "vgpud-ro.socket")]
    pid = main_pid(machine)
    machine.shell("echo '# mine' >>/etc/vgpud/vgpud.toml")
    later = as_later(installed.debs, installed.debs / "later")
    machine.shell("dpkg -i /debs/later/*.deb")
    ready_again(machine, pid)
    assert machine.shell("dpkg-query -W -f '${Version} ' vgpud libvgpu vgpud-sim").split() == [later] * 3
    tenants.assert_undisturbed()
    # the running tenant keeps its old library file, and later tenants load the new one
    assert machine.shell(f"stat -L -c %i {library}") != inode
    assert f" {inode} " in machine.shell(f"grep libvgpu.so /proc/{probe}/maps")
    assert sockets == [
        machine.unit(name, "ActiveEnterTimestamp") for name in ("vgpud.socket", "vgpud-ro.socket")
    ]
    assert machine.shell("tail -n 1 /etc/vgpud/vgpud.toml") == "# mine"


def test_a_downgrade_with_a_newer_ledger_is_refused(installed: Installed) -> None:
    machine = installed.machine
    before = machine.shell("dpkg-query -W -f '${Version}' vgpud")
    machine.shell(
        "systemctl stop vgpud.service vgpud.socket vgpud-ro.socket vgpud-admin.socket vgpud-runtime.socket"
    )
    set_format = (
        "import sqlite3, sys; sqlite3.connect('/var/lib/vgpud/ledger.db').execute('PRAGMA user_version=%d')"
    )
    known = machine.run("python3", "-c", "import sqlite3; print(sqlite3.connect('/var/lib/vgpud/ledger.db')"
                        ".execute('PRAGMA user_version').fetchone()[0])").stdout.strip()  # fmt: skip
    try:
        machine.run("python3", "-c", set_format % 999)
        done = machine.run("sh", "-c", "dpkg -i /debs/vgpud_*.deb", check=False)
        assert done.returncode != 0
        assert "ledger.db has format 999" in done.stderr
        assert machine.shell("dpkg-query -W -f '${Version}' vgpud") == before
    finally:
        machine.run("python3", "-c", set_format % int(known))
        machine.shell(
            "systemctl reset-failed 'vgpud*';"
            " systemctl start vgpud.socket vgpud-ro.socket vgpud-admin.socket vgpud-runtime.socket"
        )
        machine.run("systemctl", "start", "vgpud.service")


def test_remove_keeps_the_state_and_purge_leaves_nothing(installed: Installed) -> None:
    """This is the last test, because it removes vgpud from the machine."""
    machine = installed.machine
    machine.shell("dpkg -r vgpud-sim vgpud libvgpu")
    assert machine.shell("ls /var/lib/vgpud/ledger.db /etc/vgpud/vgpud.toml").split()
    assert machine.shell("systemctl list-units --no-legend --all 'vgpud*' | grep -c running || true") == "0"
    machine.shell("dpkg -P vgpud-sim vgpud libvgpu")
    assert sorted(listing(machine) - installed.before) == []
    # the group stays, because its number must not be given to another group while tenants' files have it
    assert machine.shell("getent group vgpu").startswith("vgpu:")
