"""The calls of operators: MPS control daemons and draining; see handlers.py."""

from vgpud.api import decode, encode_mps
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.caller import Caller
from vgpud.serve.keeper import Keeper


async def list_mps(keeper: Keeper, caller: Caller, asked: pb.ListMpsRequest) -> pb.ListMpsReply:
    """What a client was started with is for its own user and the administrator."""
    daemons = await keeper.operations.mps()
    return pb.ListMpsReply(
        daemons=[encode_mps.daemon(one, lambda uid: caller.is_admin or uid == caller.uid) for one in daemons]
    )


async def terminate_mps_client(
    keeper: Keeper, caller: Caller, asked: pb.TerminateMpsClientRequest
) -> pb.TerminateMpsClientReply:
    name = decode.identifier(asked.device_uuid, "device_uuid")
    await keeper.operations.terminate(name, asked.pid)
    return pb.TerminateMpsClientReply()


async def drain_device(keeper: Keeper, caller: Caller, asked: pb.DrainDeviceRequest) -> pb.DrainDeviceReply:
    name = decode.identifier(asked.device_uuid, "device_uuid")
    view = await keeper.operations.drain(name, not asked.undrain)
    if not asked.move or asked.undrain:
        return encode_mps.drain(view)
    gone = await keeper.relocations.evacuate(name, caller)
    return encode_mps.drain(await keeper.operations.drain(name, True), gone)
