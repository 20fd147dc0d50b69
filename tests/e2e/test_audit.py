"""The audit trail of a whole vgpud: each change leaves exactly one line, whichever interface it comes by."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.conditions import needs
from tests.demo.node import BUILD, DemoNode, Tenant
from tests.e2e.conftest import NodeMaker, node_maker
from tests.e2e.support import GIB, PROBE, allocate, client, eventually, quota, states
from tests.e2e.test_suspend import holding
from vgpud.api.doors import CHANGING
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.errors import VgpuError
from vgpud.serve.calls import SERVICE
from vgpud.serve.handlers import HANDLERS
from vgpud.serve.runtime_wire import Verb

POLICY = """version = 1
[pool]
host_memory_reserve = "1MiB"
[[device]]
match = { index = 6 }
mode = "mps"
[[device]]
mode = "auto"
"""


@dataclass
class Trail:
    """Reads the audit lines of a node as vgpud writes them."""

    node: DemoNode
    tenants: list[Tenant] = field(default_factory=list)
    container: str = ""  # allocation id of the container
    _read: int = 0

    def lines(self) -> list[dict[str, Any]]:
        """Returns the audit lines written since the last call."""
        text = self.node.log.read_text()
        new, self._read = text[self._read :], len(text)
        told = [json.loads(line) for line in new.splitlines() if line.startswith("{")]
        return [line for line in told if "audit" in line]

    def until(self, what: str, holds: Callable[[list[dict[str, Any]]], object]) -> list[dict[str, Any]]:
        """Waits until `holds(lines)` is true for the audit lines since the last call; returns them."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            found.extend(self.lines())
            return bool(holds(found))

        eventually(look, what)
        return found

    def uuid(self, index: int) -> str:
        with client(self.node) as calls:
            return str(calls.list_devices().devices[index].uuid)

    def call(self, name: str, **fields: Any) -> Any:
        with client(self.node) as calls:
            return calls._call(name, **fields)

    def tenant(self) -> str:
        tenant, held = holding(self.node)
        self.tenants.append(tenant)
        return held

    def hook(self, *words: str, told: object = None) -> str:
        """Calls vgpu-hook as an OCI runtime does."""
        done = subprocess.run(
            [BUILD / "bin" / "vgpu-hook", f"--run-dir={self.node.run_dir}", *words],
            input=json.dumps(told),
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        return done.stdout


@pytest.fixture(scope="module")
def trail(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trail]:
    with node_maker(tmp_path_factory.mktemp("audit")) as make:
        node = make(policy=POLICY)
        node.start()
        made = Trail(node)
        yield made
        for tenant in made.tenants:
            tenant.process.kill()
            tenant.process.communicate()


def paused(trail: Trail) -> str:
    held = trail.tenant()
    trail.call("Pause", allocation_id=held)
    return held


def suspended(trail: Trail) -> str:
    held = trail.tenant()
    trail.call("Suspend", allocation_id=held)
    return held


def mps_client(trail: Trail) -> int:
    options = ["--isolation", "compute", "--memory", "1GiB", "--cores", "20", "--device", "6"]
    tenant = trail.node.tenant(options, [PROBE, "hold", "64MiB", "--then-wait-on-stdin"])
    trail.tenants.append(tenant)
    tenant.line()
    return tenant.process.pid


def mig(layout: str) -> dict[str, Any]:
    return {"targets": [pb.MigTarget(selector=pb.Selector(indices=[7]), layout=layout.split())]}


@dataclass(frozen=True)
class Row:
    """A change to audit. `before` prepares it and returns what `change` takes; `name` is the expected value
    of the line's field `audit`.
    """

    name: str
    change: Callable[[Trail, Any], object]
    before: Callable[[Trail], Any] = lambda _: None


def fragmented(trail: Trail) -> str:
    """Starts a tenant and moves it to device 3, so that `defrag` can empty that device."""
    held = trail.tenant()
    trail.call("Move", allocation_id=held, to=[trail.uuid(3)])
    return held


BY_GRPC = {
    "Allocate": Row("allocate", lambda t, _: quota(t.node)),
    "Release": Row("release", lambda t, a: t.call("Release", allocation_id=a.id), lambda t: quota(t.node)),
    "Resize": Row(
        "resize",
        lambda t, a: t.call("Resize", allocation_id=a.id, memory_bytes=2 * GIB),
        lambda t: quota(t.node),
    ),
    "Pause": Row("pause", lambda t, a: t.call("Pause", allocation_id=a), Trail.tenant),
    "Unpause": Row("unpause", lambda t, a: t.call("Unpause", allocation_id=a), paused),
    "Suspend": Row("suspend", lambda t, a: t.call("Suspend", allocation_id=a), Trail.tenant),
    "Resume": Row("resume", lambda t, a: t.call("Resume", allocation_id=a), suspended),
    "Move": Row("move", lambda t, a: t.call("Move", allocation_id=a, to=[t.uuid(1)]), Trail.tenant),
    "Defrag": Row(
        "move",
        lambda t, _: t.call("Defrag", selector=pb.Selector(indices=[3])),
        fragmented,
    ),
    "ReloadPolicy": Row("reload policy", lambda t, _: t.call("ReloadPolicy")),
    "TerminateMpsClient": Row(
        "terminate MPS client",
        lambda t, pid: t.call("TerminateMpsClient", device_uuid=t.uuid(6), pid=pid),
        mps_client,
    ),
    "DrainDevice": Row("drain", lambda t, _: t.call("DrainDevice", device_uuid=t.uuid(5))),
    "ApplyMig": Row("MIG layout", lambda t, _: t.call("ApplyMig", **mig("1g.18gb"))),
}


def settled(trail: Trail, row: Row) -> list[dict[str, Any]]:
    """The audit lines of the change alone, without those of `before`."""
    made = row.before(trail)
    trail.lines()
    row.change(trail, made)
    return trail.lines()


def test_every_call_that_changes_state_is_in_the_audit_table() -> None:
    assert set(BY_GRPC) == CHANGING


#: Calls that need the driver's checkpoint.
CHECKPOINTED = {"Defrag", "Move", "Resume", "Suspend"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs("driver-580")) if name in CHECKPOINTED else name
        for name in sorted(BY_GRPC)
    ],
)
def test_a_change_by_grpc_leaves_one_audit_line(trail: Trail, name: str) -> None:
    row = BY_GRPC[name]
    lines = settled(trail, row)
    assert [(line["audit"], line["outcome"]) for line in lines] == [(row.name, "done")]
    (line,) = lines
    assert (line["door"], line["uid"], line["pid"]) == ("admin", os.geteuid(), os.getpid())
    assert "allocation" not in line or line["owner"] == os.geteuid()


