"""`vgpuctl policy explain`: what the policy in force means for each device and for a user."""

import os
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl import words
from vgpud.ctl.connect import connect
from vgpud.ctl.devices import device_uuid
from vgpud.ctl.policy_cases import node_of
from vgpud.ctl.table import Column, Table
from vgpud.ctl.terminal import Terminal, View
from vgpud.directory import account_of
from vgpud.model.device import Device
from vgpud.model.errors import ErrorCode, Exit
from vgpud.model.tenancy import ANYONE, Owner
from vgpud.planner.quota import is_undecided
from vgpud.policy.effective import as_toml, leaves
from vgpud.policy.locate import spell
from vgpud.policy.model import TABLES, DeviceRule, Policy

_COLUMNS = (Column("KEY"), Column("VALUE"), Column("ORIGIN"), Column("MEANING"))
_MEANING = {
    "auto": "each request chooses: MIG, MPS, preload or the whole card",
    "mig": "MIG instances",
    "mps": "shares of one MPS daemon",
    "preload": "quotas by libvgpu",
    "exclusive": "whole cards only",
    "unmanaged": "vgpud does not use it",
}
BUILT_IN = "built-in"


def explain(arguments: Namespace, terminal: Terminal) -> int:
    with connect(arguments) as client:
        reply = client.get_policy()
        listed = client.list_devices().devices
        only = device_uuid(listed, arguments.device) if arguments.device else ""
    policy = Policy.model_validate_json(reply.json)
    devices = [device for device in node_of(listed).devices if only in ("", device.uuid)]
    owner = Owner(os.getuid(), os.getgid())
    if arguments.user is not None:
        owner = Owner(arguments.user, ANYONE)  # the groups are those of the account
    tables = []
    items = []
    for title, rows in (*_of_devices(policy, devices, reply), _of_user(policy, owner, reply.origins)):
        tables.append(Table((Column(""),), [(title,)]))
        if rows:
            tables.append(Table(_COLUMNS, rows))
        keys = ("key", "value", "origin", "meaning")
        items.append({"about": title, "keys": [dict(zip(keys, row, strict=True)) for row in rows]})
    names = [str(item["about"]) for item in items]
    terminal.show(View("PolicyExplanation", {"digest": reply.digest, "items": items}, names, tables))
    return Exit.OK.value


_Rows = list[tuple[str, str, str, str]]


def _of_devices(
    policy: Policy, devices: Iterable[Device], reply: pb.PolicyReply
) -> Iterator[tuple[str, _Rows]]:
    """Lists the devices of each rule of the policy together."""
    alike: dict[int, list[Device]] = {}
    for device in devices:
        rule = policy.rule_for(device)
        found = next((at for at, one in enumerate(policy.device) if one is rule), -1)
        alike.setdefault(found, []).append(device)
    for number, members in alike.items():
        indices = ", ".join(str(device.index) for device in members)
        plural = "devices" if len(members) > 1 else "device"
        them = "them" if len(members) > 1 else "it"
        which = f"device[{number}]" if number >= 0 else f"no rule covers {them}"
        rule = policy.device[number] if number >= 0 else DeviceRule()
        rows = list(_of_rule(rule, f"device[{number}]", reply.origins))
        yield f"{plural} {indices} ({members[0].name}): {which}", rows


def _of_rule(rule: DeviceRule, path: str, origins: Mapping[str, str]) -> Iterator[tuple[str, str, str, str]]:
    """Yields the mode of a rule, and the settings that a policy file gives for it. `policy show` also has the
    built-in settings.
    """
    origin = origins.get(f"{path}.mode", BUILT_IN)
    yield "mode", as_toml(rule.mode), origin, _MEANING[rule.mode]
    given = rule.model_dump(mode="json", exclude_none=True, exclude={"match", "mode"})
    for keys, value in leaves(given):
        key = spell(keys)
        where = origins.get(f"{path}.{key}", BUILT_IN)
        if where != BUILT_IN:
            table = ".".join(("device", *map(str, keys[:-1])))
            yield key, as_toml(value), where, _description(table, str(keys[-1]))


def _of_user(policy: Policy, owner: Owner, origins: Mapping[str, str]) -> tuple[str, _Rows]:
    name = f"user {words.user(owner.uid)}"
    account = account_of(owner.uid)
    if is_undecided(policy, owner, account):
        return f"{name}: refused, no account for the quotas (E{ErrorCode.ACCOUNT_UNKNOWN.number})", []
    rule = policy.quota_of(owner.uid, owner.gid, account)
    if rule is None:
        percent = policy.planner.user_places_percent
        origin = origins.get("planner.user_places_percent", BUILT_IN)
        row = (
            "planner.user_places_percent",
            str(percent),
            origin,
            _description("planner", "user_places_percent"),
        )
        rank = ("quota.max_priority", as_toml("normal"), BUILT_IN, _description("quota", "max_priority"))
        return f"{name}: no quota", [row, rank] if owner.uid else []
    number = policy.quota.index(rule)
    given = rule.model_dump(mode="json", exclude_none=True)
    rows = [
        (key, as_toml(value), origins.get(f"quota[{number}].{key}", BUILT_IN), _description("quota", key))
        for key, value in given.items()
        if key.startswith("max_")
    ]
    return f"{name}: quota[{number}]", rows


def _description(table: str, key: str) -> str:
    field = TABLES[table].model_fields.get(key)
    return (field.description or "") if field is not None else ""
