"""The request that each verb of vgpuctl sends, its output, and its exit status."""

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests import prepared
from tests.ctl import canned
from tests.ctl.conftest import COMMAND, MEASURED, ROOT, Ctl, Done, environment
from tests.ctl.daemon import Daemon
from tests.e2e.support import eventually
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl.document import rfc3339
from vgpud.ctl.fail import DETAILS_MATTER
from vgpud.model.errors import ErrorCode, Exit, VgpuError


def test_status_of_a_simulated_node_begins_with_a_warning(main: Ctl, daemon: Daemon) -> None:
    daemon.replies["GetNode"] = canned.node(simulated=True)
    done = main("status")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == "SIMULATED: no real GPU is behind this daemon"
    assert json.loads(main("status", "-o", "json").stdout)["simulated"] is True
    noticed = canned.devices()
    noticed.devices[0].health_reason = "rows are remapped at its next reset"
    daemon.replies["ListDevices"] = noticed
    first, _, notice = main("status").stdout.splitlines()[:3]
    assert first.startswith("SIMULATED") and notice.startswith("notice:  device 0")


def test_status_is_degraded_by_a_lost_device(main: Ctl, daemon: Daemon) -> None:
    daemon.replies["ListDevices"] = canned.devices("lost")
    done = main("status")
    assert done.returncode == 37
    sentence = f"device 2 ({canned.C}) is lost: Xid 79, it has fallen off the bus"
    assert done.stdout.startswith(f"degraded:  {sentence}\n\nstatus:       degraded\n")
    document = json.loads(main("status", "-o", "json").stdout)
    assert (document["ok"], document["degraded"]) == (False, [sentence])


def test_status_is_degraded_by_a_failed_allocation(main: Ctl, daemon: Daemon) -> None:
    daemon.replies["ListAllocations"] = canned.allocations(canned.preload("failed", "its device is lost"))
    done = main("status")
    assert done.returncode == 37
    assert "degraded:  allocation a1b2c3d4 has failed: its device is lost\n" in done.stdout


def test_status_is_degraded_without_a_loaded_driver(main: Ctl, daemon: Daemon) -> None:
    daemon.replies["GetNode"] = canned.node(hardware_error="the NVIDIA driver is not loaded")
    daemon.replies["ListDevices"] = VgpuError(ErrorCode.DRIVER_MISSING, "the NVIDIA driver is not loaded", "")
    done = main("status")
    assert done.returncode == 37
    assert "degraded:  the NVIDIA driver is not loaded\n" in done.stdout


def test_a_node_without_devices_prints_headers_and_a_message(main: Ctl, daemon: Daemon) -> None:
    daemon.replies["ListDevices"] = pb.ListDevicesReply()
    done = main("devices")
    assert done.stdout.split()[:2] == ["INDEX", "NAME"]
    assert done.stderr == "no devices; 'vgpuctl status' says why\n"
    assert main("devices", "-q").stderr == ""
    assert main("devices", "--no-headers").stdout == ""


def test_alloc_takes_owner_and_request_id_as_options(main: Ctl, daemon: Daemon) -> None:
    done = main("alloc", "--owner", "1000:100", "--request-id", "job-7", "--memory", "1.5GiB")
    assert done.stdout == "a1b2c3d4\n"
    (request,) = daemon.requests("Allocate")
    assert (request.request_id, request.owner_uid, request.owner_gid) == ("job-7", 1000, 100)
    assert request.memory_bytes == 1536 * 1024**2
    assert not request.bind_to_caller