@pytest.mark.parametrize("name", sorted(HANDLERS.keys() - CHANGING))
def test_a_call_that_is_not_in_the_audit_table_changes_nothing(trail: Trail, name: str) -> None:
    held = quota(trail.node)

    def standing() -> tuple[object, ...]:
        with client(trail.node) as calls:
            listed = calls.list_allocations()
            return listed.SerializeToString(deterministic=True), calls.list_mig().SerializeToString()

    trail.lines()
    before = standing()
    with suppress(VgpuError):
        fields = SERVICE.methods_by_name[name].input_type.fields_by_name
        trail.call(name, **({"allocation_id": held.id} if "allocation_id" in fields else {}))
    assert (standing(), trail.lines()) == (before, [])


def prepared(trail: Trail) -> str:
    """Allocates for a container, and returns the allocation's id.

    vgpud identifies a container by the process that starts it, which in this module is always the test's
    process. So the previous container is released first.
    """
    if trail.container in states(trail.node):
        # check=False, because vgpud may have released the container's allocation already
        trail.node.ctl("release", "--force", trail.container, check=False)
        eventually(lambda: trail.container not in states(trail.node), "the container before has ended")
    user = {"uid": os.geteuid(), "gid": os.getegid()}
    asked = {"vgpud.io/memory": "1GiB", "vgpud.io/device": "0"}
    config = {"annotations": asked, "process": {"user": user}}
    edited = json.loads(trail.hook("precreate", told=config))
    assert "vgpud.io/prepared" in edited["annotations"], edited
    trail.container = str(edited["annotations"]["vgpud.io/prepared"])
    return trail.container


def bound(trail: Trail, allocation: str) -> None:
    with subprocess.Popen(["sleep", "60"]) as init:
        try:
            trail.hook("bind", allocation, told={"pid": init.pid})
        finally:
            init.kill()
    eventually(lambda: allocation not in states(trail.node), "it did not end with its init")


BY_RUNTIME = {
    Verb.PREPARE: Row("allocate", lambda t, _: prepared(t)),
    Verb.BIND: Row("bind", bound, prepared),
    Verb.END: Row("end", lambda t, a: t.hook("end", a, told={}), prepared),
}


