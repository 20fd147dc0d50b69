"""The options that say what is wanted, as a request of the contract."""

import secrets
from argparse import Namespace

from vgpud.api.gen import vgpud_pb2 as pb


def request_of(arguments: Namespace) -> pb.AllocateRequest:
    """The request. It always has a unique id, so that an interrupted call can be repeated."""
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
    """Digits are an index, other text is a UUID. The daemon refuses an unknown device."""
    selector = pb.Selector(name_glob=name_glob)
    for text in devices:
        if text.isascii() and text.isdigit() and int(text) < 2**32:
            selector.indices.append(int(text))
        else:
            selector.uuids.append(text)
    return selector
