"""The sockets on which vgpud serves the kubelet."""

import asyncio
import os
import stat
from pathlib import Path

from vgpud.serve.kubelet import wire


def test_other_users_cannot_connect_to_a_socket_for_the_kubelet_whatever_the_umask(tmp_path: Path) -> None:
    """Callers of these sockets count as root, because gRPC cannot name them."""
    path = tmp_path / "plugin.sock"

    async def scene() -> None:
        running = wire.server()
        before = os.umask(0)
        try:
            wire.bind(running, path)
        finally:
            os.umask(before)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        await running.stop(0)

    asyncio.run(scene())
