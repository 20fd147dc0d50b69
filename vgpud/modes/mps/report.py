"""Collects what `vgpuctl mps ls` shows of one device's control daemon, from the daemon, NVML and /proc."""

from contextlib import suppress

from vgpud import proc
from vgpud.model.device import Device, DeviceProcess
from vgpud.model.errors import VgpuError
from vgpud.model.view import MpsClient, MpsDaemon, MpsServer
from vgpud.modes.gpu_use import allocation_of
from vgpud.modes.mps.control import MpsControl
from vgpud.modes.mps.features import Features
from vgpud.modes.mps.processes import command


def report(
    device: Device,
    daemon_pid: int,
    control: MpsControl,
    features: Features,
    processes: tuple[DeviceProcess, ...],
    multi_user: bool,
) -> MpsDaemon:
    """Makes the report. Blocks. If the daemon does not answer, the report contains the reason, and no error
    is raised.
    """
    memory = {process.pid: process.memory_bytes for process in processes}
    servers: tuple[MpsServer, ...] = ()
    clients: tuple[MpsClient, ...] = ()
    trouble = ""
    try:
        servers = tuple(_server(control, features, pid) for pid in control.servers())
        clients = tuple(
            MpsClient(
                pid=client.pid,
                server_pid=client.server_pid,
                uid=proc.owner(client.pid),
                allocation_id=allocation_of(client.pid) or "",
                memory_bytes=memory.get(client.pid),
                command=command(client.pid) or client.command,
            )
            for client in control.clients()
        )
    except VgpuError as error:
        trouble = str(error)
    return MpsDaemon(
        device_uuid=device.uuid,
        device_index=device.index,
        pid=daemon_pid,
        version=features.version,
        multi_user=multi_user,
        client_limit=features.client_limit(device.compute_capability),
        servers=servers,
        clients=clients,
        trouble=trouble,
    )


def _server(control: MpsControl, features: Features, pid: int) -> MpsServer:
    state = ""
    if features.server_status:
        with suppress(VgpuError):  # the process may have ended since the listing
            state = control.server_state(pid)
    return MpsServer(pid=pid, uid=proc.owner(pid), state=state)
