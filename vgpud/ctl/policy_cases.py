"""`vgpuctl policy test`: evaluates cases (requests with expected answers) under a policy; changes nothing.

[node]
devices = "devices.json"      # of 'vgpuctl devices -o json'; left out: those of the running daemon

[[case]]
name = "a small quota packs beside its neighbour"
held = [{ memory = "8GiB", isolation = "quota" }]
request = { memory = "4GiB", isolation = "quota" }
expect = { mode = "preload", devices = [0] }

[[case]]
name = "students get no more than 16GiB"
request = { memory = "20GiB", uid = 1000 }
expect = { refused = "OVER_QUOTA" }
"""

import json
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl.connect import connect
from vgpud.ctl.files import read_text, read_toml
from vgpud.ctl.policy_files import on_disk, one_file
from vgpud.ctl.table import Column, Table
from vgpud.ctl.terminal import Terminal, View
from vgpud.directory import account_of
from vgpud.model.caller import BARE
from vgpud.model.device import ComputeMode, Device, GpuInstance, Health, Mig, MigProfile, Node, Placement
from vgpud.model.errors import ErrorCode, Exit, VgpuError
from vgpud.model.quantity import Percent, parse_bytes
from vgpud.model.tenancy import Allocation, Decision, Isolation, Owner, Request, Selector, State
from vgpud.planner.choose import choose
from vgpud.planner.quota import over_quota
from vgpud.planner.use import use_of
from vgpud.policy.accounts import needs_accounts
from vgpud.policy.locate import spell
from vgpud.policy.model import Policy

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

T = TypeVar("T")

STATE_STYLES = {"passed": "green", "failed": "red"}


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def _sentenced(parse: Callable[[T], object], value: T | None) -> T | None:
    """Runs `parse` on the value. Turns its VgpuError into a ValueError with the same sentence, for
    pydantic.
    """
    try:
        if value is not None:
            parse(value)
    except VgpuError as error:
        raise ValueError(error.sentence) from None
    return value


class Asked(_Table):
    memory: str | None = None
    cores: float | None = None
    count: int = 1
    isolation: Literal["hardware", "compute", "quota", "device"] | None = None
    profile: str = ""
    device: int | None = None
    priority: Literal["", "above-normal", "normal", "below-normal"] = ""
    uid: int = Field(default=1000, ge=0, lt=2**32 - 1)
    gid: int = Field(default=1000, ge=0, lt=2**32 - 1)

    @field_validator("memory")
    @classmethod
    def _is_an_amount(cls, text: str | None) -> str | None:
        return _sentenced(parse_bytes, text)

    @field_validator("cores")
    @classmethod
    def _is_a_share(cls, percent: float | None) -> float | None:
        return _sentenced(Percent.from_float, percent)

    def request(self, name: str) -> Request:
        return Request(
            id=name,
            owner=Owner(self.uid, self.gid),
            memory_bytes=None if self.memory is None else parse_bytes(self.memory),
            share=None if self.cores is None else Percent.from_float(self.cores),
            count=self.count,
            isolation=None if self.isolation is None else Isolation(self.isolation),
            mig_profile=self.profile,
            selector=Selector(indices=() if self.device is None else (self.device,)),
            priority=self.priority,
        )


class Expected(_Table):
    mode: Literal["mig", "mps", "preload", "exclusive"] | None = None
    devices: list[int] | None = None
    refused: str | None = None

    @field_validator("refused")
    @classmethod
    def _is_an_error(cls, name: str | None) -> str | None:
        if name is not None and name not in ErrorCode.__members__:
            near = get_close_matches(name.upper(), ErrorCode.__members__, n=1, cutoff=0.5)
            meant = (
                f"did you mean {near[0]}" if near else "docs/api.md lists them, as in NO_CAPACITY, OVER_QUOTA"
            )
            raise ValueError(f"no error is named {name}, {meant}")
        return name

    @model_validator(mode="after")
    def _is_one_answer(self) -> Self:
        if (self.refused is None) == (self.mode is None and self.devices is None):
            raise ValueError("expects either refused, or mode, devices or both")
        return self