@pytest.mark.parametrize("verb", Verb)
def test_a_change_by_a_container_runtime_leaves_one_audit_line(trail: Trail, verb: Verb) -> None:
    lines = [line for line in settled(trail, BY_RUNTIME[verb]) if line["door"] == "runtime"]
    assert [(line["audit"], line["outcome"]) for line in lines] == [(BY_RUNTIME[verb].name, "done")]
    assert lines[0]["uid"] == lines[0]["owner"] == os.geteuid()
    assert lines[0].get("container") != lines[0]["allocation"]


def test_the_release_of_an_ended_container_leaves_one_audit_line_with_its_reason(trail: Trail) -> None:
    held = prepared(trail)
    trail.lines()
    trail.hook("end", held, told={})
    trail.hook("end", held, told={})

    def of_it(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The audit lines of the allocation that the test holds. The container of an earlier test may be
        released at the same time.
        """
        return [line for line in lines if line.get("allocation") == held]

    def released(lines: list[dict[str, Any]]) -> bool:
        return any(line["audit"] == "release" for line in of_it(lines))

    found = of_it(trail.until("it is released", released))
    assert [line["audit"] for line in found] == ["end", "release"]
    assert found[1]["reason"] == "its runtime says that its container is gone"
    assert (found[1]["door"], found[1]["allocation"]) == ("vgpud", held)


@needs("driver-580")
def test_a_repeated_request_leaves_no_second_audit_line(trail: Trail) -> None:
    """If each repetition left a line, a tenant that repeats a request in a loop could fill the journal."""
    held = suspended(trail)
    small = quota(trail.node, request_id="again")
    trail.lines()
    for _ in range(3):
        quota(trail.node, request_id="again")
        trail.call("Suspend", allocation_id=held)
        trail.call("Resize", allocation_id=small.id, memory_bytes=GIB)
        trail.call("Resume", allocation_id=small.id)
        trail.call("DrainDevice", device_uuid=trail.uuid(5))
    assert [line["audit"] for line in trail.lines() if line["audit"] != "drain"] == []


def reloads(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The fields `door` and `reason` of each reload. Lines about the container of an earlier test may lie
    between them.
    """
    return [(line["door"], line["reason"]) for line in lines if line["audit"] == "reload policy"]


def test_a_reload_by_signal_leaves_one_audit_line(trail: Trail) -> None:
    assert trail.node.daemon is not None
    trail.lines()
    trail.node.daemon.send_signal(signal.SIGHUP)
    found = trail.until("it was not reloaded", lambda lines: reloads(lines) != [])
    assert reloads(found) == [("vgpud", "SIGHUP")]


def test_the_next_start_ends_an_interrupted_change_with_an_audit_line(make_node: NodeMaker) -> None:
    node = make_node()
    node.start(fault_point="allocate.attach-0")
    with suppress(VgpuError):
        quota(node)
    assert node.daemon is not None
    node.daemon.wait(300)
    trail = Trail(node)
    trail.lines()
    node.start()
    (line,) = trail.lines()
    assert (line["audit"], line["door"], line["outcome"]) == ("undo", "vgpud", "done")
    assert line["allocation"] and line["reason"]


def test_mig_instances_that_vgpud_makes_by_itself_leave_audit_lines(make_node: NodeMaker) -> None:
    """A tenant blocks the layout. vgpud makes the MIG instances of the layout after the tenant has ended."""
    node = make_node()
    node.start()
    held = allocate(node, mig_profile="1g.18gb", selector=pb.Selector(indices=[0]))
    policy = node.folder / "etc" / "vgpud.toml"
    policy.write_text(
        'version = 1\n[[device]]\nmatch = { index = 0 }\nmode = "mig"\n[device.mig]\nlayout = ["7g.141gb"]\n'
        '[[device]]\nmode = "auto"\n'
    )
    trail = Trail(node)
    with client(node) as calls:
        calls.reload_policy()
        trail.lines()
        calls.release(held.id)
    found = trail.until(
        "the layout was not brought about", lambda f: any("7g.141gb" in line.get("step", "") for line in f)
    )
    made = [line for line in found if line["audit"] == "MIG layout"]
    assert {(line["door"], line["uid"]) for line in made} == {("vgpud", os.geteuid())}
    assert all(line["reason"] and line["device"] for line in made)
