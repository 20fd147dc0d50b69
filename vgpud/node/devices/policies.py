"""Keeps the policy in force, and says what a reload changes on a running node, device by device."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from vgpud import audit
from vgpud.model.device import Device, Node
from vgpud.model.errors import VgpuError
from vgpud.model.event import EventKind
from vgpud.model.quantity import counted
from vgpud.model.tenancy import Mode
from vgpud.model.view import ReloadReport
from vgpud.node.devices.inventory import Inventory
from vgpud.node.store.allocations import AllocationStore
from vgpud.planner.misfits import misfits
from vgpud.planner.use import EMPTY, DeviceUse
from vgpud.policy.compare import compare
from vgpud.policy.load import LoadedPolicy, bad_policy
from vgpud.policy.model import DeviceRule, Policy


class Policies:
    """Holds the policy in force. If the new files have any mistake, a reload changes nothing."""

    def __init__(
        self,
        first: LoadedPolicy,
        load: Callable[[], LoadedPolicy],
        store: AllocationStore,
        inventory: Inventory,
    ) -> None:
        self.current = first
        self.load = load
        self._store = store
        self._account = store.account
        self._inventory = inventory
        self._reloading = asyncio.Lock()
        # Functions that are called before a reload. Each makes the preparations that may fail, or raises
        # VgpuError. It returns a function that is called with True to keep the preparations, or with False to
        # undo them.
        self.preparing: list[Callable[[Policy], Awaitable[Callable[[bool], None]]]] = []
        # Functions that are called with the old and the new policy after a change.
        self.changed: list[Callable[[LoadedPolicy, LoadedPolicy], None]] = []

    @property
    def policy(self) -> Policy:
        return self.current.policy

    async def reload(self, dry_run: bool) -> ReloadReport:
        """Reloads the policy files. If they have a mistake, raises VgpuError(BAD_POLICY); if a preparation
        fails, raises its error. In both cases the old policy stays in force. `dry_run`: changes nothing. If
        two reloads are concurrent, the later one counts.
        """
        if dry_run:
            return await self._reload(dry_run)
        with audit.change("reload policy") as told:
            try:
                report = await self._reload(dry_run)
            except VgpuError as error:
                told.words["details"] = error.details
                raise
            told.words |= {"digest": report.digest, "changed": report.changed}
            told.words |= {"applied": report.done, "waiting": report.waiting}
        return report

    async def _reload(self, dry_run: bool) -> ReloadReport:
        async with self._reloading:
            try:
                fresh = await asyncio.to_thread(self._load_fitting)
            except VgpuError:
                if not dry_run:
                    self._account.tally.reload_succeeded = False
                raise
            report = reload_report(self.current, fresh, self._inventory.node, self._store.book.use)
            if dry_run:
                return report
            if report.changed:
                await self._prepare(fresh.policy)
                old, self.current = self.current, fresh
                for tell in self.changed:
                    tell(old, fresh)
                sentence = f"policy {fresh.digest[:8]} is in force"
                await self._store.notice(EventKind.POLICY_RELOADED, fresh.digest, sentence)
            self._account.reloaded()
            return report

    def _load_fitting(self) -> LoadedPolicy:
        """Loads the policy files. Raises VgpuError(BAD_POLICY) also if they do not fit the node."""
        loaded = self.load()
        problems = tuple(misfits(loaded, self._inventory.node))
        if problems:
            raise bad_policy(problems)
        return loaded

    async def _prepare(self, policy: Policy) -> None:
        """Runs all preparations for the new policy. If one fails, undoes them and raises its error."""
        ready: list[Callable[[bool], None]] = []
        try:
            for prepare in self.preparing:
                ready.append(await prepare(policy))
        except VgpuError:
            for decide in ready:
                decide(False)
            self._account.tally.reload_succeeded = False
            raise
        for decide in ready:
            decide(True)


def reload_report(
    old: LoadedPolicy, new: LoadedPolicy, node: Node, use: Mapping[str, DeviceUse]
) -> ReloadReport:
    """What a reload changes now, and what is delayed: a device in use keeps a mode that the new policy does
    not allow, and its engine, until it is idle.
    """
    if old.digest == new.digest:
        return ReloadReport(changed=False, digest=old.digest)
    done: dict[str, list[Device]] = {}  # what changes now, and on which devices
    waiting: dict[str, list[Device]] = {}
    for device in node.devices:
        before, after = old.policy.rule_for(device), new.policy.rule_for(device)
        held = use.get(device.uuid, EMPTY)
        if before.mode != after.mode:
            change = f"mode {before.mode} becomes {after.mode}"
            waits = held.mode is not None and not after.allows(held.mode)
            if waits and held.mode is not None:
                change += f" when its {_held(held)} in mode {held.mode.value} {_gone(held)}"
            (waiting if waits else done).setdefault(change, []).append(device)
        for key, was, becomes in compare(_settings(before), _settings(after)):
            change = f"{key}: {_shown(was)} becomes {_shown(becomes)}"
            waits = key == "preload.engine" and held.mode is Mode.PRELOAD
            if waits:
                change += f" when its {_held(held)} {_gone(held)}"
            (waiting if waits else done).setdefault(change, []).append(device)
    said = (*_together(done), *_of_the_node(old.policy, new.policy))
    return ReloadReport(changed=True, digest=new.digest, done=said, waiting=tuple(_together(waiting)))


def _settings(rule: DeviceRule) -> dict[str, Any]:
    """The effective keys of a rule, without its match and mode."""
    preload = rule.settings_preload()
    settings = {
        "preload": preload.model_copy(update={"evictable": preload.makes_evictable}),
        "mps": rule.settings_mps(),
        "mig": rule.settings_mig(),
        "exclusive": rule.settings_exclusive(),
    }
    return {"on_sick": rule.on_sick, **{name: one.model_dump(mode="json") for name, one in settings.items()}}


def _together(changes: Mapping[str, list[Device]]) -> Iterator[str]:
    """One sentence for the devices that have a change in common."""
    for change, devices in changes.items():
        noun = "device" if len(devices) == 1 else "devices"
        yield f"{noun} {', '.join(str(device.index) for device in devices)}: {change}"


def _held(held: DeviceUse) -> str:
    return counted(held.count, "allocation")


def _gone(held: DeviceUse) -> str:
    return "is gone" if held.count == 1 else "are gone"


def _of_the_node(old: Policy, new: Policy) -> Iterator[str]:
    """Sentences on changes that concern no single device. Such changes apply to later requests and undo
    nothing.
    """
    for key, before, after in compare(_node_keys(old), _node_keys(new)):
        # vgpud-remote.service reads these settings at its start
        of_the_door = key.startswith("remote.") and not key.startswith("remote.server")
        when = " at the next restart of vgpud-remote.service" if of_the_door else ""
        yield f"{key}: {_shown(before)} becomes {_shown(after)}{when}"
    if old.quota != new.quota:
        yield f"quotas changed, {counted(len(new.quota), 'rule')}: what is held stays held"


def _node_keys(policy: Policy) -> dict[str, Any]:
    return policy.model_dump(mode="json", exclude={"device", "quota"})


def _shown(value: object) -> str:
    return "off" if value in (None, "") else value if isinstance(value, str) else json.dumps(value)
