"""The calls that move tenants; see handlers.py."""

from vgpud.api import decode, encode, encode_move
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.caller import Caller
from vgpud.serve.keeper import Keeper
from vgpud.serve.permissions import may_see_edits


async def move(keeper: Keeper, caller: Caller, asked: pb.MoveRequest) -> pb.Allocation:
    name = decode.identifier(asked.allocation_id, "allocation_id")
    to = [decode.identifier(uuid, "to") for uuid in asked.to]
    held = await keeper.moves.move(name, caller, to, decode.text(asked.source, "source"))
    return encode.allocation(held, with_edits=may_see_edits(caller, held.request.owner.uid))


async def plan_defrag(keeper: Keeper, caller: Caller, asked: pb.DefragRequest) -> pb.DefragReply:
    return encode_move.defrag(await keeper.relocations.plan(decode.room_wanted(asked)))


async def defrag(keeper: Keeper, caller: Caller, asked: pb.DefragRequest) -> pb.DefragReply:
    return encode_move.defrag(await keeper.relocations.defrag(decode.room_wanted(asked), caller))
