"""The calls that watch over a node: usage, processes, events; see handlers.py."""

from vgpud.api import encode, encode_usage
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.caller import Caller
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.serve.keeper import Keeper

_MOST_EVENTS = 10_000
_USUAL_EVENTS = 100


async def get_usage(keeper: Keeper, caller: Caller, asked: pb.GetUsageRequest) -> pb.UsageReply:
    return encode_usage.usage(await keeper.metered(), keeper.describe().revision)


async def list_processes(
    keeper: Keeper, caller: Caller, asked: pb.ListProcessesRequest
) -> pb.ListProcessesReply:
    """What a process was started with is for its own user and the administrator."""
    found = await keeper.processes()
    return encode_usage.processes(found, lambda uid: caller.is_admin or uid == caller.uid)


async def list_events(keeper: Keeper, caller: Caller, asked: pb.ListEventsRequest) -> pb.ListEventsReply:
    if asked.last > _MOST_EVENTS:
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            f"{asked.last} events are more than the {_MOST_EVENTS} that one call gets",
            "ask for fewer, or watch from a revision on",
        )
    events = await keeper.last_events(asked.last or _USUAL_EVENTS)
    return pb.ListEventsReply(events=[encode.event(event, None) for event in events])
