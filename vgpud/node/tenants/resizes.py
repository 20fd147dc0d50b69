"""Resizes running tenants: records the new limits, then applies them, or restores the old ones."""

import asyncio
from contextlib import suppress
from dataclasses import replace

import structlog

from vgpud.model.errors import VgpuError
from vgpud.model.lifecycle import Change
from vgpud.model.log_event import LogEvent
from vgpud.model.quantity import Percent, show_bytes
from vgpud.model.tenancy import Allocation, State
from vgpud.node.tenants.checks import check_resizable
from vgpud.node.tenants.context import NodeContext
from vgpud.planner.quota import over_quota
from vgpud.planner.resize import resize_slices

log = structlog.get_logger(__name__)


class Resizes:
    def __init__(self, context: NodeContext) -> None:
        self._accounts = context.accounts
        self._book = context.book
        self._store = context.store
        self._inventory = context.inventory
        self._effectors = context.effectors
        self._changes = context.changes
        self._fault = context.fault
        self._kept = context.kept
        self._policy = context.policy

    async def resize(
        self, allocation: Allocation, memory_bytes: int | None, share: Percent | None
    ) -> Allocation:
        """Changes the limits of a tenant. Raises VgpuError; the old limits are then in force, or the next
        start finishes the resize.
        """
        account = await self._accounts.of(allocation.request.counts_for, self._policy())
        allocation = self._book.get(allocation.id)
        if allocation.id in self._changes:
            check_resizable(allocation)
            # a change that is not recorded yet: a pause, or the begin of a suspension
            await self._changes.settle(allocation.id)
            allocation = self._book.get(allocation.id)
        # an allocation whose last resize could not be recorded can be resized again
        if allocation.state is not State.RESIZING:
            check_resizable(allocation)
        slices = resize_slices(
            allocation, memory_bytes, share, self._inventory.node, self._book.use, self._policy()
        )
        if slices == allocation.slices and allocation.state is State.ACTIVE:
            return allocation
        owner, node = allocation.request.counts_for, self._inventory.node
        over = over_quota(self._policy(), node, owner, self._book, slices, allocation.id, account)
        if over is not None:
            raise over
        changed = replace(allocation, slices=slices, state=State.RESIZING)
        # memory that the tenant gives up stays booked until the resize is recorded
        both = zip(slices, allocation.slices, strict=True)
        held = tuple(replace(new, memory_bytes=max(new.memory_bytes, old.memory_bytes)) for new, old in both)
        booked = replace(changed, slices=held)
        self._store.reserve(booked, Change.RESIZE)
        work = self._carry_out(allocation, changed, booked)
        return await asyncio.shield(self._changes.begin(allocation.id, work))

    async def finish(self, changed: Allocation) -> None:
        """At the start of vgpud: applies the new limits that were recorded."""

        async def finish() -> None:
            await self._put_in_force(changed)
            await self._end(changed, f"resized to {_size(changed)}")

        await asyncio.shield(self._changes.begin(changed.id, finish()))

    async def _carry_out(self, before: Allocation, changed: Allocation, booked: Allocation) -> Allocation:
        await self._store.begin(changed, Change.RESIZE, booked)
        self._fault("resize.record-intent")
        try:
            await self._put_in_force(changed)
        except VgpuError as error:
            await self._keep_size(before, error)
            raise
        return await self._end(changed, f"resized from {_size(before)} to {_size(changed)}")

    async def _put_in_force(self, changed: Allocation) -> None:
        await self._kept.make_way(changed)
        await self._effectors[changed.slices[0].mode].resize(changed)
        self._fault("resize.apply")

    async def _keep_size(self, before: Allocation, why: VgpuError) -> None:
        # some of the new limits may be in force, so the old ones are applied to all slices again
        with suppress(VgpuError):
            await self._effectors[before.slices[0].mode].resize(before)
        try:
            await self._end(before, f"not resized, {why.sentence}")
        except VgpuError as error:
            log.error(LogEvent.FAILED_RESIZE_NOT_RECORDED, allocation=before.id, why=str(error))

    async def _end(self, outcome: Allocation, sentence: str) -> Allocation:
        return await self._store.commit(replace(outcome, state=State.ACTIVE), Change.RESIZED, sentence)


def _size(allocation: Allocation) -> str:
    """The limits of each slice, which are alike."""
    part = allocation.slices[0]
    return show_bytes(part.memory_bytes) + ("" if part.share is None else f" and {part.share}")
