"""The engine that carries CUDA calls over a connection: a server for the node and libraries for the client.
Pure. Another engine takes its place by another entry in ENGINES.
"""

from collections.abc import Mapping
from typing import Protocol


class Engine(Protocol):
    """The server listens on TCP on all addresses; the session gives it a network of its own."""

    port: int

    def server_environment(self) -> dict[str, str]:
        """The variables with which the server listens on `port`."""

    def client_environment(self, port: int, library: str, before: Mapping[str, str]) -> dict[str, str]:
        """The variables with which a program finds the engine's libraries, and the server at a port of the
        loopback address.
        """


class Lupine:
    """Lupine (github.com/lupinemachines/lupine), as at commit 7fbd364: LUPINE_PORT in server.cpp,
    LUPINE_SERVER and /opt/lupine/lib in README.md. It has no limits and no authentication of its own.
    """

    port = 14833

    def server_environment(self) -> dict[str, str]:
        return {"LUPINE_PORT": str(self.port)}

    def client_environment(self, port: int, library: str, before: Mapping[str, str]) -> dict[str, str]:
        paths = [library, *filter(None, (before.get("LD_LIBRARY_PATH", ""),))]
        return {"LUPINE_SERVER": f"127.0.0.1:{port}", "LD_LIBRARY_PATH": ":".join(paths)}


ENGINES: dict[str, Engine] = {"lupine": Lupine()}
DEFAULT_LIBRARY = "/opt/lupine/lib"
