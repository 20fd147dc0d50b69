"""Allocations that live as long as a container.

Until the container's init exists, the allocation is bound to the process that starts the container, so that
a failed or crashed runtime leaves no allocation behind. All methods raise VgpuError.
"""

from vgpud import audit
from vgpud.inject.specs import Specs
from vgpud.model.caller import Caller
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Allocation, Lifetime, Request, State
from vgpud.node.keeper import NodeKeeper
from vgpud.node.tenants.checks import check_owner


class Containers:
    def __init__(self, keeper: NodeKeeper) -> None:
        self._keeper = keeper
        self._context = keeper.context

    @property
    def specs(self) -> Specs:
        return self._context.specs

    async def start(self, request: Request) -> Allocation:
        """Makes an allocation for a container that the process of `request.lifetime` is about to start."""
        return await self._keeper.allocate(request)

    async def bind(self, allocation_id: str, caller: Caller, lifetime: Lifetime) -> None:
        """Binds the allocation durably to the container's init process, whose end then releases the
        allocation.
        """
        words = audit.of(self._context.book.get(allocation_id))
        with audit.change("bind", **words, init=lifetime.pid) as told:
            told.made = self._context.book.get(allocation_id).request.lifetime != lifetime
            await self._bind_checked(allocation_id, caller, lifetime)

    async def _bind_checked(self, allocation_id: str, caller: Caller, lifetime: Lifetime) -> None:
        starter = self._context.book.get(allocation_id).request.lifetime
        check_owner(self._context.book.get(allocation_id), caller)
        if lifetime.start_ticks < starter.start_ticks:
            raise VgpuError(
                ErrorCode.BAD_REQUEST,
                f"process {lifetime.pid} was there before process {starter.pid}, which starts the container",
                "bind the allocation to the init of its own container",
            )
        await self._keeper.changes.run(allocation_id, lambda: self._bind(allocation_id, lifetime))
        held = self._context.book.get(allocation_id)
        if held.request.lifetime != lifetime:
            raise VgpuError(
                ErrorCode.ALLOCATION_BUSY,
                f"allocation {allocation_id} is {held.state.value}, no container can be bound to it",
                "start the container again",
            )

    async def _bind(self, allocation_id: str, lifetime: Lifetime) -> None:
        if self._context.book.get(allocation_id).state is not State.ACTIVE:
            return
        await self._context.store.bind(allocation_id, lifetime)
        if self._context.preload is not None:
            await self._context.preload.walls.build(self._context.book.get(allocation_id))
        self._keeper.releases.lifetimes.forget(allocation_id)
        self._keeper.releases.lifetimes.watch(allocation_id, lifetime)

    def end(self, allocation_id: str, caller: Caller) -> None:
        """Called when the runtime reports the container's end: releases the allocation after its last process
        has ended.
        """
        if allocation_id not in self._context.book:
            return
        with audit.change("end", **audit.of(self._context.book.get(allocation_id))) as told:
            check_owner(self._context.book.get(allocation_id), caller)
            told.made = self._keeper.releases.later(
                allocation_id, "its runtime says that its container is gone"
            )
