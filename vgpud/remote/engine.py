"""The engine that carries CUDA calls over a connection: a server for the node and libraries for the client.
Another engine takes its place by another entry in ENGINES.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class Engine(Protocol):
    """The server listens on TCP on all addresses; the session gives it a network of its own. `how` says how
    an administrator has the version that is tried with this vgpud. `library` is the file that a folder of the
    client's libraries has.
    """

    port: int
    how: str
    library: str

    def version(self, program: Path) -> str:
        """The version of a server program, as far as it can be known; "" if it is no server of this engine.
        Raises OSError.
        """

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
    library = "libcuda.so.1"
    how = "build github.com/lupinemachines/lupine at 7fbd364, or take its images' server"

    def version(self, program: Path) -> str:
        """The server has no option that says its version, and starts whatever it is given. A header that it
        sends since 36de703, a commit of the same day as 7fbd364, is a text of its file.
        """
        return "36de703 or later" if b"x-lupine-va-base" in program.read_bytes() else ""

    def server_environment(self) -> dict[str, str]:
        return {"LUPINE_PORT": str(self.port)}

    def client_environment(self, port: int, library: str, before: Mapping[str, str]) -> dict[str, str]:
        paths = [library, *filter(None, (before.get("LD_LIBRARY_PATH", ""),))]
        return {"LUPINE_SERVER": f"127.0.0.1:{port}", "LD_LIBRARY_PATH": ":".join(paths)}


ENGINES: dict[str, Engine] = {"lupine": Lupine()}
DEFAULT_LIBRARY = "/opt/lupine/lib"
