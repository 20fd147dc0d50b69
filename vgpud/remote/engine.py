"""The engine that carries CUDA calls over a connection: a server for the node and libraries for the client.
Other engines can be added to ENGINES.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class Engine(Protocol):
    """The server listens for TCP on all addresses of its own network namespace. `how` says how an
    administrator gets the version that was tested with this vgpud. `library` is a file by which a folder with
    the client's libraries is recognized.
    """

    port: int
    how: str
    library: str

    def version(self, program: Path) -> str:
        """Returns the version of a server program as precisely as possible; "" if it is not a server of this
        engine. Raises OSError.
        """

    def server_environment(self) -> dict[str, str]:
        """The environment variables that make the server listen on `port`."""

    def client_environment(self, port: int, library: str, before: Mapping[str, str]) -> dict[str, str]:
        """The environment variables by which a program finds the engine's libraries, and the server at a port
        of the loopback address.
        """


class Lupine:
    """Lupine (github.com/lupinemachines/lupine) at commit 7fbd364. LUPINE_PORT is documented in its
    server.cpp, LUPINE_SERVER and /opt/lupine/lib in its README.md. It has no limits and no authentication.
    """

    port = 14833
    library = "libcuda.so.1"
    how = "build github.com/lupinemachines/lupine at 7fbd364, or take its images' server"

    def version(self, program: Path) -> str:
        """The server has no option that prints its version. Since commit 36de703, of the same day as 7fbd364,
        the program contains the name of a header that it sends.
        """
        return "36de703 or later" if b"x-lupine-va-base" in program.read_bytes() else ""

    def server_environment(self) -> dict[str, str]:
        return {"LUPINE_PORT": str(self.port)}

    def client_environment(self, port: int, library: str, before: Mapping[str, str]) -> dict[str, str]:
        paths = [library, *filter(None, (before.get("LD_LIBRARY_PATH", ""),))]
        return {"LUPINE_SERVER": f"127.0.0.1:{port}", "LD_LIBRARY_PATH": ":".join(paths)}


ENGINES: dict[str, Engine] = {"lupine": Lupine()}
DEFAULT_LIBRARY = "/opt/lupine/lib"
