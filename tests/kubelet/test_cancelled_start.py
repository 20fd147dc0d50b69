"""A cancelled start of a plugin's gRPC server leaves no server behind."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from vgpud.serve.dra.plugin import DraPlugin
from vgpud.serve.kubelet import wire
from vgpud.serve.kubelet.plugin import Plugin


class Server:
    """A server whose start never ends."""

    stopped = False

    def add_generic_rpc_handlers(self, _: object) -> None: ...

    async def start(self) -> None:
        await asyncio.Event().wait()

    async def stop(self, _: float) -> None:
        self.stopped = True


@pytest.mark.parametrize("kind", ["device plugin", "dra"])
def test_a_grpc_server_whose_start_is_cancelled_is_stopped(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a server left open, grpc.aio would wait for ever when the last server is garbage-collected."""
    made = Server()
    monkeypatch.setattr(wire, "server", lambda: made)
    monkeypatch.setattr(wire, "bind", lambda *_: None)
    nothing = cast(Any, None)
    plugin = (
        DraPlugin(tmp_path, nothing, lambda: None, lambda: ())
        if kind == "dra"
        else Plugin(nothing, tmp_path / "s.sock", nothing)
    )

    async def story() -> None:
        start = asyncio.ensure_future(plugin.start())
        await asyncio.wait((start,), timeout=0.01)
        start.cancel()
        await asyncio.wait((start,))
        await plugin.stop()

    asyncio.run(story())
    assert made.stopped
