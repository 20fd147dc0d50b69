"""MPS control daemons and drained devices as the daemon shows them: model -> proto."""

from collections.abc import Callable

from vgpud.api.encode_move import tenant_move
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.move_view import NOBODY, Evacuation
from vgpud.model.view import DrainView, MpsClient, MpsDaemon


def daemon(shown: MpsDaemon, sees_commands_of: Callable[[int | None], bool]) -> pb.MpsDaemon:
    return pb.MpsDaemon(
        device_uuid=shown.device_uuid,
        device_index=shown.device_index,
        pid=shown.pid,
        version=shown.version,
        multi_user=shown.multi_user,
        client_limit=shown.client_limit,
        servers=[pb.MpsServer(pid=s.pid, uid=s.uid, state=s.state) for s in shown.servers],
        clients=[_client(client, sees_commands_of(client.uid)) for client in shown.clients],
        trouble=shown.trouble,
    )


def _client(client: MpsClient, with_command: bool) -> pb.MpsClient:
    return pb.MpsClient(
        pid=client.pid,
        server_pid=client.server_pid,
        uid=client.uid,
        allocation_id=client.allocation_id,
        memory_bytes=client.memory_bytes,
        command=client.command if with_command else "",
    )


def drain(view: DrainView, gone: Evacuation = NOBODY) -> pb.DrainDeviceReply:
    return pb.DrainDeviceReply(
        device_uuid=view.device_uuid,
        drained=view.drained,
        idle=view.idle,
        allocation_ids=view.allocation_ids,
        pids=view.pids,
        moved=[tenant_move(one) for one in gone.moved],
        staying=[pb.Staying(allocation_id=name, why=why) for name, why in gone.staying],
    )
