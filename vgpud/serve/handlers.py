"""Handles the calls of vgpud.proto. Each call has one function: (keeper, caller, request) -> reply.

The caller is the peer as the kernel identified it. Each function raises VgpuError.
"""

import asyncio
import json
import secrets
import socket
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from vgpud import __version__
from vgpud.api import decode, encode
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.caller import Caller
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.event import Event
from vgpud.model.tenancy import Allocation, Lifetime, Request
from vgpud.node.devices.mig_layouts import MigLayouts
from vgpud.node.keeper import NodeKeeper
from vgpud.policy.effective import effective
from vgpud.serve.permissions import check_owner_override, may_see_edits

_LISTED_AT_ONCE = 100
_EVENTS_AT_ONCE = 64
_MOST_EVENTS = 1_000
_PROCESSES_SECONDS = 0.1  # maximum age of a listing of processes
_USUAL_EVENTS = 100


async def get_node(keeper: NodeKeeper, caller: Caller, asked: pb.GetNodeRequest) -> pb.NodeReply:
    await keeper.listings.look()
    return encode.node(keeper.listings.describe(), socket.gethostname(), __version__)


async def list_devices(
    keeper: NodeKeeper, caller: Caller, asked: pb.ListDevicesRequest
) -> pb.ListDevicesReply:
    views, revision = await keeper.listings.devices()
    return pb.ListDevicesReply(devices=[encode.device(view) for view in views], revision=revision)


async def allocate(keeper: NodeKeeper, caller: Caller, asked: pb.AllocateRequest) -> pb.Allocation:
    held = await keeper.allocate(_request(caller, asked))
    return _shown(caller, held)


async def plan(keeper: NodeKeeper, caller: Caller, asked: pb.AllocateRequest) -> pb.PlanReply:
    decision, steps = await keeper.allocates.plan(_request(caller, asked))
    return encode.plan(decision, steps)


def _request(caller: Caller, asked: pb.AllocateRequest) -> Request:
    owner = decode.named_owner(asked)
    if owner is not None:
        check_owner_override(caller)
    request = decode.request(
        asked,
        request_id=asked.request_id or f"made-{secrets.token_hex(8)}",
        owner=owner or caller.owner,
        lifetime=_caller_lifetime(caller) if asked.bind_to_caller else Lifetime(),
    )
    return replace(request, quota_owner=caller.quota_owner) if owner is None else request


def _caller_lifetime(caller: Caller) -> Lifetime:
    if caller.process.pid == 0:
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            "bind_to_caller is set but the calling process has ended or cannot be seen from here",
            "keep the process that opened the connection alive, and in vgpud's pid namespace or one below it",
        )
    return caller.process


async def release(keeper: NodeKeeper, caller: Caller, asked: pb.ReleaseRequest) -> pb.ReleaseReply:
    name = decode.identifier(asked.allocation_id, "allocation_id")
    # Only administrators may force a release, because processes that outlive their allocation hold device
    # memory that no quota counts.
    force = asked.force and caller.is_admin
    return pb.ReleaseReply(already_released=await keeper.release(name, caller, force))


async def resize(keeper: NodeKeeper, caller: Caller, asked: pb.ResizeRequest) -> pb.Allocation:
    name = decode.identifier(asked.allocation_id, "allocation_id")
    limits = decode.limits(asked)
    held = await keeper.resize(name, caller, limits.memory_bytes, limits.share)
    return _shown(caller, held)


async def pause(keeper: NodeKeeper, caller: Caller, asked: pb.PauseRequest) -> pb.Allocation:
    held = await keeper.pause(decode.identifier(asked.allocation_id, "allocation_id"), caller)
    return _shown(caller, held)


async def unpause(keeper: NodeKeeper, caller: Caller, asked: pb.UnpauseRequest) -> pb.Allocation:
    held = await keeper.unpause(decode.identifier(asked.allocation_id, "allocation_id"), caller)
    return _shown(caller, held)


async def suspend(keeper: NodeKeeper, caller: Caller, asked: pb.SuspendRequest) -> pb.Allocation:
    held = await keeper.suspend(decode.identifier(asked.allocation_id, "allocation_id"), caller, asked.deep)
    return _shown(caller, held, stays=keeper.suspends.swaps.stays(held))