class Case(_Table):
    name: str
    request: Asked
    expect: Expected
    held: list[Asked] = Field(default_factory=list)


class NodeTable(_Table):
    devices: str | None = None


class Cases(_Table):
    case: list[Case] = Field(min_length=1)
    node: NodeTable = Field(default_factory=NodeTable)


def test(arguments: Namespace, terminal: Terminal) -> int:
    """Runs the cases of a file under a policy. The exit code is Exit.DIFFERS if a case fails. Nothing is
    allocated, and the daemon's allocations are ignored.
    """
    path = Path(arguments.cases)
    cases = read(path)
    node = _node(path, cases, arguments)
    policy = _policy(arguments, terminal)
    rows = []
    for case in cases.case:
        got = answer(policy, node, case)
        passed = fits(case.expect, got, node)
        answered = said(got, node) if passed else f"{said(got, node)}; expected {expected(case.expect)}"
        rows.append(("passed" if passed else "failed", case.name, answered))
    document = {"items": [{"state": row[0], "name": row[1], "answer": row[2]} for row in rows]}
    columns = (Column("STATE", styles=STATE_STYLES), Column("CASE"), Column("ANSWER"))
    failed = [row[1] for row in rows if row[0] == "failed"]
    terminal.show(View("PolicyTest", document, failed, [Table(columns, rows)]))
    terminal.say(f"{len(rows) - len(failed)} of {len(rows)} cases passed")
    return Exit.DIFFERS.value if failed else Exit.OK.value


def read(path: Path) -> Cases:
    """Reads the file of cases. Raises VgpuError(BAD_REQUEST), which names the case and the key."""
    given = read_toml(path, "name a TOML file, as in docs/policy.md")
    try:
        return Cases.model_validate(given)
    except ValidationError as error:
        details = tuple(f"{spell(one['loc'])}: {_mistake(one)}" for one in error.errors())
        raise VgpuError(
            ErrorCode.BAD_REQUEST, f"{path}: {details[0]}", "see 'vgpuctl policy test --help'", details
        ) from None


def _mistake(found: "ErrorDetails") -> str:
    if found["type"] == "missing":
        return "is missing"
    if found["type"] != "extra_forbidden":
        text = found["msg"].removeprefix("Value error, ")
        return text[:1].lower() + text[1:]
    known = _table_of(found["loc"]).model_fields
    near = get_close_matches(str(found["loc"][-1]), known, n=1)
    return f"no such key: {f'did you mean {near[0]}' if near else ', '.join(known)}"


def _table_of(path: Sequence[int | str]) -> type[_Table]:
    """The pydantic class that has the key at the end of a path such as case[0].expect.mode."""
    if len(path) == 1:
        return Cases
    if path[0] == "node":
        return NodeTable
    if len(path) == 3:
        return Case
    return Expected if path[2] == "expect" else Asked


def answer(policy: Policy, node: Node, case: Case) -> Decision:
    """Returns the policy's decision on the request of a case, after the requests in `held` were granted in
    order. If a request in `held` is refused, returns that refusal.
    """
    held: list[Allocation] = []
    for number, before in enumerate(case.held):
        request = before.request(f"held{number}")
        decision = _decide(policy, node, request, held)
        if (refusal := decision.refusal) is not None:
            return decision.refused(replace(refusal, sentence=f"held[{number}]: {refusal.sentence}"))
        held.append(Allocation(request.id, request, State.ACTIVE, decision.slices))
    return _decide(policy, node, case.request.request("case"), held)


def _decide(policy: Policy, node: Node, request: Request, held: Sequence[Allocation]) -> Decision:
    decision = choose(request, node, policy, use_of(held))
    if decision.refusal is None:
        owner = request.counts_for
        account = account_of(owner.uid) if needs_accounts(policy) else BARE
        account = account if account.is_known else BARE  # the user of a case need not exist on this host
        over = over_quota(
            policy, node, owner, held, decision.slices, account=account, priority=request.priority
        )
        if over is not None:
            return decision.refused(over)
    return decision


