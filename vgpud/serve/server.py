"""The gRPC server behind the relay, with start and stop."""

import asyncio
import stat
from pathlib import Path
from urllib.parse import quote

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from vgpud import clock
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.node.keeper import NodeKeeper
from vgpud.serve.calls import SERVICE, Calls
from vgpud.serve.intake import Bounds, Intake
from vgpud.serve.relay import ConnectionLimits, Relay
from vgpud.serve.sockets import PublicSockets, check_length, private_folder

log = structlog.get_logger(__name__)

# Maximum size of a request: it is parsed on the event loop; 64 layouts of 64 profiles, the largest useful
# request, take 50 KB.
MAX_REQUEST_BYTES = 128 * 1024
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_concurrent_streams", 32),
    # The relay keeps grpcio's queue short: MOST_QUEUED calls of each user (serve/gate.py). This leaves room
    # for some five hundred users with as many.
    ("grpc.server.max_pending_requests", 4096),
    ("grpc.server.max_pending_requests_hard_limit", 4096),
    # A stream takes 16 KiB until its message is read. gRPC's bandwidth probe is off, so that a fast peer
    # cannot increase this amount.
    ("grpc.http2.lookahead_bytes", 16 * 1024),
    ("grpc.http2.bdp_probe", 0),
    # Time limit for a peer that connects and sends nothing, or no HTTP/2.
    ("grpc.server_handshake_timeout_ms", 5000),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
)

_CANCEL_SECONDS = 1.0  # for grpcio to cancel the calls that exceed the grace period of a stop


class Server:
    """Serves `keeper` on `sockets`. It closes the sockets when it stops."""

    def __init__(
        self,
        keeper: NodeKeeper,
        sockets: PublicSockets,
        limits: ConnectionLimits | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        self._keeper = keeper
        self._sockets = sockets
        self._limits = limits or ConnectionLimits().within_descriptors()
        self._bounds = bounds or Bounds()
        self._health = health.aio.HealthServicer()

    async def start(self) -> None:
        """Starts the server. Returns when calls are answered. Raises VgpuError(BAD_SETTING) if it cannot
        listen.
        """
        folder = private_folder(self._sockets.run_dir)
        _clear(folder)
        inner = folder / "grpc.sock"
        check_length(inner)
        self.relay = Relay(self._sockets.listening, inner, folder, self._limits)
        self._calls = Calls(self._keeper, self.relay.peers, self.relay.drop)
        self.intake = Intake(self.relay.peers, self.relay.drop, self.relay.taken, self._bounds)
        self._grpc = grpc.aio.server(options=_OPTIONS, interceptors=(self.intake,))
        self._grpc.add_generic_rpc_handlers((self._calls.generic_handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = (SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)
        self._bind(inner)
        await self._grpc.start()
        for name in ("", SERVICE.full_name):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self.relay.start()

    def _bind(self, inner: Path) -> None:
        try:
            self._grpc.add_insecure_port(f"unix:{quote(str(inner))}")
        except RuntimeError as error:
            raise VgpuError(
                ErrorCode.BAD_SETTING,
                f"cannot listen on {inner}: {error}",
                "check the rights and free space of the run folder (VGPUD_RUN_DIR)",
            ) from None

    async def stop(self, grace_seconds: float = 10.0) -> None:
        """Refuses new callers, ends the watches, and gives running calls `grace_seconds` to finish."""
        end = clock.now() + grace_seconds
        self.relay.stop_accepting()
        self._sockets.close()
        await self._health.enter_graceful_shutdown()
        self._calls.stop()
        stopped = asyncio.ensure_future(self._grpc.stop(grace_seconds))
        await asyncio.wait({stopped}, timeout=grace_seconds + _CANCEL_SECONDS)
        if not stopped.done():
            await self.relay.close()  # grpcio waits for connections whose callers take nothing
        await stopped
        left = await self._calls.running.end(max(0.0, end - clock.now()))
        if left:
            log.warning(LogEvent.CALLS_CANCELLED_AT_STOP, calls=left)
        await self.relay.close(max(0.0, end - clock.now()))


def _clear(folder: Path) -> None:
    """Removes the socket names of an earlier daemon that was killed. They belong to no other daemon, because
    this one holds the lock on the folder.
    """
    for left in folder.iterdir():
        if stat.S_ISSOCK(left.lstat().st_mode):
            left.unlink()
