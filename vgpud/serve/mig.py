"""The calls about MIG layouts; see handlers.py."""

from vgpud.api import decode, encode_mig
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.caller import Caller
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.serve.keeper import Keeper, MigOperations


async def list_mig(keeper: Keeper, caller: Caller, asked: pb.ListMigRequest) -> pb.ListMigReply:
    """What runs in an instance is for its own user and the administrator."""
    views = await _mig(keeper).devices()
    return pb.ListMigReply(
        devices=[encode_mig.device(view, lambda uid: caller.is_admin or uid == caller.uid) for view in views]
    )


async def plan_mig(keeper: Keeper, caller: Caller, asked: pb.MigRequest) -> pb.MigPlanReply:
    if asked.HasField("defrag"):
        return encode_mig.plan(await _mig(keeper).preview_defrag(decode.selector(asked.defrag)))
    return encode_mig.plan(await _mig(keeper).preview(decode.mig_targets(asked)))


async def apply_mig(keeper: Keeper, caller: Caller, asked: pb.MigRequest) -> pb.MigPlanReply:
    if asked.HasField("defrag"):
        return encode_mig.plan(await _mig(keeper).defrag(decode.selector(asked.defrag)))
    return encode_mig.plan(await _mig(keeper).apply(decode.mig_targets(asked)))


def _mig(keeper: Keeper) -> MigOperations:
    if keeper.mig is None:
        raise VgpuError(
            ErrorCode.UNSUPPORTED, "this vgpud has no mode mig", "see 'vgpuctl devices' for what there is"
        )
    return keeper.mig