async def resume(keeper: NodeKeeper, caller: Caller, asked: pb.ResumeRequest) -> pb.Allocation:
    held = await keeper.resume(decode.identifier(asked.allocation_id, "allocation_id"), caller)
    return _shown(caller, held)


async def get_allocation(keeper: NodeKeeper, caller: Caller, asked: pb.GetAllocationRequest) -> pb.Allocation:
    held = keeper.book.get(decode.identifier(asked.allocation_id, "allocation_id"))
    use = await keeper.listings.slice_use(held)
    return _shown(
        caller,
        held,
        use=use,
        standing=keeper.residency.standing(held),
        marks=keeper.bypasses.marks(held),
        memory_limit=keeper.listings.memory_limit(held),
        stays=keeper.suspends.swaps.stays(held),
    )


async def list_allocations(
    keeper: NodeKeeper, caller: Caller, asked: pb.ListAllocationsRequest
) -> pb.ListAllocationsReply:
    held, revision = tuple(keeper.book), keeper.store.revision
    shown = []
    for one in held:
        shown.append(
            _shown(
                caller,
                one,
                standing=keeper.residency.standing(one),
                marks=keeper.bypasses.marks(one),
                memory_limit=keeper.listings.memory_limit(one),
            )
        )
        if len(shown) % _LISTED_AT_ONCE == 0:
            await asyncio.sleep(0)  # lets other calls run during a long listing
    return pb.ListAllocationsReply(allocations=shown, revision=revision)


async def move(keeper: NodeKeeper, caller: Caller, asked: pb.MoveRequest) -> pb.Allocation:
    name = decode.identifier(asked.allocation_id, "allocation_id")
    to = [decode.identifier(uuid, "to") for uuid in asked.to]
    held = await keeper.moves.move(name, caller, to, decode.text(asked.source, "source"))
    return _shown(caller, held)


async def plan_defrag(keeper: NodeKeeper, caller: Caller, asked: pb.DefragRequest) -> pb.DefragReply:
    return encode.defrag(await keeper.relocations.plan(decode.room_wanted(asked)))


async def defrag(keeper: NodeKeeper, caller: Caller, asked: pb.DefragRequest) -> pb.DefragReply:
    return encode.defrag(await keeper.relocations.defrag(decode.room_wanted(asked), caller))


async def list_mps(keeper: NodeKeeper, caller: Caller, asked: pb.ListMpsRequest) -> pb.ListMpsReply:
    """Lists MPS daemons. A command line is shown only to the user whose process it is, and to
    administrators.
    """
    daemons = await keeper.operations.mps()
    return pb.ListMpsReply(
        daemons=[encode.mps_daemon(one, lambda uid: caller.is_admin or uid == caller.uid) for one in daemons]
    )


async def terminate_mps_client(
    keeper: NodeKeeper, caller: Caller, asked: pb.TerminateMpsClientRequest
) -> pb.TerminateMpsClientReply:
    name = decode.identifier(asked.device_uuid, "device_uuid")
    await keeper.operations.terminate(name, asked.pid)
    return pb.TerminateMpsClientReply()


async def drain_device(
    keeper: NodeKeeper, caller: Caller, asked: pb.DrainDeviceRequest
) -> pb.DrainDeviceReply:
    name = decode.identifier(asked.device_uuid, "device_uuid")
    view = await keeper.operations.drain(name, not asked.undrain)
    if not asked.move or asked.undrain:
        return encode.drain(view)
    gone = await keeper.relocations.evacuate(name, caller)
    return encode.drain(await keeper.operations.drain(name, True), gone)


async def list_mig(keeper: NodeKeeper, caller: Caller, asked: pb.ListMigRequest) -> pb.ListMigReply:
    """Lists MIG instances. A command line is shown only to the user whose process it is, and to
    administrators.
    """
    views = await _mig(keeper).devices()
    return pb.ListMigReply(
        devices=[encode.mig_device(view, lambda uid: caller.is_admin or uid == caller.uid) for view in views]
    )


async def plan_mig(keeper: NodeKeeper, caller: Caller, asked: pb.MigRequest) -> pb.MigPlanReply:
    if asked.HasField("defrag"):
        return encode.mig_plan(await _mig(keeper).preview_defrag(decode.selector(asked.defrag)))
    return encode.mig_plan(await _mig(keeper).preview(decode.mig_targets(asked)))


