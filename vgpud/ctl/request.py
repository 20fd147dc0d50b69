"""Turns the options of a request (memory, cores, isolation and others) into the API's message."""

import secrets
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl import arguments as kinds
from vgpud.ctl.files import read_toml
from vgpud.model.errors import ErrorCode, VgpuError

# The options that a request file can give, each with the function that parses its text.
_KEYS: Mapping[str, Callable[[str], Any]] = {
    "memory": kinds.memory,
    "cores": kinds.cores,
    "count": kinds.count,
    "isolation": kinds.isolation,
    "profile": str,
    "device": str,
    "priority": str,
    "device_name": str,
    "label": str,
}


def request_of(arguments: Namespace) -> pb.AllocateRequest:
    """Builds the Allocate message. It always has a request id, so that an interrupted call can be
    repeated.

    Raises VgpuError(BAD_REQUEST) for a request file that cannot be used.
    """
    if arguments.request:
        _add_file(arguments, Path(arguments.request))
    request = pb.AllocateRequest(
        request_id=getattr(arguments, "request_id", None) or f"vgpuctl-{secrets.token_hex(8)}",
        count=arguments.count or 1,
        isolation=arguments.isolation or "",
        mig_profile=arguments.profile or "",
        label=arguments.label or "",
        priority=arguments.priority or "",
        selector=selector_of(arguments.device or [], arguments.device_name or ""),
    )
    if arguments.memory is not None:
        request.memory_bytes = arguments.memory
    if arguments.cores is not None:
        request.share_percent = arguments.cores.value
    owner = getattr(arguments, "owner", None)
    if owner is not None:
        request.owner_uid, request.owner_gid = owner
    return request


def selector_of(devices: list[str], name_glob: str) -> pb.Selector:
    """Builds a device selector: digits are an index, other text is a UUID. The daemon refuses an unknown
    device.
    """
    selector = pb.Selector(name_glob=name_glob)
    for text in devices:
        if text.isascii() and text.isdigit() and int(text) < 2**32:
            selector.indices.append(int(text))
        else:
            selector.uuids.append(text)
    return selector


def _add_file(arguments: Namespace, path: Path) -> None:
    """Sets the options that the request file gives, except those that the command line gives."""
    given = read_toml(path, "name a TOML file, as 'vgpuctl alloc --help' has it")
    for key, value in given.items():
        parse = _KEYS.get(key)
        if parse is None:
            known = ", ".join(_KEYS)
            raise VgpuError(
                ErrorCode.BAD_REQUEST, f"{path} has an unknown key {key!r}", f"write one of {known}"
            )
        if getattr(arguments, key) is None:
            setattr(arguments, key, _value(path, key, value, parse))


def _value(path: Path, key: str, value: object, parse: Callable[[str], Any]) -> object:
    try:
        if key == "device":
            return [parse(str(one)) for one in (value if isinstance(value, list) else [value])]
        return parse(str(value))
    except (VgpuError, ArgumentTypeError, ValueError) as error:
        # ValueError: int() refuses numbers of more than 4300 digits
        said = error.sentence if isinstance(error, VgpuError) else str(error)
        hint = error.hint if isinstance(error, VgpuError) else "see 'vgpuctl alloc --help'"
        raise VgpuError(ErrorCode.BAD_REQUEST, f"{path}: {key}: {said}", hint) from None
