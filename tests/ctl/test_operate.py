"""The verbs of vgpuctl for daily work: ps, why, events, doctor, bug-report, policy diff and test,
completions.
"""

import json
import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests import prepared
from tests.conditions import needs
from tests.ctl import canned
from tests.ctl.conftest import COMMAND, ROOT, Ctl, environment
from tests.ctl.daemon import Daemon
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl.completion import table
from vgpud.ctl.redact import redact, without_private
from vgpud.ctl.verbs import VERBS, Group
from vgpud.ctl.why import limiting
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.policy.compare import Change, compare

GIB = 2**30

# --- policy explain


def test_the_policy_is_explained_for_each_device_and_the_user(main: Ctl, daemon: Daemon) -> None:
    rules = [
        {"match": {"index": 0}, "mode": "preload", "on_sick": "move", "preload": {"max_tenants": 8}},
        {"mode": "auto"},
    ]
    policy = {"version": 1, "device": rules, "quota": [{"uids": [os.getuid()], "max_devices": 3}]}
    daemon.replies["GetPolicy"] = pb.PolicyReply(
        json=json.dumps(policy),
        origins={
            "device[0].mode": "a.toml:4",
            "device[0].preload.max_tenants": "a.toml:5",
            "device[0].on_sick": "a.toml:6",
        },
    )
    said = main("policy", "explain").stdout
    assert "device 0 (NVIDIA H200): device[0]" in said
    assert re.search(r'mode +"preload" +a.toml:4 +quotas by libvgpu', said)
    assert re.search(r"preload.max_tenants +8 +a.toml:5 +allocations on one device", said)
    assert re.search(r'on_sick +"move" +a.toml:6 +a device for which NVML asks', said)
    assert "devices 1, 2 (NVIDIA H200): device[1]" in said
    assert re.search(r"user .*: quota\[0\]\n\n.*\nmax_devices +3 +built-in +slices", said)
    assert re.search(r'max_priority +"normal" +built-in +the highest priority', said)


def test_the_quota_of_another_user_is_explained_by_name(main: Ctl, daemon: Daemon) -> None:
    quotas = [{"users": ["daemon"], "max_devices": 3}, {"gids": [os.getgid()], "max_devices": 5}]
    daemon.replies["GetPolicy"] = pb.PolicyReply(json=json.dumps({"version": 1, "quota": quotas}))
    assert re.search(r"user daemon: quota\[0\]\n", main("policy", "explain", "--user", "daemon").stdout)
    assert re.search(r"user bin: no quota\n", main("policy", "explain", "--user", "bin").stdout)
    refused = main("policy", "explain", "--user", "no-such-user")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "this host has no user 'no-such-user'" in refused.stderr


# --- ps and events


def test_vgpuctl_ps_lists_processes_of_tenants_and_other_processes(main: Ctl) -> None:
    lines = main("ps").stdout.splitlines()
    assert re.search(r"4242 +root +python +a1b2c3d4 +0 +1GiB", lines[1])
    assert re.search(r"4343 +- +- +outside vgpud +1 +-", lines[2])
    assert main("ps", "-o", "name").stdout.split() == ["4242", "4343"]
    document = json.loads(main("ps", "-o", "json").stdout)
    assert document["kind"] == "ProcessList"
    assert document["items"][1]["memoryBytes"] is None


def test_the_events_are_listed(main: Ctl, daemon: Daemon) -> None:
    done = main("events", "--last", "7", "--user", "1000")
    assert daemon.requests("ListEvents")[0] == pb.ListEventsRequest(last=7, user=1000)
    assert done.stdout.splitlines()[1].split("  ")[-1] == "in force"
    assert [item["type"] for item in json.loads(main("events", "-o", "json").stdout)["items"]] == [
        "allocation_active",
        "policy_reloaded",
    ]
    assert main("events", "--last", "0").returncode == 2
    daemon.replies["ListEvents"] = pb.ListEventsReply()
    none = main("events")
    assert not daemon.requests("ListEvents")[-1].HasField("user")
    assert (none.stdout, none.stderr) == ("", "no event yet\n")


def test_vgpuctl_ps_marks_a_process_that_libvgpu_does_not_count(main: Ctl, daemon: Daemon) -> None:
    process = pb.NodeProcess(pid=5, command="python", allocation_id="a1b2c3d4", unlimited=True)
    daemon.replies["ListProcesses"] = pb.ListProcessesReply(processes=[process])
    assert "a1b2c3d4 (not counted by libvgpu)" in main("ps").stdout


