"""A server on real sockets. Its event loop runs in a thread of its own."""

import asyncio
import concurrent.futures
import shutil
import tempfile
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar, cast

from tests.otheruser import open_place
from tests.serve.fake_keeper import FakeKeeper
from vgpud.node.keeper import NodeKeeper
from vgpud.serve.intake import Bounds
from vgpud.serve.relay import ConnectionLimits
from vgpud.serve.server import Server
from vgpud.serve.sockets import public_sockets

T = TypeVar("T")


class Live:
    def __init__(
        self, limits: ConnectionLimits | None = None, group: str = "", bounds: Bounds | None = None
    ) -> None:
        # the path is short, because the path of a Unix socket has at most 108 bytes; other users may enter
        # the folder
        self.run_dir = Path(tempfile.mkdtemp(prefix="vgs-", dir=open_place()))
        self.run_dir.chmod(0o755)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.stopped = False
        self.do(self._start(limits, group, bounds))

    async def _start(self, limits: ConnectionLimits | None, group: str, bounds: Bounds | None) -> None:
        self.keeper = FakeKeeper()
        self.server = Server(
            cast(NodeKeeper, self.keeper), public_sockets(self.run_dir, group, {}), limits, bounds
        )
        await self.server.start()

    def do(self, work: Coroutine[Any, Any, T], timeout_seconds: float = 300) -> T:
        """Runs `work` on the server's loop and returns its result."""
        return self.begin(work).result(timeout_seconds)

    def begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    @property
    def ro(self) -> Path:
        return self.run_dir / "ro.sock"

    @property
    def tenant(self) -> Path:
        return self.run_dir / "vgpud.sock"

    @property
    def admin(self) -> Path:
        return self.run_dir / "admin.sock"

    def stop(self, grace_seconds: float = 5.0) -> None:
        if not self.stopped:
            self.stopped = True
            self.do(self.server.stop(grace_seconds))

    def close(self) -> None:
        self.stop(0.2)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(300)
        shutil.rmtree(self.run_dir, ignore_errors=True)
