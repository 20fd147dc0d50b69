"""The policy in force, and what changing it under a running node means, device by device."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping

from vgpud.ledger import Ledger
from vgpud.model.device import Node
from vgpud.model.errors import VgpuError
from vgpud.model.event import EventKind
from vgpud.model.tenancy import Mode
from vgpud.model.view import ReloadReport
from vgpud.node.account import Account
from vgpud.node.hub import Hub
from vgpud.planner.use import EMPTY, DeviceUse
from vgpud.policy.compare import compare
from vgpud.policy.effective import effective
from vgpud.policy.load import LoadedPolicy
from vgpud.policy.model import Policy


class Policies:
    """All or nothing: a reload that finds a mistake anywhere leaves what is in force as it is."""

    def __init__(
        self,
        first: LoadedPolicy,
        load: Callable[[], LoadedPolicy],
        report: Callable[[LoadedPolicy, LoadedPolicy], ReloadReport],
        account: Account,
    ) -> None:
        self.current = first
        self._load = load
        self._report = report
        self._account = account
        self._reloading = asyncio.Lock()
        # before: makes ready what may fail, or raises VgpuError; then keeps it (True) or undoes it
        self.preparing: list[Callable[[Policy], Awaitable[Callable[[bool], None]]]] = []
        # called with the old and the new one when another policy has come into force
        self.changed: list[Callable[[LoadedPolicy, LoadedPolicy], None]] = []

    async def reload(self, dry_run: bool, ledger: Ledger, hub: Hub) -> ReloadReport:
        """Raises VgpuError(BAD_POLICY). Of two that come at once the later one stays."""
        async with self._reloading:
            try:
                fresh = await asyncio.to_thread(self._load)
            except VgpuError as error:
                if not dry_run:
                    self._account.reload_failed(error)
                raise
            report = self._report(self.current, fresh)
            if dry_run:
                return report
            if report.changed:
                await self._prepare(fresh.policy)
                old, self.current = self.current, fresh
                for tell in self.changed:
                    tell(old, fresh)
                sentence = f"policy {fresh.digest[:8]} is in force"
                hub.publish(await ledger.event(EventKind.POLICY_RELOADED, fresh.digest, sentence))
            self._account.reloaded(report)
            return report

    async def _prepare(self, policy: Policy) -> None:
        """All are ready for the new policy, or all are as they were."""
        ready: list[Callable[[bool], None]] = []
        try:
            for prepare in self.preparing:
                ready.append(await prepare(policy))
        except VgpuError as error:
            for decide in ready:
                decide(False)
            self._account.reload_failed(error)
            raise
        for decide in ready:
            decide(True)


def reload_report(
    old: LoadedPolicy, new: LoadedPolicy, node: Node, use: Mapping[str, DeviceUse]
) -> ReloadReport:
    """A device in use keeps its mode until it is drained; everything else changes at once."""
    if old.digest == new.digest:
        return ReloadReport(changed=False, digest=old.digest)
    done: list[str] = []
    waiting: list[str] = []
    for device in node.devices:
        before, after = old.policy.rule_for(device), new.policy.rule_for(device)
        if before == after:
            continue
        held = use.get(device.uuid, EMPTY)
        change = f"device {device.index}: mode {before.mode} becomes {after.mode}"
        old_engine, new_engine = before.settings_preload().engine, after.settings_preload().engine
        if old_engine != new_engine and held.mode is Mode.PRELOAD:
            engines = f"device {device.index}: engine {old_engine} becomes {new_engine}"
            waiting.append(f"{engines} when its {held.count} allocations are gone")
        if before.mode == after.mode:
            done.append(f"device {device.index}: settings of mode {after.mode} changed")
        elif held.mode is not None and not after.allows(held.mode):
            waiting.append(f"{change} when its {held.count} allocations in mode {held.mode.value} are gone")
        else:
            done.append(change)
    done += _of_the_node(old.policy, new.policy)
    return ReloadReport(changed=True, digest=new.digest, done=tuple(done), waiting=tuple(waiting))


def _of_the_node(old: Policy, new: Policy) -> Iterator[str]:
    """Changes that are of no device: each counts from now on, and undoes nothing."""
    for key, before, after in compare(effective(old), effective(new)):
        if key in ("planner.strategy", "metrics.listen", "http.listen"):
            yield f"{key}: {before or 'off'} becomes {after or 'off'}"
    if old.quota != new.quota:
        yield f"quotas changed, {len(new.quota)} rules: what is held stays held"