def test_no_process_is_shown_as_outside_vgpud_while_the_arbiter_does_not_answer(
    main: Ctl, daemon: Daemon
) -> None:
    process = pb.NodeProcess(pid=4343, command="python", device_uuid=canned.A, silent_mode="preload")
    daemon.replies["ListProcesses"] = pb.ListProcessesReply(processes=[process])
    daemon.replies["GetAllocation"] = VgpuError(ErrorCode.NO_SUCH_ALLOCATION, "no allocation", "")
    done = [main(*verb.split()) for verb in ("ps", "doctor", "why 4343", "top -1")]
    assert "vgpu-arbiter does not answer" in done[0].stderr
    said = [one.stdout for one in done]
    assert not [text for text in said if "outside vgpud" in text]
    assert "unknown" in said[0]
    assert "vgpu-arbiter does not answer" in said[1] and "vgpud starts it again by itself" in said[1]
    assert "its allocation is unknown, because vgpu-arbiter does not answer" in said[2]


def test_vgpuctl_doctor_and_why_tell_of_an_arbiter_that_does_not_answer(main: Ctl, daemon: Daemon) -> None:
    daemon.replies["GetNode"] = pb.NodeReply(arbiter_error="vgpu-arbiter does not answer: wait")
    process = pb.NodeProcess(pid=4343, command="python", device_uuid=canned.A, silent_mode="preload")
    daemon.replies["ListProcesses"] = pb.ListProcessesReply(processes=[process])
    assert main("doctor").stdout.count("vgpu-arbiter does not answer") == 1
    daemon.replies["GetAllocation"] = canned.preload()
    assert "vgpu-arbiter does not answer: wait" in main("why", canned.preload().id).stdout


# --- why


def held(part: pb.Slice, **more: object) -> pb.Allocation:
    return pb.Allocation(id="a1", state="active", slices=[part], **more)  # type: ignore[arg-type]


def sentences(
    allocation: pb.Allocation, now: pb.SliceMeter, before: pb.SliceMeter | None = None, tenants: int = 2
) -> str:
    devices = {item.uuid: item for item in canned.devices("lost").devices}
    devices[canned.A].allocation_count = tenants
    return "\n".join(limiting(allocation, devices, [(now, before or now)], 2.0))


def test_vgpuctl_why_names_full_memory_and_the_causes_of_refused_memory() -> None:
    part = pb.Slice(device_uuid=canned.A, mode="preload", memory_bytes=4 * GIB, share_percent=25)
    said = sentences(held(part), pb.SliceMeter(memory_used_bytes=4 * GIB, refusals_limit=3, refusals_card=1))
    assert "memory on device 0: 4GiB of 4GiB, it is full: give it more with 'vgpuctl resize'" in said
    assert "memory was refused 3 times because it would have passed 4GiB" in said
    assert "memory was refused 1 time because device 0 itself was full" in said
    assert "compute on device 0: 25% of the time, in turns" in said
    assert "full" not in sentences(held(part), pb.SliceMeter(memory_used_bytes=GIB))
    above = sentences(held(part), pb.SliceMeter(memory_used_bytes=6 * GIB))
    assert "memory on device 0: 6GiB of 4GiB, it holds more than its lowered limit" in above


def test_vgpuctl_why_names_the_causes_that_slow_a_tenants_compute() -> None:
    part = pb.Slice(device_uuid=canned.A, mode="preload", memory_bytes=4 * GIB, share_percent=25)
    before = pb.SliceMeter(compute_used_ns=0, compute_waited_ns=0, throttled_ns=0)
    now = pb.SliceMeter(compute_used_ns=5 * 10**8, compute_waited_ns=10**9, throttled_ns=2 * 10**8)
    said = sentences(held(part), now, before)
    assert "it had device 0 for 25% of the last 2 s" in said
    assert "it waited 50% of that time for the time slices of others on device 0" in said
    assert "its launches were held back for 10% of that time to keep to 25%" in said
    part.mode = "mps"
    assert "at most 25% of the multiprocessors, by MPS" in sentences(held(part), now)
    part.mode = "exclusive"
    assert "the card is its own" in sentences(held(part), now)