def fits(expected: Expected, got: Decision, node: Node) -> bool:
    if got.refusal is not None or expected.refused is not None:
        return got.refusal is not None and got.refusal.code.name == expected.refused
    modes = {part.mode.value for part in got.slices}
    return (expected.mode is None or modes == {expected.mode}) and (
        expected.devices is None or sorted(_indices(got, node)) == sorted(expected.devices)
    )


def expected(asked: Expected) -> str:
    """What a case expects, as text, for example "mode mig on device 0, 1"."""
    if asked.refused is not None:
        return asked.refused
    mode = f"mode {asked.mode}" if asked.mode else "any mode"
    return f"{mode} on device {', '.join(map(str, sorted(asked.devices)))}" if asked.devices else mode


def said(got: Decision, node: Node) -> str:
    if got.refusal is not None:
        return f"{got.refusal.code.name}: {got.refusal.sentence}"
    modes = ", ".join(dict.fromkeys(part.mode.value for part in got.slices))
    numbers = ", ".join(str(index) for index in _indices(got, node))
    return f"mode {modes} on device {numbers}"


def _indices(got: Decision, node: Node) -> list[int]:
    known = {device.uuid: device.index for device in node.devices}
    return [known[part.device_uuid] for part in got.slices]


def _policy(arguments: Namespace, terminal: Terminal) -> Policy:
    """The policy of the given file, or the merged policy of this host."""
    return (one_file(arguments.file, terminal) if arguments.file else on_disk()).policy


def _node(path: Path, cases: Cases, arguments: Namespace) -> Node:
    if cases.node.devices is None:
        with connect(arguments) as client:
            return node_of(client.list_devices().devices)
    from google.protobuf.json_format import ParseDict, ParseError

    file = path.parent / cases.node.devices
    text = read_text(file, "make it with 'vgpuctl devices -o json'")
    try:
        items: list[dict[str, Any]] = json.loads(text)["items"]
        found = [
            ParseDict(
                {"memoryTotalBytes": item["memoryTotalBytes"], **item},
                pb.Device(),
                ignore_unknown_fields=True,
            )
            for item in items
        ]
    except (ValueError, KeyError, TypeError, ParseError, RecursionError) as error:
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            f"{file} is not a list of devices: {error}",
            "make it with 'vgpuctl devices -o json'",
        ) from None
    return node_of(found)


def node_of(devices: Iterable[pb.Device]) -> Node:
    return Node(devices=tuple(device_of(item) for item in devices))


def device_of(item: pb.Device) -> Device:
    """Makes an idle and healthy device with the message's hardware properties, so that a case tests the
    policy and not the current state.
    """
    major, _, minor = item.compute_capability.partition(".")
    return Device(
        uuid=item.uuid,
        index=item.index,
        name=item.name,
        pci_bus_id=item.pci_bus_id,
        memory_total_bytes=item.memory_total_bytes,
        memory_reserved_bytes=item.memory_reserved_bytes,
        sm_count=item.sm_count if item.HasField("sm_count") else None,
        compute_capability=(int(major), int(minor)) if major and minor else None,
        mig=_mig(item.mig),
        compute_mode=ComputeMode.DEFAULT,
        mps_capable=item.mps_capable,
        numa_node=item.numa_node if item.HasField("numa_node") else None,
        health=Health.OK,
    )


def _mig(item: pb.Mig) -> Mig:
    instances: tuple[GpuInstance, ...] = ()
    return Mig(item.capable, False, False, tuple(_profile(profile) for profile in item.profiles), instances)


def _profile(item: pb.MigProfile) -> MigProfile:
    return MigProfile(
        item.id,
        item.name,
        item.slice_count,
        item.instance_count,
        item.sm_count,
        item.memory_bytes,
        tuple(Placement(place.start, place.size) for place in item.placements),
        tuple(_profile(part) for part in item.compute),
    )