def test_a_request_file_supplies_missing_options(main: Ctl, daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "request.toml"
    path.write_text('memory = "8GiB"\ncores = 25\ndevice = [0, 1]\nlabel = "from the file"\n')
    assert main("alloc", "-f", str(path), "--label", "mine").returncode == 0
    (request,) = daemon.requests("Allocate")
    assert (request.memory_bytes, request.share_percent) == (8 << 30, 25)
    assert (list(request.selector.indices), request.label) == ([0, 1], "mine")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("memry = 1", "unknown key 'memry'"),
        ('memory = "1G"', "memory: bad amount of memory '1G'"),
        ("count = 0", "count: '0' is not a number of devices"),
        ("memory =", "is not TOML"),
    ],
)
def test_a_mistake_in_a_request_file_is_named(main: Ctl, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "request.toml"
    path.write_text(text)
    done = main("alloc", "-f", str(path))
    assert done.returncode == 2
    assert said in done.stderr
    assert main("alloc", "-f", str(tmp_path / "none.toml")).returncode == 2


def test_each_alloc_has_a_unique_request_id(main: Ctl, daemon: Daemon) -> None:
    main("alloc")
    main("alloc")
    first, second = (request.request_id for request in daemon.requests("Allocate"))
    assert first != second


def test_alloc_without_an_answer_prints_how_to_get_the_allocation(main: Ctl, daemon: Daemon) -> None:
    daemon.replies["Allocate"] = VgpuError(ErrorCode.STOPPING, "vgpud is stopping", "")
    done = main("alloc")
    (request,) = daemon.requests("Allocate")
    assert done.returncode == 32
    assert f"--request-id {request.request_id} gets it" in done.stderr


def test_release_continues_after_a_failure(main: Ctl, daemon: Daemon) -> None:
    def answer(request: pb.ReleaseRequest) -> object:
        if request.allocation_id == "y":
            return VgpuError(ErrorCode.TENANT_ALIVE, "y has 2 processes", "stop them or use --force")
        return pb.ReleaseReply(already_released=request.allocation_id == "z")

    daemon.replies["Release"] = answer
    done = main("release", "x", "y", "z")
    assert done.returncode == 35
    assert done.stdout == ""
    assert done.stderr == (
        "x released\n"
        "vgpuctl: y has 2 processes (E305)\n"
        "hint: stop them or use --force\n"
        "z had been released already\n"
    )
    assert [request.force for request in daemon.requests("Release")] == [False] * 3
    assert main("release", "-q", "x", "--force").stderr == ""
    assert daemon.requests("Release")[-1].force


def test_resize_sends_only_what_changes(main: Ctl, daemon: Daemon) -> None:
    assert main("resize", "x1", "--memory", "8GiB").returncode == 0
    assert main("resize", "x1", "--cores", "12.5%").returncode == 0
    first, second = daemon.requests("Resize")
    assert (first.allocation_id, first.memory_bytes, first.HasField("share_percent")) == (
        "x1",
        8 * canned.GIB,
        False,
    )
    assert (second.share_percent, second.HasField("memory_bytes")) == (12.5, False)
    above = canned.used()
    above.slices[0].memory_bytes = canned.GIB
    daemon.replies["GetAllocation"] = above
    said = main("resize", "x1", "--memory", "1GiB").stderr
    assert "it holds 3GiB on GPU-aaaaaaaa, more than its limit: it gets no more until" in said
    done = main("resize", "x1")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "vgpuctl: no new limit is given (E103)")


def test_plan_exits_with_the_code_of_the_refusal(main: Ctl, daemon: Daemon) -> None:
    daemon.replies["Plan"] = canned.refused_plan()
    done = main("plan", "--memory", "100GiB", "-v")
    assert done.returncode == 33
    assert done.stdout.splitlines()[0].split() == ["TAKEN", "DEVICE", "MODE", "WHY"]
    assert "76GiB too little" in done.stdout
    assert done.stderr == (
        "vgpuctl: no device has 100GiB free, the most is 24GiB (E401)\nhint: ask for 24GiB or less\n"
    )
    document = json.loads(main("plan", "-o", "json").stdout)
    assert (document["kind"], document["possible"], document["refusal"]["number"]) == ("Plan", False, 401)