async def apply_mig(keeper: NodeKeeper, caller: Caller, asked: pb.MigRequest) -> pb.MigPlanReply:
    if asked.HasField("defrag"):
        return encode.mig_plan(await _mig(keeper).defrag(decode.selector(asked.defrag)))
    return encode.mig_plan(await _mig(keeper).apply(decode.mig_targets(asked)))


def _mig(keeper: NodeKeeper) -> MigLayouts:
    if keeper.mig is None:
        raise VgpuError(ErrorCode.UNSUPPORTED, "this node has no mode mig", "see 'vgpuctl status'")
    return keeper.mig


async def get_usage(keeper: NodeKeeper, caller: Caller, asked: pb.GetUsageRequest) -> pb.UsageReply:
    return encode.usage(await keeper.meters.read(), keeper.listings.describe().revision)


async def list_processes(
    keeper: NodeKeeper, caller: Caller, asked: pb.ListProcessesRequest
) -> pb.ListProcessesReply:
    """Lists processes. A command line is shown only to the user whose process it is, and to
    administrators.
    """
    metered = await keeper.meters.read(_PROCESSES_SECONDS)
    found = await keeper.processes.listed(metered, keeper.residency.standing)
    return encode.processes(found, lambda uid: caller.is_admin or uid == caller.uid)


async def list_events(keeper: NodeKeeper, caller: Caller, asked: pb.ListEventsRequest) -> pb.ListEventsReply:
    if asked.last > _MOST_EVENTS:
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            f"{asked.last} events are more than the {_MOST_EVENTS} that one call gets",
            "ask for fewer, or watch from a revision on",
        )
    user = asked.user if asked.HasField("user") else None
    events = await keeper.store.last_events(asked.last or _USUAL_EVENTS, user)
    reply = pb.ListEventsReply()
    for first in range(0, len(events), _EVENTS_AT_ONCE):
        reply.events.extend(encode.event(event, None) for event in events[first : first + _EVENTS_AT_ONCE])
        await asyncio.sleep(0)  # lets the event loop serve other callers between two parts of the listing
    return reply


async def get_policy(keeper: NodeKeeper, caller: Caller, asked: pb.GetPolicyRequest) -> pb.PolicyReply:
    loaded = keeper.policies.current
    return encode.policy(
        json.dumps(effective(loaded.policy)),
        loaded.origins,
        loaded.digest,
        [str(file) for file in loaded.files],
    )


async def reload_policy(
    keeper: NodeKeeper, caller: Caller, asked: pb.ReloadPolicyRequest
) -> pb.ReloadPolicyReply:
    return encode.reload_report(await keeper.policies.reload(asked.dry_run))


def event_for(caller: Caller, happened: Event, held: Allocation | None) -> pb.Event:
    """The message of an event for this caller. The allocation's edits are included only if the caller may see
    them.
    """
    return encode.event(happened, None if held is None else _shown(caller, held))


def _shown(caller: Caller, held: Allocation, **more: Any) -> pb.Allocation:  # noqa: ANN401 (as in encode)
    """The message of an allocation for this caller, with its edits only if the caller may see them."""
    return encode.allocation(held, with_edits=may_see_edits(caller, held.request.owner.uid), **more)


Handler = Callable[[NodeKeeper, Caller, Any], Coroutine[Any, Any, Any]]

HANDLERS: dict[str, Handler] = {
    "GetNode": get_node,
    "ListDevices": list_devices,
    "Allocate": allocate,
    "Release": release,
    "Resize": resize,
    "Pause": pause,
    "Unpause": unpause,
    "Suspend": suspend,
    "Resume": resume,
    "Move": move,
    "Defrag": defrag,
    "PlanDefrag": plan_defrag,
    "GetAllocation": get_allocation,
    "ListAllocations": list_allocations,
    "Plan": plan,
    "GetPolicy": get_policy,
    "ReloadPolicy": reload_policy,
    "ListMps": list_mps,
    "TerminateMpsClient": terminate_mps_client,
    "DrainDevice": drain_device,
    "ListMig": list_mig,
    "PlanMig": plan_mig,
    "ApplyMig": apply_mig,
    "GetUsage": get_usage,
    "ListProcesses": list_processes,
    "ListEvents": list_events,
}