def test_vgpuctl_why_says_that_a_lone_tenant_waits_because_of_its_own_share() -> None:
    part = pb.Slice(device_uuid=canned.A, mode="preload", memory_bytes=4 * GIB, share_percent=25)
    now = pb.SliceMeter(compute_used_ns=10**9, compute_waited_ns=4 * 10**9)
    said = sentences(held(part), now, pb.SliceMeter(), tenants=1)
    assert "it had device 0 for 50% of the last 2 s" in said
    assert "it waited 100% of that time to keep to 25%" in said
    assert "others" not in said


def test_vgpuctl_why_reports_a_failed_allocation_first() -> None:
    part = pb.Slice(device_uuid=canned.C, mode="preload", memory_bytes=GIB)
    failed = held(part, failure="device 2 is lost")
    failed.state = "failed"
    said = sentences(failed, pb.SliceMeter()).splitlines()
    assert said[0].startswith("it has failed: device 2 is lost; release it")
    assert said[1].startswith("device 2 is lost: ")


def test_vgpuctl_why_says_that_a_suspended_tenant_waits_for_its_resume() -> None:
    waiting = held(pb.Slice(device_uuid=canned.A, mode="preload", memory_bytes=GIB))
    waiting.state = "suspended"
    waiting.standing = "idle"
    said = sentences(waiting, pb.SliceMeter()).splitlines()
    assert said[0] == "it is suspended (idle): 'vgpuctl resume a1' resumes it"
    assert said[1] == "memory: 0 is on the host, 0 stays on its devices"
    waiting.cause, waiting.suspended_bytes = "idle", 5 * GIB // 2
    said = sentences(waiting, pb.SliceMeter()).splitlines()
    assert "it resumes by itself when it has work and room; 'vgpuctl resume a1' resumes it" in said[0]
    assert said[1] == "memory: 2.5GiB is on the host, 0 stays on its devices"


@pytest.mark.parametrize("verb", ["why", "explain"])
def test_the_decision_of_a_moved_allocation_is_shown_with_the_move(
    main: Ctl, daemon: Daemon, verb: str
) -> None:
    item = canned.preload()
    daemon.replies["GetAllocation"] = item
    assert "moved" not in main(verb, item.id).stdout
    item.slices[0].device_uuid = canned.C
    said = main(verb, item.id).stdout
    assert "from GPU-aaaaaaaa to GPU-cccccccc, since the decision below" in said
    assert said.index("moved:") < said.index("TAKEN")


def test_vgpuctl_why_shows_the_cause_of_an_allocations_failure(main: Ctl, daemon: Daemon) -> None:
    item = canned.preload()
    daemon.replies["GetAllocation"] = item
    assert "failure" not in main("why", item.id).stdout
    item.failure = "its MPS daemon has ended"
    assert "failure:" in main("why", item.id).stdout
    assert item.failure in main("why", item.id).stdout


@pytest.mark.parametrize(("asked", "answer"), [((), "is free"), (("--memory", "8GiB"), "has room for 8GiB")])
def test_vgpuctl_defrag_says_that_the_device_is_free_or_has_the_room_asked_for(
    main: Ctl, daemon: Daemon, asked: tuple[str, ...], answer: str
) -> None:
    daemon.replies["PlanDefrag"] = daemon.replies["Defrag"] = pb.DefragReply(device_uuid=canned.A)
    assert f"{canned.A} {answer}" in main("defrag", "--device", canned.A, *asked).stderr


def test_vgpuctl_drain_takes_several_devices_and_none_if_a_name_is_wrong(main: Ctl, daemon: Daemon) -> None:
    daemon.replies["ListDevices"] = pb.ListDevicesReply(devices=canned.devices().devices[:2])
    daemon.replies["DrainDevice"] = lambda asked: pb.DrainDeviceReply(
        device_uuid=asked.device_uuid, idle=asked.device_uuid == canned.A
    )
    done = main("drain", "0", "1")
    assert done.returncode == 1, "device 1 is not idle"
    assert f"{canned.A} is drained and idle: its helper can be restarted\n" in done.stderr
    assert f"{canned.B} is drained and takes no new tenants" in done.stderr
    document = json.loads(main("drain", "0", "1", "-o", "json").stdout)
    assert [item["deviceUuid"] for item in document["items"]] == [canned.A, canned.B]
    assert json.loads(main("drain", "0", "-o", "json").stdout)["deviceUuid"] == canned.A
    daemon.replies["DrainDevice"] = lambda asked: pb.DrainDeviceReply(
        device_uuid=asked.device_uuid, idle=True
    )
    idle = main("drain", "0", "1").stderr
    assert idle.count("its helper and, as all devices are drained, the driver can be restarted") == 2
    wrong = main("drain", "0", "9")
    assert wrong.returncode == 6
    assert "drained" not in wrong.stderr


