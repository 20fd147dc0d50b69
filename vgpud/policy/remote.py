"""The table [remote] of the policy: slices for other machines, over the network."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from vgpud.policy.fields import MemoryBytes, PolicyTable, Seconds, wrong

_SHA256 = "[0-9a-f]{64}"
_LISTEN = r"^([^:]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}$"


def _listen(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise wrong(
            f"{value!r} is not an address with a port", 'write it as in "0.0.0.0:14843" or "[::]:14843"'
        )
    return value


def _absolute(value: str) -> str:
    if value and not value.startswith("/"):
        raise wrong(f"{value!r} is not an absolute path", 'write it as in "/opt/lupine/bin/server"')
    return value


def _sha256(value: str) -> str:
    if value and re.fullmatch(_SHA256, value) is None:
        raise wrong("a SHA-256 has 64 hexadecimal digits, in small letters", "copy it from 'vgpuctl doctor'")
    return value


Sha256 = Annotated[
    str, AfterValidator(_sha256), WithJsonSchema({"type": "string", "pattern": rf"^({_SHA256})?$"})
]
Address = Annotated[
    str,
    Field(max_length=128),
    AfterValidator(_listen),
    WithJsonSchema({"type": "string", "pattern": _LISTEN}),
]
Program = Annotated[
    str,
    Field(max_length=4096),
    AfterValidator(_absolute),
    WithJsonSchema({"type": "string", "pattern": "^(/.*)?$"}),
]


class RemoteSettings(PolicyTable):
    """The table [remote]: slices for machines without a GPU, through vgpud-remote.service."""

    server: Program = Field(
        "", description="the server program of the engine; empty: no remote slices are made"
    )
    server_sha256: Sha256 = Field(
        "", description="of the server program as it was installed, for `vgpuctl doctor`; empty: not recorded"
    )
    engine: Literal["lupine"] = Field("lupine", description="the engine to which the server program belongs")
    listen: Address = Field("0.0.0.0:14843", description="where the door listens, by TLS")
    grace: Seconds = Field(
        30.0,
        description="a session whose control connection has ended is kept for so long, for the client to "
        "connect again",
    )
    idle: Seconds | None = Field(
        None, description="a session that carries no bytes for so long is ended; left out: never"
    )
    max_connections: int = Field(1024, ge=1, le=100_000, description="of all clients together")
    max_sessions: int = Field(64, ge=1, le=1024, description="slices of all remote users together")
    max_sessions_per_user: int = Field(8, ge=1, le=1024, description="slices of one remote user")
    handshakes_per_second: int = Field(
        50, ge=1, le=10_000, description="new connections in a second, of all clients; more are closed"
    )
    bytes_per_second: MemoryBytes | None = Field(
        None, description="of one session, both directions together; left out: no bound"
    )
