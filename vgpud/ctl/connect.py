"""Opens the daemon's socket for a verb."""

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vgpud.api.client import Client


def connect(arguments: Namespace) -> "Client":
    """Returns a client with the values of --socket and --timeout. Its calls raise VgpuError."""
    from vgpud.api.client import Client

    return Client(Path(arguments.socket) if arguments.socket else None, arguments.timeout)