@pytest.mark.parametrize(("state", "change"), [("suspending", "suspended or moved"), ("resuming", "resumed")])
def test_vgpuctl_why_says_that_an_allocation_is_being_changed(
    main: Ctl, daemon: Daemon, state: str, change: str
) -> None:
    held = canned.used()
    held.state = state
    daemon.replies["GetAllocation"] = held
    said = main("why", held.id).stdout
    assert f"it is being {change}, and its processes may wait until that has ended" in said


def test_vgpuctl_why_finds_the_tenant_of_a_process(main: Ctl, daemon: Daemon) -> None:
    gone = VgpuError(ErrorCode.NO_SUCH_ALLOCATION, "no allocation", "")
    daemon.replies["GetAllocation"] = lambda asked: (
        canned.used() if asked.allocation_id == "a1b2c3d4" else gone
    )
    done = main("why", "4242")
    assert done.returncode == 0
    assert "a1b2c3d4" in done.stdout
    assert "WHAT LIMITS IT NOW" in done.stdout
    outside = main("why", "4343")
    assert outside.returncode == 1
    assert f"process 4343 runs outside vgpud on {canned.B}" in outside.stdout
    assert "after a forced release of its own, it gets no more memory" in outside.stdout
    for nobody in ("999999", "no-such-id"):
        assert main("why", nobody).returncode == 6


def test_vgpuctl_why_shows_the_memory_of_an_allocation_younger_than_the_first_reading(
    main: Ctl, daemon: Daemon
) -> None:
    readings = iter([pb.UsageReply(), canned.usage(memory_used_bytes=GIB)])
    daemon.replies["GetUsage"] = lambda _: next(readings)
    daemon.replies["GetAllocation"] = canned.used()
    assert "memory on device 0: 1GiB of" in main("why", "a1b2c3d4").stdout


# --- doctor and bug-report


@needs("root")  # a policy of another user is not trusted
def test_vgpuctl_doctor_without_a_daemon_checks_the_host(tmp_path: Path) -> None:
    env = {
        **environment(tmp_path / "none.sock"),
        "VGPUD_RUN_DIR": str(tmp_path / "run"),
        "VGPUD_STATE_DIR": str(tmp_path),
        "VGPUD_LIB_DIR": str(tmp_path),
        "VGPUD_GROUP": "",
        "VGPUD_CONFIG": str(tmp_path / "vgpud.toml"),
    }
    (tmp_path / "vgpud.toml").write_text("version = 1\n[planer]\n")
    process = prepared.ctl(["doctor", "-o", "json"], env)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 37
    found = {item["check"]: item for item in json.loads(said)["items"]}
    assert found["daemon"]["state"] == "failed"
    assert found["run folder"]["state"] == "failed"
    assert "planer: is not a key" in found["policy"]["sentence"] and "policy check" in found["policy"]["fix"]
    assert found["libvgpu"]["sentence"].startswith(f"{tmp_path}/libvgpu.so is missing")
    for item in found.values():
        assert item["fix"] or item["state"] in ("ok", "skipped"), item


