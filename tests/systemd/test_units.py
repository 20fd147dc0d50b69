"""The unit files: valid for systemd, as restricted as possible, and open where vgpud needs it."""

import subprocess
from pathlib import Path

import pytest

from tests.conditions import needs
from vgpud.settings import load_settings

UNITS = Path(__file__).resolve().parents[2] / "systemd"


def words(unit: str, key: str) -> list[str]:
    lines = (UNITS / unit).read_text().splitlines()
    return [word for line in lines if line.startswith(f"{key}=") for word in line.partition("=")[2].split()]


@needs("systemd")
def test_systemd_accepts_every_unit() -> None:
    files = sorted(str(path) for path in UNITS.iterdir() if path.suffix != ".catalog")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *files], capture_output=True, text=True, check=False
    )
    # the programs of the package are not installed on the test's machine
    wrong = [line for line in done.stderr.splitlines() if "is not executable" not in line]
    assert [line for line in wrong if "vgpu" in line] == []


@needs("systemd")
@pytest.mark.parametrize(
    ("unit", "most"),
    [
        ("vgpud.service", 2.5),
        ("vgpud-arbiter.service", 2.1),
        ("vgpud-mps@.service", 3.0),
        ("vgpud-remote.service", 1.5),
        ("vgpud-remote-accept.service", 1.5),
    ],
)
def test_the_exposure_of_a_unit_stays_below_its_bound(unit: str, most: float) -> None:
    """The scale of `systemd-analyze security`: 0 is most restricted, 10 is open."""
    argv = ["systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={most * 10:.0f}"]
    done = subprocess.run([*argv, str(UNITS / unit)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-200:]


@pytest.mark.parametrize("unit", sorted(path.name for path in UNITS.glob("*.service")))
def test_each_unit_bounds_the_number_of_its_journal_lines(unit: str) -> None:
    """The limit is 5000 lines in 10 s, because journald drops every line above its own default limit of 10000
    lines in 30 s.
    """
    assert words(unit, "LogRateLimitIntervalSec") == ["10s"]
    (burst,) = words(unit, "LogRateLimitBurst")
    assert 100 <= int(burst) <= 5000


def test_systemd_makes_every_socket_of_the_daemon_before_its_start_and_passes_it_on() -> None:
    """While vgpud restarts, a connection waits if systemd holds the socket, and is refused otherwise."""
    every = {path.name for path in UNITS.glob("*.socket")}
    sockets = every - {
        "vgpud-remote-session.socket"
    }  # systemd starts a process for each connection of this socket
    assert len(sockets) == 4
    for key in ("Wants", "After", "Sockets"):
        assert {word for word in words("vgpud.service", key) if word.endswith(".socket")} == sockets
    for unit in sockets:
        assert words(unit, "Service") == ["vgpud.service"]
        assert words(unit, "RemoveOnStop") == ["no"]
    named = {word for unit in sockets for word in words(unit, "FileDescriptorName")}
    assert named == {"ro", "tenant", "admin", "runtime"}
    rules = (UNITS.parent / "packaging/deb/debian/rules").read_text()
    (installed,) = (line for line in rules.splitlines() if ".socket" in line and "--no-enable" not in line)
    assert set(installed.split()) >= sockets


def test_only_root_connects_to_a_socket_whose_connections_systemd_accepts() -> None:
    """An attack: systemd itself closes a connection above MaxConnections=, and with it what a user passed."""
    accepting = [path.name for path in UNITS.glob("*.socket") if words(path.name, "Accept") == ["yes"]]
    assert accepting == ["vgpud-remote-session.socket"]
    assert words(accepting[0], "SocketMode") == ["0600"]
    assert words(accepting[0], "SocketUser") == ["root"]


def test_vgpud_mounts_bounded_file_systems_for_users_on_the_host() -> None:
    """An attack: by blocks or extended attributes of its `usage` a tenant used up all of /run."""
    (line,) = (one for one in (UNITS / "vgpud.service").read_text().splitlines() if "mount -t tmpfs" in one)
    assert line.startswith("ExecStartPre=+-/usr/bin/nsenter --target 1 --mount ")  # the unit has its own
    options = line.partition(" -o ")[2].split()[0]
    assert {one.partition("=")[0] for one in options.split(",")} >= {"nosuid", "nodev", "size", "nr_inodes"}


def test_systemd_creates_every_folder_that_vgpud_writes() -> None:
    """The service does not start if a path of ReadWritePaths= is missing (systemd.exec(5))."""
    settings = load_settings()
    made = {f"/run/{name}" for name in words("vgpud.service", "RuntimeDirectory")}
    made |= {f"/var/lib/{name}" for name in words("vgpud.service", "StateDirectory")}
    made |= set(words("vgpud.service", "ExecStartPre"))
    needed = (settings.run_dir, settings.state_dir, settings.cdi_dir)
    assert {str(path).replace("/var/run/", "/run/") for path in needed} <= made
    writable = words("vgpud.service", "ReadWritePaths")
    assert [path for path in writable if not path.startswith("-")] == []


def test_no_unit_lets_users_list_the_run_folder() -> None:
    """An attack: a user that may list a folder can hold its lock in the kernel, by a getdents(2) into a page
    of a FUSE file system. The socket units make the folder if they start first (systemd.socket(5): mode
    0755).
    """
    for unit in ("vgpud.service", "vgpud-arbiter.service"):
        assert (words(unit, "RuntimeDirectory"), words(unit, "RuntimeDirectoryMode")) == (["vgpud"], ["0711"])
    for socket in UNITS.glob("*.socket"):
        assert words(socket.name, "DirectoryMode") == ["0711"]
    made_at_boot = (UNITS.parent / "packaging/deb/debian/vgpud.tmpfiles").read_text().splitlines()
    assert "d /run/vgpud 0711 root root -" in made_at_boot


def test_socket_units_do_not_flush_waiting_connections() -> None:
    """An attack: the process that closes what a caller has passed may wait without end."""
    for unit in UNITS.glob("vgpud*.socket"):
        assert words(unit.name, "FlushPending") == []


def test_a_stop_of_vgpuds_unit_does_not_stop_its_helpers() -> None:
    assert words("vgpud.service", "RuntimeDirectoryPreserve") == ["yes"]
    assert words("vgpud-arbiter.service", "RuntimeDirectoryPreserve") == ["yes"]
    for unit in ("vgpud.service", "vgpud-arbiter.service"):
        assert words(unit, "KillMode") == ["process"]
    for helper in ("vgpud-arbiter.service", "vgpud-mps@.service"):
        for key in ("BindsTo", "PartOf", "Requires"):
            assert words(helper, key) == []


def test_systemd_restarts_the_daemon_however_often_it_is_killed() -> None:
    assert words("vgpud.service", "StartLimitIntervalSec") == ["0"]


def test_the_drivers_modules_are_loaded_before_units_that_may_open_their_devices() -> None:
    """At the start of a unit systemd looks DeviceAllow=char-* up in /proc/devices
    (systemd.resource-control(5)), so the modules must be loaded before.
    """
    for unit in ("vgpud.service", "vgpud-mps@.service"):
        assert words(unit, "DeviceAllow") == ["char-nvidia*", "rwm"]
        assert "modprobe@nvidia_uvm.service" in words(unit, "Wants")
        assert "modprobe@nvidia_uvm.service" in words(unit, "After")


def test_the_daemon_starts_before_container_runtimes() -> None:
    assert {"docker.service", "containerd.service", "kubelet.service"} <= set(
        words("vgpud.service", "Before")
    )
    assert {"nvidia-persistenced.service", "nvidia-fabricmanager.service"} <= set(
        words("vgpud.service", "After")
    )


def test_systemd_restarts_a_hanging_daemon_but_not_one_with_a_wrong_policy() -> None:
    assert words("vgpud.service", "WatchdogSec") == ["30s"]
    assert words("vgpud.service", "RestartPreventExitStatus") == ["78"]
    assert words("vgpud.service", "Type") == ["notify"]


def test_an_arbiter_that_hangs_is_killed_and_restarted() -> None:
    (seconds,) = words("vgpud-arbiter.service", "WatchdogSec")
    assert int(seconds.removesuffix("s")) <= 10
    assert words("vgpud-arbiter.service", "WatchdogSignal") == ["SIGKILL"]
    assert words("vgpud-arbiter.service", "Restart") == ["always"]
    assert words("vgpud-arbiter.service", "Type") == ["notify"]


def test_metrics_over_tcp_need_a_drop_in_for_the_unit() -> None:
    assert words("vgpud.service", "PrivateNetwork") == ["yes"]
    assert words("vgpud.service", "RestrictAddressFamilies") == ["AF_UNIX"]


def test_the_unit_lets_vgpud_close_silent_mps_connections() -> None:
    """vgpud closes a silent connection by pidfd_getfd, which no other allowed group of the system-call filter
    contains.
    """
    assert "pidfd_getfd" in words("vgpud.service", "SystemCallFilter")
    assert "CAP_SYS_PTRACE" in words("vgpud.service", "CapabilityBoundingSet")


def test_the_unit_lets_the_arbiter_take_a_tenants_control_file() -> None:
    """The arbiter takes the tenant's open control file by pidfd_getfd, and opens no device itself."""
    assert {"pidfd_getfd", "mincore", "sched_setaffinity"} <= set(
        words("vgpud-arbiter.service", "SystemCallFilter")
    )
    assert "CAP_SYS_PTRACE" in words("vgpud-arbiter.service", "CapabilityBoundingSet")
    assert words("vgpud-arbiter.service", "DeviceAllow") == []


def test_the_unit_allows_vgpud_only_network_addresses_of_this_node() -> None:
    """Metrics reach only this node, whatever address a policy names."""
    assert words("vgpud.service", "IPAddressDeny") == ["any"]
    assert words("vgpud.service", "IPAddressAllow") == ["localhost"]