@pytest.mark.parametrize(("dry", "changed", "code"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_a_policy_reload_prints_the_changed_settings(
    main: Ctl, daemon: Daemon, dry: bool, changed: bool, code: int
) -> None:
    daemon.replies["ReloadPolicy"] = pb.ReloadPolicyReply(
        changed=changed,
        digest="77",
        done=["strategy is spread"],
        waiting=["device 0 waits for 2 allocations"],
    )
    done = main("policy", "reload", *(["--dry-run"] if dry else []))
    assert done.returncode == code
    when = "at a reload" if dry else "done"
    assert done.stdout == f"{when}: strategy is spread\nwaiting: device 0 waits for 2 allocations\n"
    word = "changed" if changed else "unchanged"
    assert done.stderr == f"policy {'would be ' if dry else ''}{word}, digest 77\n"
    assert daemon.requests("ReloadPolicy")[0].dry_run is dry


def test_policy_check_needs_no_daemon(main: Ctl, daemon: Daemon, tmp_path: Path) -> None:
    daemon.stop()
    good = tmp_path / "good.toml"
    good.write_text('version = 1\n[planner]\nstrategy = "spread"\n')
    assert main("policy", "check", str(good)).returncode == 0
    lines = main("policy", "show", "--file", str(good)).stdout.splitlines()
    assert lines[:2] == ["version = 1", 'planner.strategy = "spread"']
    origins = main("policy", "show", "--file", str(good), "--origin", "--no-headers").stdout.splitlines()
    assert origins[1].split() == ["planner.strategy", '"spread"', f"{good}:3"]
    document = json.loads(main("policy", "check", str(good), "-o", "json").stdout)
    assert (document["kind"], document["policy"]["planner"]["strategy"]) == ("PolicyCheck", "spread")


def test_policy_check_reports_every_mistake(main: Ctl, tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text('version = 1\n[planner]\nstrategi = "pack"\n[[device]]\nmode = "migg"\n')
    done = main("policy", "check", str(bad))
    assert done.returncode == 78
    assert f"\n  {bad}:3: planner.strategi: " in done.stderr
    assert f"\n  {bad}:5: device[0].mode: " in done.stderr
    assert "(E104)" in done.stderr
    bad.write_text("version = 2\n")
    once = main("policy", "check", str(bad)).stderr
    assert once.count(f"{bad}:1") == 1
    assert main("policy", "check", str(tmp_path)).returncode != 0
    assert main("policy", "check", str(tmp_path / "none.toml")).returncode == 78


@pytest.mark.parametrize("code", list(ErrorCode), ids=lambda code: code.name)
def test_vgpuctl_exits_with_the_code_of_the_error(main: Ctl, daemon: Daemon, code: ErrorCode) -> None:
    daemon.replies["ListDevices"] = VgpuError(code, "3 of 4 are wrong\x1b[2J", "do this", ("one", "two"))
    done = main("devices")
    assert done.returncode == code.exit_code.value
    assert done.stdout == ""
    details = "  one\n  two\n" if code in DETAILS_MATTER else ""
    sentence = f"vgpuctl: 3 of 4 are wrong\\x1b[2J (E{code.number})\n"
    assert done.stderr == f"{sentence}{details}hint: do this\n"
    assert main("devices", "-v").stderr == f"{sentence}  one\n  two\nhint: do this\n"
    assert "hint" not in main("devices", "-q").stderr
    assert "hint" in main("alloc", "--memory", "10G").stderr
    assert "hint" not in main("-q", "alloc", "--memory", "10G").stderr


def test_devices_that_are_refused_for_the_same_reason_share_a_line(main: Ctl, daemon: Daemon) -> None:
    details = ("device 0 (GPU-a): full", "device 1 (GPU-b): lost", "device 2 (GPU-c): full", "GPU-d is gone")
    daemon.replies["Allocate"] = VgpuError(ErrorCode.NO_CAPACITY, "no room", "wait", details)
    lines = ["  devices 0, 2: full", "  device 1 (GPU-b): lost", "  GPU-d is gone"]
    assert main("alloc").stderr.splitlines()[1:-1] == lines
    assert json.loads(main("alloc", "-o", "json").stdout)["details"] == list(details)


def test_a_reason_that_repeats_the_refusal_is_not_printed(main: Ctl, daemon: Daemon) -> None:
    details = ("device 0 (GPU-a): full", "device 1 (GPU-b): full", "device 2 (GPU-c): lost")
    sentence = "no room: device 0: full (and 1 device more alike)"
    daemon.replies["Allocate"] = VgpuError(ErrorCode.NO_CAPACITY, sentence, "wait", details)
    assert main("alloc").stderr.splitlines()[1:-1] == ["  device 2 (GPU-c): lost"]


def test_an_error_is_printed_as_a_document_with_output_json(main: Ctl, daemon: Daemon) -> None:
    daemon.replies["GetAllocation"] = VgpuError(
        ErrorCode.NO_SUCH_ALLOCATION, "there is no allocation x", "see vgpuctl ls", ("d",)
    )
    done = main("show", "x", "-o", "json")
    assert done.returncode == 6
    assert json.loads(done.stdout) == {
        "apiVersion": "vgpud.io/v1",
        "kind": "Error",
        "number": 301,
        "name": "NO_SUCH_ALLOCATION",
        "sentence": "there is no allocation x",
        "hint": "see vgpuctl ls",
        "details": ["d"],
        "exitCode": 6,
    }
    assert "(E301)" in done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "-o json alloc --memory 4G",
        "alloc --memory 4G --output=json",
        "alloc --count many -qo json",
        "-ojson nonsense",
        "devices -o json --nonsense",
    ],
)
def test_a_refused_command_line_is_printed_as_a_document_with_output_json(main: Ctl, line: str) -> None:
    done = main(*line.split())
    error = json.loads(done.stdout)
    assert (error["kind"], error["exitCode"]) == ("Error", done.returncode)
    assert error["sentence"] in done.stderr


@pytest.mark.parametrize("line", ["alloc --memory 4G -o", "alloc -o nonsense", "run --memory 4G x -o json"])
def test_a_refused_command_line_without_output_json_prints_nothing_on_standard_output(
    main: Ctl, line: str
) -> None:
    done = main(*line.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("vgpuctl: ")


def test_an_absent_daemon_is_reported_with_a_hint(main: Ctl, daemon: Daemon) -> None:
    daemon.stop()
    done = main("ls")
    assert done.returncode == 32
    assert "(E801)" in done.stderr
    assert main("ls", "--socket", f"{daemon.socket}.other").returncode == 32


def test_an_option_chooses_the_socket_of_vgpuctl(
    main: Ctl, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VGPUD_SOCKET", "/nowhere/vgpud.sock")
    assert main("ls").returncode == 32
    assert main("--socket", str(daemon.socket), "ls").returncode == 0


def test_a_silent_daemon_is_an_error_with_a_hint(main: Ctl, daemon: Daemon) -> None:
    gate = threading.Event()
    daemon.replies["ListDevices"] = lambda _request: (gate.wait(300), canned.devices())[1]
    done = main("devices", "--timeout", "0.2")
    gate.set()
    assert done.returncode == 36
    assert "(E802)" in done.stderr


def test_an_internal_error_is_printed_as_one_sentence(main: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vgpud.ctl.tables.devices", lambda _items: 1 // 0)
    done = main("devices")
    assert done.returncode == 70
    assert done.stderr.startswith("vgpuctl: vgpuctl failed with ZeroDivisionError: ")
    assert "Traceback" not in done.stderr
    assert "Traceback" in main("devices", "-v").stderr


def test_a_closed_pipe_ends_the_output_quietly(daemon: Daemon) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # before vgpuctl starts, because it could write before a later close
    for line in ("devices", "ls -o json", "status -o yaml", "policy show", "devices --help", "help"):
        words, given = (*COMMAND, *line.split()), environment(daemon.socket)
        done = subprocess.run(words, env=given, stdout=writer, stderr=subprocess.PIPE, check=False)
        assert (done.returncode, done.stderr) == (141, b""), line
    os.close(writer)


def redirected(daemon: Daemon, line: str, redirection: str) -> Done:
    return subprocess.run(
        ("sh", "-c", f'exec "$@" {redirection}', "sh", *COMMAND, *line.split()),
        env={**environment(daemon.socket), **MEASURED},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("line", "redirection", "why"),
    [
        *(
            (line, ">/dev/full", "no space left on device")
            for line in ("devices", "top -1", "doctor", "help")
        ),
        *((line, ">&-", "bad file descriptor") for line in ("ls -o name", "policy explain")),
    ],
)
def test_vgpuctl_fails_if_its_output_cannot_be_written(
    daemon: Daemon, line: str, redirection: str, why: str
) -> None:
    done = redirected(daemon, line, redirection)
    assert done.returncode == 70
    assert done.stderr.endswith(f"vgpuctl: cannot write the answer: {why}\n")
    assert "E901" not in done.stderr


def test_a_closed_standard_error_does_not_change_the_exit_code(daemon: Daemon) -> None:
    assert redirected(daemon, "devices", "2>&-").returncode == 0
    assert redirected(daemon, "nonsense", "2>&-").returncode == 2


@pytest.mark.parametrize("output", ["name", "json", "env"])
def test_vgpuctl_names_an_allocation_if_its_answer_cannot_be_written(daemon: Daemon, output: str) -> None:
    done = redirected(daemon, f"alloc -q -o {output}", ">/dev/full")
    (request,) = daemon.requests("Allocate")
    assert done.returncode == 70
    assert done.stderr == (
        f"allocation a1b2c3d4 is made; its request id is {request.request_id}\n"
        "vgpuctl: cannot write the answer: no space left on device\n"
    )


def test_a_label_is_printed_in_a_locale_that_lacks_its_letters(daemon: Daemon) -> None:
    given = {**environment(daemon.socket), "PYTHONIOENCODING": "ascii"}
    said = subprocess.check_output((*COMMAND, "ls"), env=given, text=True)
    assert "tr\\xe4ning" in said


@pytest.mark.parametrize(
    "line", ["alloc --label ?", "alloc --request-id ?", "show ?", "run --label ? -- true"]
)
def test_arguments_that_are_not_utf8_are_refused(ctl: Ctl, daemon: Daemon, line: str) -> None:
    done = ctl(*line.replace("?", os.fsdecode(b"\xff\xff\xff\xff")).split())
    assert done.returncode == 2
    assert "is not UTF-8 (E103)\nhint: " in done.stderr
    assert daemon.requests("Allocate") == []


def test_the_state_of_a_suspended_allocation_is_short_in_tables_and_whole_elsewhere(
    main: Ctl, daemon: Daemon
) -> None:
    item = canned.preload("suspended")
    item.standing = (
        "waits to resume, 2nd in the queue: no room; swapped out by libvgpu, 526MiB of it on the device"
    )
    item.suspended_bytes, item.stays_bytes = 3 * canned.GIB, 526 * 2**20
    item.use.add(device_uuid=item.slices[0].device_uuid, memory_used_bytes=3 * canned.GIB + 526 * 2**20)
    daemon.replies["ListAllocations"] = canned.allocations(item)
    daemon.replies["GetAllocation"] = item
    assert "  suspended (waits to resume, 2nd in the queue)  " in main("ls").stdout
    shown = main("show", item.id).stdout
    assert item.standing in shown
    assert "3GiB is on the host, 526MiB stays on its devices" in shown
    heads, row = shown.splitlines()[-2:]
    assert row.split()[heads.split().index("USED")] == "526MiB"
    (document,) = json.loads(main("ls", "-o", "json").stdout)["items"]
    assert document["standing"] == item.standing


def test_an_interrupt_ends_vgpuctl_while_it_waits_for_vgpud(daemon: Daemon) -> None:
    gate = threading.Event()
    daemon.replies["Allocate"] = lambda _request: (gate.wait(300), canned.preload())[1]
    process = prepared.ctl(["alloc"], environment(daemon.socket))
    eventually(lambda: process.poll() is not None or daemon.requests("Allocate"), "it calls")
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=300)
    gate.set()
    assert (process.returncode, out) == (130, "")
    assert said.startswith("if it was made after all, --request-id vgpuctl-")
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("unix_ns", "text"),
    [
        (0, None),
        (-1, None),
        (1, "1970-01-01T00:00:00.000000001Z"),
        (1_767_225_600_123_456_789, "2026-01-01T00:00:00.123456789Z"),
    ],
)
def test_times_in_json_keep_every_nanosecond(unix_ns: int, text: str | None) -> None:
    assert rfc3339(unix_ns) == text


def test_vgpuctl_runs_from_any_directory(daemon: Daemon, tmp_path: Path) -> None:
    done = subprocess.run(
        (*COMMAND, "--version"), cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    from vgpud import __version__

    assert done.stdout == f"vgpuctl {__version__}\n"
    assert str(ROOT) not in done.stdout


def test_an_allocation_is_named_by_the_first_characters_of_its_id(main: Ctl, daemon: Daemon) -> None:
    known = canned.allocations().allocations
    assert main("show", known[0].id[:4]).returncode == 0
    assert daemon.requests("GetAllocation")[-1].allocation_id == known[0].id
    short = main("release", known[0].id[:3])
    assert (short.returncode, daemon.requests("Release")) == (6, [])
    assert f"there is no allocation '{known[0].id[:3]}' (E301)" in short.stderr
    assert "hint: give at least 4 characters of the id" in short.stderr


def test_a_prefix_that_two_ids_share_is_refused(main: Ctl, daemon: Daemon) -> None:
    ids = ["abcd00000001", "abcd00000002"]
    daemon.replies["ListAllocations"] = pb.ListAllocationsReply(
        allocations=[pb.Allocation(id=i) for i in ids]
    )
    done = main("release", "abcd")
    assert (done.returncode, daemon.requests("Release")) == (2, [])
    assert "2 allocations begin with 'abcd': abcd00000001, abcd00000002" in done.stderr


def test_a_device_is_named_by_the_first_characters_of_its_uuid(main: Ctl, daemon: Daemon) -> None:
    uuids = [device.uuid for device in canned.devices().devices]
    assert main("plan", "--device", uuids[1][:12]).returncode in (0, 33)
    assert list(daemon.requests("Plan")[-1].selector.uuids) == [uuids[1]]
    done = main("alloc", "--device", "GPU-nowhere")
    assert (done.returncode, daemon.requests("Allocate")) == (6, [])
    done = main("alloc", "--device", "GPU-")
    assert (done.returncode, daemon.requests("Allocate")) == (6, [])
    assert (
        f"'GPU-' names {len(uuids)} of the {len(uuids)} devices of this node: {', '.join(uuids[:4])}"
        in done.stderr
    )


def test_an_error_about_a_missing_device_says_what_the_node_has(main: Ctl, daemon: Daemon) -> None:
    daemon.replies["ListDevices"] = pb.ListDevicesReply(devices=canned.devices().devices[:1])
    assert "'GPU-x' names none of the 1 device of this node (E" in main("drain", "GPU-x").stderr
    for line in ("drain 7", "move x --to 7"):
        said = main(*line.split()).stderr
        # as vgpud words it for `alloc --device 7`
        assert said == "vgpuctl: no device has index 7 (E302)\nhint: the node has 0; see 'vgpuctl devices'\n"


def test_a_listing_is_filtered_by_user_label_and_device(main: Ctl, daemon: Daemon) -> None:
    def item(name: str, uid: int, label: str, device: str) -> pb.Allocation:
        return pb.Allocation(id=name, owner_uid=uid, label=label, slices=[pb.Slice(device_uuid=device)])

    of_a_pod = item("c", 4242, "serve", canned.A)
    of_a_pod.workload.CopyFrom(pb.Workload(namespace="team", pod="web-1", container="main"))
    daemon.replies["ListAllocations"] = pb.ListAllocationsReply(
        allocations=[
            item("a", os.getuid(), "train-1", canned.A),
            item("b", 4242, "train-2", canned.B),
            of_a_pod,
        ]
    )
    for line, names in {
        "": ["a", "b", "c"],
        "--mine": ["a"],
        "--user 4242": ["b", "c"],
        "--label train-*": ["a", "b"],
        "--device 0": ["a", "c"],
        f"--user 4242 --device {canned.A[:12]}": ["c"],
        "--label none": [],
        "--label serve": ["c"],
        "--label *web*": ["c"],
        "--pod web-*": ["c"],
        "--pod team/web-1": ["c"],
        "--pod team/*/main": ["c"],
        "--pod train-*": [],
    }.items():
        assert main("ls", "-o", "name", *line.split()).stdout.split() == names, line


def test_a_user_option_accepts_a_name_or_a_number(main: Ctl, daemon: Daemon) -> None:
    assert main("ls", "--user", "root", "-o", "name").returncode == 0
    for verb, user in ("ls", "no-such-user"), ("ls", "4294967295"), ("events", "4294967296"):
        done = main(verb, "--user", user)
        assert done.returncode == 2
        assert f"this host has no user '{user}'" in done.stderr


def test_events_are_listed_for_a_time_span(main: Ctl, daemon: Daemon) -> None:
    now = time.time_ns()
    daemon.replies["ListEvents"] = pb.ListEventsReply(
        events=[pb.Event(revision=1, unix_ns=now - 7200 * 10**9), pb.Event(revision=2, unix_ns=now)]
    )
    assert main("events", "--since", "1h", "-o", "name").stdout.split() == ["2"]
    assert main("events", "--since", "3h", "-o", "name").stdout.split() == ["1", "2"]
    assert main("events", "--since", "tomorrow").returncode == 2


_SILENT = pb.MpsDaemon(device_index=3, device_uuid="GPU-3", trouble="no answer within 5 s")
_BUSY = [pb.MpsDaemon(device_uuid=uuid, clients=[pb.MpsClient(pid=7)]) for uuid in ("GPU-1", "GPU-2")]


@pytest.mark.parametrize(
    ("line", "method", "reply", "said", "code"),
    [
        ("mig ls", "ListMig", pb.ListMigReply(), "no device of this node can be partitioned by MIG", 0),
        ("mps ls", "ListMps", pb.ListMpsReply(), "no device is in mode mps", 0),
        ("mps ls", "ListMps", pb.ListMpsReply(daemons=[_SILENT]), "no answer within 5 s", Exit.DEGRADED),
        (
            "mps terminate 7",
            "ListMps",
            pb.ListMpsReply(daemons=_BUSY),
            "process 7 is a client on 2 devices",
            2,
        ),
        (
            "mps terminate 8",
            "ListMps",
            pb.ListMpsReply(daemons=_BUSY),
            "no MPS client with pid 8 among the 2",
            6,
        ),
    ],
)
def test_vgpuctl_says_what_it_does_not_find_of_mig_and_mps(
    main: Ctl, daemon: Daemon, line: str, method: str, reply: Any, said: str, code: int
) -> None:
    daemon.replies[method] = reply
    done = main(*line.split())
    assert said in done.stdout + done.stderr
    assert done.returncode == code