def test_vgpuctl_doctor_reports_each_fault(
    main: Ctl, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = daemon.socket.parent
    for name, mode in (("ro.sock", 0o666), ("vgpud.sock", 0o666), ("admin.sock", 0o600)):
        if not (folder / name).exists():
            (folder / name).touch()
        (folder / name).chmod(mode)
    for path in ("leases/a1b2c3d4", "leases/stale", "cdi"):
        (folder / path).mkdir(parents=True)
    (folder / "cdi" / "vgpud.io-vgpu_gone.json").touch()
    for name, value in (
        ("RUN_DIR", folder),
        ("STATE_DIR", folder),
        ("CDI_DIR", folder / "cdi"),
        ("GROUP", ""),
    ):
        monkeypatch.setenv(f"VGPUD_{name}", str(value))
    daemon.replies["ListDevices"] = canned.devices("lost")
    daemon.replies["GetNode"] = canned.node(simulated=True)
    daemon.replies["ListEvents"] = pb.ListEventsReply(events=[pb.Event(unix_ns=2 * 10**18 * 4)])
    done = main("doctor", "-o", "json")
    assert done.returncode == 37
    items = json.loads(done.stdout)["items"]

    def state(check: str, words: str) -> str:
        return str(next(i["state"] for i in items if i["check"] == check and words in i["sentence"]))

    assert state("sockets", "has mode 0666, wider than 0660") == "failed"
    assert state("device 2", "it is lost") == "failed"
    assert state("leases", "1 in") == "warning"
    assert "stale" in next(item["sentence"] for item in items if item["check"] == "leases")
    assert state("specs", "belong to no allocation (gone)") == "warning"
    assert state("clock", "in the future") == "warning"
    assert state("driver", "SIMULATED") == "warning"
    assert state("mps", "") == "ok", "the simulated node has its own"
    assert state("outside", "process 4343 uses") == "warning"


def test_a_bug_report_contains_no_user_or_host_names(main: Ctl, daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "report.tar.gz"
    assert main("bug-report", "--file", str(path)).returncode == 0
    assert path.stat().st_mode & 0o077 == 0
    with tarfile.open(path) as archive:
        parts = {
            Path(entry.name).name: archive.extractfile(entry).read().decode()  # type: ignore[union-attr]
            for entry in archive
        }
    assert {"versions.txt", "doctor.json", "devices.json", "allocations.json", "events.json"} <= set(parts)
    assert canned.A in parts["devices.json"]
    everything = "".join(parts.values())
    host = os.uname().nodename
    assert not re.search(rf"(?<![\w-]){re.escape(host)}(?![\w-])", everything) or len(host) < 2
    for label in (item.label for item in canned.allocations().allocations if item.label):
        assert f'"{label}"' not in everything
    assert '"command": "python"' not in everything
    assert "LD_PRELOAD" not in parts["allocations.json"]
    again = main("bug-report", "--file", str(path))
    assert again.returncode == 2  # bug-report does not overwrite an existing file
    assert "it exists, and is not overwritten" in again.stderr


def test_a_bug_report_hides_names_and_paths() -> None:
    names = [("node1", "HOST"), ("node1.example.org", "HOST"), ("alice", "user1000")]
    text = (
        "node1.example.org node1 alice malice /home/alice/x 10.20.30.40 127.0.0.1 580.159.04 1.2.3.4.5 "
        "aa:bb:cc:dd:ee:ff a.b@example.org\n    Serial Number : 1650524012345\n"
    )
    said = redact(text, names)
    assert "HOST HOST user1000 malice /home/USER/x ADDRESS 127.0.0.1 580.159.04 1.2.3.4.5 MAC MAIL" in said
    assert "Serial Number : REMOVED" in said
    assert without_private({"label": "x", "items": [{"command": ""}], "n": 1}) == {
        "label": "REMOVED",
        "items": [{"command": ""}],
        "n": 1,
    }
    policy = {
        "quota": [{"users": ["alice"], "groups": [], "uids": [1]}],
        "device": [{"mps": {"users": "same"}}],
    }
    hidden = {"quota": [{"users": "REMOVED", "groups": [], "uids": [1]}], "device": policy["device"]}
    assert without_private(policy) == hidden, "the account of a directory service is in no list of names"


# --- policy diff and test


def test_a_comparison_of_two_policies_reports_added_removed_and_changed_keys() -> None:
    old = {"a": 1, "b": {"c": "x"}, "d": [{"e": 1}]}
    new = {"a": 1, "b": {"c": "y"}, "d": [{"e": 1}, {"e": 2}]}
    assert compare(old, new) == (Change("b.c", "x", "y"), Change("d[1].e", None, 2))
    assert compare(new, old) == (Change("b.c", "y", "x"), Change("d[1].e", 2, None))
    assert compare(old, old) == ()
    quota = {"device": [{"a": 1}], "quota": [{"b": 1}]}
    tables = compare(quota, {"device": [{"a": 2, "c": 1}], "quota": [{"b": 2}]})
    assert [change.key for change in tables] == ["device[0].a", "device[0].c", "quota[0].b"]


def test_a_policy_diff_shows_changed_keys(main: Ctl, daemon: Daemon, tmp_path: Path) -> None:
    from vgpud.policy.effective import effective
    from vgpud.policy.model import Policy

    daemon.replies["GetPolicy"] = pb.PolicyReply(json=json.dumps(effective(Policy())), digest="5e0a")
    same = tmp_path / "same.toml"
    same.write_text("version = 1\n")
    assert main("policy", "diff", str(same)).returncode == 0
    other = tmp_path / "other.toml"
    other.write_text('version = 1\n[planner]\nstrategy = "spread"\n')
    done = main("policy", "diff", str(other))
    assert done.returncode == 1
    assert re.search(r'^- +planner.strategy = "pack" +built-in$', done.stdout, re.MULTILINE)
    assert re.search(r'^\+ +planner.strategy = "spread" +.*other.toml:3$', done.stdout, re.MULTILINE)
    document = json.loads(main("policy", "diff", str(other), "-o", "json").stdout)
    assert document["changes"] == [{"key": "planner.strategy", "inForce": "pack", "onDisk": "spread"}]
    other.write_text('version = 1\n[[device]]\nmatch = { index = 0 }\nmode = "mig"\n')
    document = json.loads(main("policy", "diff", str(other), "-o", "json").stdout)
    assert [change["key"] for change in document["changes"]] == ["device[0].match.index", "device[0].mode"]


POLICY = """version = 1
[[quota]]
uids = [1000]
max_memory = "16GiB"
max_priority = "above-normal"
[[device]]
match = { index = 0 }
mode = "preload"
"""
CASES = """
[[case]]
name = "a quota goes to device 0"
request = { memory = "4GiB", uid = 7 }
expect = { mode = "preload", devices = [0] }
[[case]]
name = "beside its neighbour"
held = [{ memory = "100GiB", isolation = "quota", uid = 7 }]
request = { memory = "30GiB", isolation = "quota", uid = 7 }
expect = { devices = [0] }
[[case]]
name = "a user has a quota"
held = [{ memory = "10GiB" }]
request = { memory = "10GiB" }
expect = { refused = "OVER_QUOTA" }
[[case]]
name = "a user has no priority"
request = { memory = "4GiB", cores = 10, isolation = "quota", uid = 7, priority = "above-normal" }
expect = { refused = "DENIED_BY_POLICY" }
[[case]]
name = "a user whose quota gives priority"
request = { memory = "4GiB", cores = 10, isolation = "quota", priority = "above-normal" }
expect = { mode = "preload" }
[[case]]
name = "expects what is not so"
request = { memory = "4GiB", uid = 7 }
expect = { mode = "mig" }
"""


def test_policy_test_reports_which_cases_pass_and_which_fail(main: Ctl, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(POLICY)
    (tmp_path / "devices.json").write_text(main("devices", "-o", "json").stdout)
    cases = tmp_path / "cases.toml"
    cases.write_text('[node]\ndevices = "devices.json"\n' + CASES)
    done = main("policy", "test", str(cases), "--file", str(tmp_path / "policy.toml"))
    assert done.returncode == 1, done.stderr
    states = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert states == ["passed", "passed", "passed", "passed", "passed", "failed"]
    assert "5 of 6 cases passed" in done.stderr
    assert "mode preload on device 0; expected mode mig" in done.stdout
    assert "OVER_QUOTA: uid 1000 would hold 20GiB, and its quota is 16GiB" in done.stdout
    names = main("policy", "test", str(cases), "--file", str(tmp_path / "policy.toml"), "-o", "name")
    assert names.stdout.splitlines() == ["expects what is not so"]
    cases.write_text('[[case]]\nname = "x"\nrequest = { memroy = "4GiB" }\nexpect = {}\n')
    bad = main("policy", "test", str(cases), "--file", str(tmp_path / "policy.toml"))
    assert bad.returncode == 2
    assert "case[0].request.memroy: no such key: did you mean memory" in bad.stderr


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ('request = { memory = "4Gib" }\nexpect = {}', "case[0].request.memory: bad amount of memory '4Gib'"),
        ("request = { cores = 200.0 }\nexpect = {}", "case[0].request.cores: "),
        (
            'request = {}\nexpect = { refuse = "" }',
            "case[0].expect.refuse: no such key: did you mean refused",
        ),
        (
            'request = {}\nexpect = { refused = "OVERQUOTA" }',
            "case[0].expect.refused: no error is named OVERQUOTA, did you mean OVER_QUOTA",
        ),
        (
            'request = {}\nexpect = { refused = "DENIED" }',
            "case[0].expect.refused: no error is named DENIED, did you mean DENIED_BY_POLICY",
        ),
        (
            'request = {}\nexpect = { refused = "X" }',
            "case[0].expect.refused: no error is named X, docs/api.md lists them",
        ),
        ("request = {}", "case[0].expect: is missing"),
        ("request = {}\nexpect = {}", "case[0].expect: expects either refused, or mode, devices or both"),
        (
            'request = {}\nexpect = { mode = "mps", refused = "OVER_QUOTA" }',
            "case[0].expect: expects either refused, or mode, devices or both",
        ),
        (
            'request = {}\nexpect = { mode = "mps" }\nhold = []',
            "case[0].hold: no such key: did you mean held",
        ),
    ],
)
def test_policy_test_names_a_mistake_in_a_case(main: Ctl, tmp_path: Path, case: str, sentence: str) -> None:
    cases = tmp_path / "cases.toml"
    cases.write_text('[[case]]\nname = "x"\n' + case)
    done = main("policy", "test", str(cases))
    assert done.returncode == 2
    assert sentence in done.stderr


def test_policy_test_names_the_refused_tenant_of_a_case(main: Ctl, tmp_path: Path) -> None:
    """Without the name of the held tenant, the error would seem to be about the request of the case."""
    (tmp_path / "policy.toml").write_text(POLICY)
    cases = tmp_path / "cases.toml"
    cases.write_text(
        '[[case]]\nname = "x"\nheld = [{ memory = "1GiB" }, { memory = "9000GiB" }]\n'
        'request = { memory = "1GiB" }\nexpect = { mode = "preload" }\n'
    )
    done = main("policy", "test", str(cases), "--file", str(tmp_path / "policy.toml"))
    assert "IMPOSSIBLE: held[1]: no device can hold 8.8TiB" in done.stdout


# --- completions


def test_the_table_of_completions_has_every_verb() -> None:
    lines = {line.words for line in table()}
    for entry in VERBS:
        verbs = entry.verbs if isinstance(entry, Group) else ()
        assert {(entry.name, verb.name) for verb in verbs} <= lines if verbs else (entry.name,) in lines


def complete(script: Path, words: str, extra: str = "") -> list[str]:
    """The words that bash offers for the last of `words`."""
    program = f"""
vgpuctl() {{ echo a1b2c3d4; {extra} }}
source {script}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_vgpuctl
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        done = subprocess.run(
            (*COMMAND, "completion", shell), env=environment(), capture_output=True, check=True, cwd=ROOT
        )
        (folder / shell).write_bytes(done.stdout)
    return folder


def test_bash_completes_verbs_options_and_ids(scripts: Path) -> None:
    bash = scripts / "bash"
    assert {"top", "ps", "why", "policy", "mig"} <= set(complete(bash, "vgpuctl ''"))
    assert complete(bash, "vgpuctl pol") == ["policy"]
    assert complete(bash, "vgpuctl policy re") == ["reload"]
    assert complete(bash, "vgpuctl -o json policy re") == ["reload"]
    assert complete(bash, "vgpuctl alloc --isolation ha") == ["hardware"]
    assert complete(bash, "vgpuctl alloc --mem") == ["--memory"]
    assert complete(bash, "vgpuctl show ''") == ["a1b2c3d4"]
    assert complete(bash, "vgpuctl release a1b2c3d4 ''") == ["a1b2c3d4"]
    assert complete(bash, "vgpuctl ls -o y") == ["yaml"]
    assert complete(bash, "vgpuctl completion f") == ["fish"]
    assert complete(bash, "vgpuctl run -- py") == []


@pytest.mark.parametrize(
    "shell", ["bash", *(pytest.param(name, marks=needs(name)) for name in ("zsh", "fish"))]
)
def test_each_shell_accepts_its_completion_script(scripts: Path, shell: str) -> None:
    words = ["-n", str(scripts / shell)]
    done = subprocess.run([shell, *words], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


@needs("fish")
def test_fish_completes_verbs_and_options(scripts: Path) -> None:
    program = (
        f"source {scripts / 'fish'}; complete -C 'vgpuctl policy re'; complete -C 'vgpuctl alloc --isol'"
    )
    done = subprocess.run(["fish", "-c", program], capture_output=True, text=True, check=True, timeout=300)
    offered = [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert offered == ["reload", "--isolation"]
