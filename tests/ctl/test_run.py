"""`vgpuctl run`: the command replaces the process of vgpuctl and inherits nothing of it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import prepared
from tests.ctl import canned
from tests.ctl.conftest import COMMAND, Ctl, environment
from tests.ctl.daemon import Daemon
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl.environment import export_lines, merged
from vgpud.model.errors import ErrorCode, VgpuError


@pytest.fixture(autouse=True)
def plain_edits(daemon: Daemon) -> None:
    """Edits without a preload library, because ld.so would print an error for a missing one."""
    item = canned.preload()
    item.edits.CopyFrom(
        pb.Edits(env={"WHO": "container", "CUDA_VISIBLE_DEVICES": canned.A}, host_env={"WHO": "host"})
    )
    daemon.replies["Allocate"] = item


@pytest.mark.parametrize("code", [0, 1, 7, 126, 255])
def test_the_exit_code_of_vgpuctl_run_is_that_of_its_command(ctl: Ctl, code: int) -> None:
    done = ctl("run", "--", "sh", "-c", f"exit {code}")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGPIPE])
def test_a_command_killed_by_a_signal_gives_its_signal_as_status(ctl: Ctl, number: signal.Signals) -> None:
    assert ctl("run", "--", "sh", "-c", f"kill -{number.value} $$").returncode == -number


def test_sigkill_to_the_pid_of_vgpuctl_run_ends_the_command(daemon: Daemon) -> None:
    words = ["run", "--", "sh", "-c", "echo $$; exec sleep 60"]
    process = prepared.ctl(words, environment(daemon.socket))
    assert int(process.stdout.readline()) == process.pid
    process.kill()
    assert process.wait(300) == -signal.SIGKILL
    process.communicate()


def test_run_requests_an_allocation_bound_to_its_process(ctl: Ctl, daemon: Daemon) -> None:
    options = "--memory 4GiB --cores 12.5 --count 2 --isolation quota --device 0 --label nightly"
    assert (
        ctl(
            "run", *options.split(), "--device", canned.B[:12], "--device-name", "NVIDIA H*", "--", "true"
        ).returncode
        == 0
    )
    (request,) = daemon.requests("Allocate")
    assert request.bind_to_caller
    assert request.request_id.startswith("vgpuctl-")
    assert (request.memory_bytes, request.share_percent, request.count) == (4 * canned.GIB, 12.5, 2)
    assert (request.isolation, request.label) == ("quota", "nightly")
    wanted = pb.Selector(uuids=[canned.B], indices=[0], name_glob="NVIDIA H*")
    assert request.selector == wanted
    assert daemon.requests("Release") == []


def test_run_sends_only_the_options_that_are_given(ctl: Ctl, daemon: Daemon) -> None:
    assert ctl("run", "--profile", "1g.18gb", "--", "true").returncode == 0
    (request,) = daemon.requests("Allocate")
    assert request.mig_profile == "1g.18gb"
    assert not request.HasField("memory_bytes")
    assert not request.HasField("share_percent")
    assert not request.HasField("owner_uid")
    assert request.count == 1


def test_the_environment_variables_of_the_allocation_override_those_of_the_caller(daemon: Daemon) -> None:
    given = {**environment(daemon.socket), "LANG": "C", "WHO": "caller", "ODD": "a\nb=c", "EMPTY": ""}
    # an exec, because a forked vgpuctl does not read its environment from /proc
    done = subprocess.run(
        (*COMMAND, "run", "--", "env", "-0"), env=given, capture_output=True, text=True, check=True
    )
    got = dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)
    assert got == {**given, "WHO": "host", "CUDA_VISIBLE_DEVICES": canned.A}


def test_a_preload_library_is_put_before_existing_ones(ctl: Ctl, daemon: Daemon) -> None:
    daemon.replies["Allocate"] = canned.preload()
    shown = ["run", "--", "printenv", "LD_PRELOAD"]
    assert ctl(*shown).stdout == "/opt/vgpud/libvgpu.so\n"
    assert ctl(*shown, env={"LD_PRELOAD": ""}).stdout == "/opt/vgpud/libvgpu.so\n"
    assert ctl(*shown, env={"LD_PRELOAD": "/x.so /y.so"}).stdout == "/opt/vgpud/libvgpu.so:/x.so /y.so\n"


def test_merged_environments_keep_bytes_that_are_not_utf8() -> None:
    before = {b"A": b"\xff", b"LD_PRELOAD": b"/old.so"}
    assert merged({"LD_PRELOAD": "/new.so", "B": "2"}, before) == {
        b"A": b"\xff",
        b"LD_PRELOAD": b"/new.so:/old.so",
        b"B": b"2",
    }


OF_MPS = {
    "VGPU_ALLOCATION": "a1",
    "VGPU_MPS_TENANT": "/run/vgpud/mps/t/a1",
    "CUDA_VISIBLE_DEVICES": "GPU-1",
    "CUDA_MPS_PIPE_DIRECTORY": "/run/vgpud/mps/1/pipe/p",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30",
    "LD_PRELOAD": "/opt/vgpud/libvgpu-guard.so:/x.so",
}
OF_QUOTA = {"VGPU_ALLOCATION": "b2", "VGPU_LEASE": "/l", "LD_PRELOAD": "/opt/vgpud/libvgpu.so"}
OF_CARD = {"VGPU_ALLOCATION": "c3", "CUDA_VISIBLE_DEVICES": "GPU-3"}
ALONE = {"CUDA_MPS_PIPE_DIRECTORY": "/own", "LD_PRELOAD": "/x.so /y.so"}


@pytest.mark.parametrize(
    ("before", "edits", "after"),
    [
        (OF_MPS, OF_QUOTA, OF_QUOTA | {"LD_PRELOAD": "/opt/vgpud/libvgpu.so:/x.so"}),
        (OF_MPS, OF_CARD, OF_CARD | {"LD_PRELOAD": "/x.so"}),
        (OF_QUOTA, OF_CARD, OF_CARD),
        (OF_QUOTA, OF_QUOTA, OF_QUOTA),
        (ALONE, OF_CARD, OF_CARD | ALONE),
    ],
)
def test_an_allocation_replaces_that_of_the_shell(
    before: dict[str, str], edits: dict[str, str], after: dict[str, str]
) -> None:
    given = {os.fsencode(name): os.fsencode(value) for name, value in before.items()}
    expected = {os.fsencode(name): os.fsencode(value) for name, value in after.items()}
    assert merged(edits, given) == expected
    allocation = pb.Allocation(edits=pb.Edits(env=edits))
    program = "\n".join([*export_lines(allocation, given), "exec env"])
    done = subprocess.run(["/bin/sh", "-c", program], capture_output=True, check=True, env=given)
    got = dict(line.split(b"=", 1) for line in done.stdout.splitlines())
    assert {name: value for name, value in got.items() if name not in (b"PWD", b"SHLVL", b"_")} == expected


def test_the_command_inherits_the_working_directory_and_standard_input(
    daemon: Daemon, tmp_path: Path
) -> None:
    words = (*COMMAND, "run", "--", "sh", "-c", "pwd; cat")
    given = environment(daemon.socket)
    said = subprocess.check_output(words, env=given, cwd=tmp_path, input="through\n", text=True)
    assert said == f"{tmp_path}\nthrough\n"


def test_the_command_inherits_only_the_callers_descriptors(daemon: Daemon) -> None:
    reader, writer = os.pipe()
    # the list has one descriptor more: os.listdir opens the directory that it reads
    probe = "import os; print(sorted(int(n) for n in os.listdir('/proc/self/fd')))"
    words = (*COMMAND, "run", "--", sys.executable, "-c", probe)
    said = subprocess.check_output(words, env=environment(daemon.socket), pass_fds=(writer,), text=True)
    os.close(reader)
    os.close(writer)
    got = json.loads(said)
    assert set(got) >= {0, 1, 2, writer}
    # the list has one descriptor more, for the directory that is read
    assert len(got) == 5


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_stream_that_the_caller_closed_stays_closed_for_the_command(
    daemon: Daemon, tmp_path: Path, number: int
) -> None:
    probe = (
        "import os, sys\n"
        "kinds = ''\n"
        "for number in range(3):\n"
        "    try: kinds += 'open ' if os.fstat(number) else ''\n"
        "    except OSError: kinds += 'closed '\n"
        "open(sys.argv[1], 'w').write(kinds)\n"
    )
    closing = ("sh", "-c", f'exec "$@" {number}>&-', "sh")
    subprocess.run(
        (*closing, *COMMAND, "run", "--", sys.executable, "-c", probe, str(tmp_path / "kinds")),
        env=environment(daemon.socket),
        capture_output=True,
        check=True,
    )
    kinds = ["open"] * 3
    kinds[number] = "closed"
    assert (tmp_path / "kinds").read_text().split() == kinds


def test_no_signal_stays_ignored_or_blocked_in_the_command(ctl: Ctl) -> None:
    fields = dict(
        line.split(":\t") for line in ctl("run", "--", "cat", "/proc/self/status").stdout.splitlines()
    )
    plain = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines())
    pipe_and_file_size = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)
    # signals that pytest's caller ignores stay ignored
    assert int(fields["SigIgn"], 16) == int(plain["SigIgn"], 16) & ~pipe_and_file_size
    assert int(fields["SigBlk"], 16) == int(plain["SigBlk"], 16)


def test_vgpuctl_run_passes_options_after_the_command_to_the_command(ctl: Ctl) -> None:
    done = ctl("run", "--", "printf", "%s|", "--memory", "10G", "--", "-o", "a b", "")
    assert done.stdout == "--memory|10G|--|-o|a b||"


def test_the_double_dash_before_the_command_is_optional(ctl: Ctl) -> None:
    assert ctl("run", "--memory", "4GiB", "echo", "-n", "--").stdout == "--"


def script(path: Path, text: str, mode: int) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_an_absent_command_exits_127(ctl: Ctl, daemon: Daemon) -> None:
    done = ctl("run", "--", "no-such-command")
    assert done.returncode == 127
    assert done.stderr == (
        "vgpuctl: cannot run 'no-such-command': no such file or directory (E103)\n"
        "hint: check the name and PATH\n"
    )
    (request,) = daemon.requests("Release")
    assert (request.allocation_id, request.force) == ("a1b2c3d4", True)


@pytest.mark.parametrize(
    ("text", "mode", "why", "hint"),
    [
        ("#!/bin/sh\n", 0o644, "permission denied", "check that it is executable"),
        ("#!/no/such/interpreter\n", 0o755, "no such file or directory", "install the interpreter of"),
        ("\x00\x01", 0o755, "exec format error", "built for this machine"),
    ],
)
def test_a_command_that_cannot_run_exits_126(
    ctl: Ctl, daemon: Daemon, tmp_path: Path, text: str, mode: int, why: str, hint: str
) -> None:
    done = ctl("run", "--", script(tmp_path / "tool", text, mode))
    assert done.returncode == 126
    assert why in done.stderr
    assert hint in done.stderr
    assert len(daemon.requests("Release")) == 1


def test_a_failed_release_does_not_hide_the_error_of_the_program(ctl: Ctl, daemon: Daemon) -> None:
    daemon.replies["Release"] = VgpuError(ErrorCode.STOPPING, "vgpud is stopping", "")
    done = ctl("run", "--", "no-such-command")
    assert done.returncode == 127
    assert "stopping" not in done.stderr


def test_a_refused_run_does_not_start_the_command(ctl: Ctl, daemon: Daemon, tmp_path: Path) -> None:
    daemon.replies["Allocate"] = VgpuError(
        ErrorCode.NO_CAPACITY,
        "no device has 100GiB free",
        "ask for 24GiB or less",
        (f"{canned.A}: 76GiB too little", f"{canned.B}: is in mode mig"),
    )
    done = ctl("run", "--memory", "100GiB", "--", "touch", str(tmp_path / "ran"))
    assert done.returncode == 33
    assert done.stderr == (
        "vgpuctl: no device has 100GiB free (E401)\n"
        f"  {canned.A}: 76GiB too little\n"
        f"  {canned.B}: is in mode mig\n"
        "hint: ask for 24GiB or less\n"
    )
    assert not (tmp_path / "ran").exists()
    assert daemon.requests("Release") == []


def test_a_run_without_a_command_makes_no_allocation(ctl: Ctl, daemon: Daemon) -> None:
    for line in (["run"], ["run", "--memory", "1GiB", "--"]):
        done = ctl(*line)
        assert done.returncode == 2
        assert "no command to run" in done.stderr
    assert daemon.asked == []


def test_vgpuctl_run_with_verbose_prints_the_allocation(ctl: Ctl) -> None:
    assert ctl("run", "-v", "--", "true").stderr == f"allocation a1b2c3d4 on {canned.A}\n"


def test_the_exports_that_alloc_prints_set_the_same_environment_as_run(ctl: Ctl) -> None:
    lines = export_lines(canned.preload(), {})
    show = 'printf "%s\\n" "$CUDA_VISIBLE_DEVICES" "$VGPU_LEASE" "$LD_PRELOAD"'
    for before, preload in (("", "/opt/vgpud/libvgpu.so"), ("/x.so", "/opt/vgpud/libvgpu.so:/x.so")):
        program = "\n".join([f"LD_PRELOAD={before}", *lines, show])
        done = subprocess.run(["/bin/sh", "-c", program], capture_output=True, text=True, check=True, env={})
        assert done.stdout.splitlines() == [canned.A, "/run/vgpud/leases/a b", preload]
