"""model -> proto: tenants that move."""

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.move_view import DefragView, TenantMove


def defrag(view: DefragView) -> pb.DefragReply:
    return pb.DefragReply(device_uuid=view.device_uuid, moves=[tenant_move(one) for one in view.moves])


def tenant_move(one: TenantMove) -> pb.TenantMove:
    return pb.TenantMove(
        allocation_id=one.allocation_id,
        source=one.source,
        target=one.target,
        memory_bytes=one.memory_bytes,
        done=one.done,
    )
