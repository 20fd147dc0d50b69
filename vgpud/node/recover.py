"""Reconciles the ledger with the node at the daemon's start.

planner.reconcile, which is pure, decides what to do. If a crash interrupts the start, the next start
observes the node again and reconciles anew.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from vgpud import audit
from vgpud.lease import list_leases, remove_graves, remove_lease
from vgpud.ledger import LedgerState
from vgpud.model.errors import VgpuError
from vgpud.model.lifecycle import Phase, phase_of
from vgpud.model.log_event import LogEvent
from vgpud.model.tenancy import Allocation, Edits, Mode
from vgpud.modes.mps import unit_name
from vgpud.node.keeper import NodeKeeper
from vgpud.node.tenants.context import NodeContext
from vgpud.node.tenants.lifetimes import is_alive
from vgpud.planner.reconcile import Action, ActionKind, InstancePlace, Observed, reconcile
from vgpud.planner.steps import repair_steps
from vgpud.planner.use import charged
from vgpud.units import Units

log = structlog.get_logger(__name__)

# how long a start waits for interrupted changes; systemd waits for 5 minutes (vgpud.service)
_FINISH_SECONDS = 20.0
_CHANGING = (Phase.RESIZING, Phase.SUSPENDING, Phase.RESUMING, Phase.MOVING)


@dataclass(frozen=True)
class Start:
    """What a start needs besides the keeper."""

    units: Units
    run_dir: Path
    boot_id: str


async def recover(keeper: NodeKeeper, state: LedgerState, start: Start) -> None:
    """Makes book, ledger and node agree, wherever a crash has interrupted an earlier daemon.

    Raises VgpuError, for example if the ledger cannot be written. A failed action or change of one allocation
    is logged, and the others are still recovered.
    """
    context = keeper.context
    context.store.restore(state)
    keeper.bypasses.restore(state.marks)
    keeper.releases.remember(state.released)
    await agree(keeper, start, bool(state.boot_id) and state.boot_id != start.boot_id)
    # The boot id is recorded after the actions, so that the next start notices the reboot if this start
    # is interrupted before it has recorded the id.
    await context.store.set_boot_id(start.boot_id)
    interrupted = [allocation for allocation in context.book if phase_of(allocation) in _CHANGING]
    await _within_a_time(keeper, asyncio.gather(*(_finish_change(keeper, one) for one in interrupted)))
    for allocation in tuple(context.book):
        if allocation.id not in context.changes:
            await keeper.pauses.restore(allocation.id)
        keeper.releases.lifetimes.watch(allocation.id, allocation.request.lifetime)


async def _within_a_time(keeper: NodeKeeper, work: "asyncio.Future[Any]") -> None:
    """Waits for `work` for a bounded time. It then goes on in the background, because a tenant determines how
    long its memory takes to move.
    """
    await asyncio.wait((work,), timeout=_FINISH_SECONDS)
    if work.done():
        work.result()
        return

    async def wait() -> None:
        await work

    keeper.spawn(wait())


async def _finish_change(keeper: NodeKeeper, allocation: Allocation) -> None:
    """Finishes or undoes an interrupted resize, suspension, resumption or move."""
    # If the change cannot be finished or undone, its audit line says so. The owner can repeat the change, or
    # release the allocation.
    with (
        suppress(VgpuError),
        audit.because("vgpud was interrupted"),
        audit.change("recover", **audit.of(allocation)),
    ):
        phase = phase_of(allocation)
        if phase is Phase.MOVING:
            await keeper.moves.recover(allocation)
        elif phase is Phase.RESIZING:
            await keeper.resizes.finish(allocation)
        else:
            await keeper.suspends.recover(allocation)
    await keeper.pauses.restore(allocation.id)


async def agree(keeper: NodeKeeper, start: Start, boot_changed: bool) -> None:
    """Observes the node, decides what to do, and acts once. It is also called when NVML lists devices after
    it had listed none.

    It skips allocations that are being made, changed or released.
    """
    context = keeper.context
    # The units are listed in a thread, because systemd can be slow and the daemon may serve already.
    units = await asyncio.to_thread(start.units.list, unit_name(""))
    for folder in ("leases", "mps/t"):
        await remove_graves(start.run_dir / folder)
    # The specs are listed before `busy` is read, so that the spec of an allocation that is made meanwhile
    # does not count as an orphan.
    specs = await _specs(context)
    busy = keeper.busy()
    # `meant` has the allocations that should exist. Those that are being changed are left out.
    meant = [allocation for allocation in context.book if allocation.id not in busy]
    own_instances = frozenset() if keeper.mig is None else keeper.mig.own_instances()
    daemons = frozenset(unit.name for unit in units)
    specs = frozenset(a.id for a in meant) if specs is None else specs - busy
    observed = observe(context, start, meant, busy, boot_changed, daemons, own_instances, specs)
    actions = reconcile(meant, observed)
    if not boot_changed:
        await _resume_engines(context, observed.leases)
    await _assume_modes(context, [a for a in context.book if a.id not in busy], daemons)
    for action in actions:
        with suppress(VgpuError):  # the audit line of the action says that it failed
            await carry_out(keeper, start, action)
    if keeper.mig is not None:
        for name in await keeper.mig.stale():
            if name not in busy:
                # the audit line of the repair says that it failed
                with suppress(VgpuError), audit.because("the driver's device nodes have changed"):
                    await repair(keeper, name)
        await keeper.mig.converge()


async def carry_out(keeper: NodeKeeper, start: Start, action: Action) -> None:
    """Carries out one action of a start and writes its line in the audit trail. Raises VgpuError."""
    with audit.because(action.reason):
        if action.kind in (ActionKind.RELEASE, ActionKind.MARK_FAILED, ActionKind.REPAIR):
            # for a release, a failure mark or a repair, the function that carries it out writes the audit
            # line
            await _act(keeper, start, action)
            return
        book = keeper.book
        held = book.get(action.subject) if action.subject in book else None
        what: dict[str, object] = {"subject": action.subject} if held is None else audit.of(held)
        with audit.change(action.kind.value, **what):
            await _act(keeper, start, action)


async def _resume_engines(context: NodeContext, leases: frozenset[str]) -> None:
    """Keeps the engines in force at the start. If the driver lost the engine cut on a device, the leases of
    its tenants are added to the arbiter again.
    """
    users: dict[str, set[str]] = {}
    for allocation in (a for a in context.book if a.id in leases):
        for part in allocation.slices:
            if part.mode is Mode.PRELOAD and part.mig is None:
                users.setdefault(part.device_uuid, set()).add(allocation.id)
    try:
        lost = await context.engines.resume(users)
        if lost and context.preload is not None:
            await context.preload.serve_anew(sorted({name for uuid in lost for name in users[uuid]}))
    except VgpuError as error:
        log.error(LogEvent.COMPUTE_ENGINES_NOT_RESTORED, why=str(error))


def observe(
    context: NodeContext,
    start: Start,
    allocations: Iterable[Allocation],
    busy: frozenset[str],
    boot_changed: bool,
    daemons: frozenset[str],
    own_instances: frozenset[InstancePlace],
    specs: frozenset[str],
) -> Observed:
    """Makes the observation for `reconcile`. Leases and control groups of allocations in `busy` are left out.

    `daemons` are the names of the units of MPS that run.
    """
    node = context.inventory.node
    return Observed(
        node=node,
        leases=list_leases(start.run_dir / "leases") - busy,
        specs=specs,
        walls=_walls(context) - busy,
        mps_daemons=frozenset(name.removeprefix(unit_name("")) for name in daemons),
        dead_lifetimes=frozenset(
            a.id for a in allocations if a.request.lifetime.pid and not is_alive(a.request.lifetime)
        ),
        boot_changed=boot_changed,
        own_instances=own_instances,
    )


async def _specs(context: NodeContext) -> frozenset[str] | None:
    """The ids of the allocations that have a spec; None if the folder cannot be listed, for example because a
    user delays the listing. The watch of the specs (cdi_watch.py) then removes orphans and writes what is
    missing.
    """
    try:
        return await context.specs.list()
    except VgpuError as error:
        log.error(LogEvent.CDI_SPECS_NOT_LISTED, folder=str(context.specs.folder), why=str(error))
        return None


def _walls(context: NodeContext) -> frozenset[str]:
    return frozenset() if context.preload is None else context.preload.walls.own_groups()


async def _assume_modes(
    context: NodeContext, allocations: Iterable[Allocation], daemons: frozenset[str]
) -> None:
    """Records the modes in which devices still are, so that they are not applied again. Lets each mode
    continue with its slices (Effector.resume).
    """
    seen: set[tuple[str, Mode]] = set()
    for part in (part for allocation in allocations for part in charged(allocation)):
        device = context.inventory.node.device(part.device_uuid)
        if device is None or (part.target, part.mode) in seen:
            continue
        seen.add((part.target, part.mode))
        stands = {
            Mode.PRELOAD: True,
            Mode.EXCLUSIVE: True,
            Mode.MIG: device.mig.current,
            Mode.MPS: unit_name(part.target) in daemons,
        }
        if stands.get(part.device_mode, False):
            context.transitions.assume(part.device_uuid, part.device_mode)
        if stands.get(part.mode, False):
            await context.effectors[part.mode].resume(device, part)


async def _act(keeper: NodeKeeper, start: Start, action: Action) -> None:
    context = keeper.context
    match action.kind:
        case ActionKind.UNDO | ActionKind.FINISH:
            await _finish_release(keeper, action)
        case ActionKind.RELEASE:
            keeper.releases.later(
                action.subject, "the process that it is bound to ended while vgpud was away"
            )
        case ActionKind.REMOVE_SPEC:
            await context.specs.remove(action.subject)
        case ActionKind.REMOVE_LEASE:
            await remove_lease(start.run_dir / "leases", action.subject)
        case ActionKind.REMOVE_WALL:
            if context.preload is not None:
                await context.preload.walls.remove(action.subject)
        case ActionKind.STOP_MPS:
            if not any(part.target == action.subject for a in context.book for part in a.slices):
                # `unapply` also restores the settings of the device that MPS had changed
                await context.effectors[Mode.MPS].unapply(action.subject)
        case ActionKind.REMOVE_INSTANCE:
            if keeper.mig is not None and action.instance is not None:
                await keeper.mig.remove(action.instance)
        case ActionKind.MARK_FAILED:
            await keeper.failures.mark(action.subject, action.reason)
        case ActionKind.REPAIR:
            await repair(keeper, action.subject)


async def _finish_release(keeper: NodeKeeper, action: Action) -> None:
    """Releases an allocation that no caller waits for. Raises VgpuError, and then tries again later."""
    try:
        await keeper.releases.dismantle(action.subject)
    except VgpuError:
        keeper.releases.later(action.subject, action.reason)
        raise


async def repair(keeper: NodeKeeper, allocation_id: str) -> None:
    """Repairs an allocation and gives it new edits, because its edits must not contain device nodes of
    earlier instances.
    """
    context = keeper.context
    allocation = replace(context.book.get(allocation_id), edits=Edits())
    context.store.amend(allocation)
    with audit.change("repair", **audit.of(allocation)):
        steps = repair_steps(allocation)
        run = context.executor.run
        await keeper.changes.run(allocation_id, lambda: run("repair", context.book.get(allocation_id), steps))
