"""Converts requests: proto -> model. The form of every field is checked here, so later code need not check
it.

All functions raise VgpuError: BAD_QUANTITY, BAD_PERCENT or BAD_REQUEST.
"""

from dataclasses import dataclass

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.mig_view import MigTarget
from vgpud.model.move_view import RoomWanted
from vgpud.model.quantity import Percent, check_bytes
from vgpud.model.tenancy import ANYONE, PRIORITIES, Isolation, Lifetime, Owner, Request, Selector

MAX_ID_CHARACTERS = 128
MAX_TEXT_CHARACTERS = 256
_LISTED_FIELDS = 8
MAX_COUNT = 64  # maximum of devices in a request: devices of one node, and so slices of one allocation


@dataclass(frozen=True, slots=True)
class ResizeLimits:
    """The limits that a Resize asks for; None leaves a limit unchanged."""

    memory_bytes: int | None
    share: Percent | None


def request(asked: pb.AllocateRequest, request_id: str, owner: Owner, lifetime: Lifetime) -> Request:
    """The model's request for an Allocate message. The socket's server adds id, owner and lifetime, because
    it knows the caller.
    """
    refuse_unknown_fields(asked)
    return Request(
        id=identifier(request_id, "request_id"),
        owner=owner,
        memory_bytes=check_bytes(asked.memory_bytes) if asked.HasField("memory_bytes") else None,
        share=Percent.from_float(asked.share_percent) if asked.HasField("share_percent") else None,
        count=_count(asked.count),
        isolation=_isolation(asked.isolation),
        mig_profile=text(asked.mig_profile, "mig_profile"),
        selector=selector(asked.selector) if asked.HasField("selector") else Selector(),
        label=text(asked.label, "label"),
        lifetime=lifetime,
        priority=_priority(asked.priority),
        own_cgroup=asked.own_cgroup and asked.bind_to_caller,
    )


def _priority(word: str) -> str:
    if word and word not in PRIORITIES:
        raise _bad(
            f"priority {word[:20]!r} is not known", f"write {' or '.join(PRIORITIES)}, or leave it out"
        )
    return word


def room_wanted(asked: pb.DefragRequest) -> RoomWanted:
    refuse_unknown_fields(asked)
    return RoomWanted(
        memory_bytes=check_bytes(asked.memory_bytes) if asked.HasField("memory_bytes") else None,
        share=Percent.from_float(asked.share_percent) if asked.HasField("share_percent") else None,
        selector=selector(asked.selector) if asked.HasField("selector") else Selector(),
    )


def limits(asked: pb.ResizeRequest) -> ResizeLimits:
    refuse_unknown_fields(asked)
    memory_bytes = check_bytes(asked.memory_bytes) if asked.HasField("memory_bytes") else None
    share = Percent.from_float(asked.share_percent) if asked.HasField("share_percent") else None
    if memory_bytes is None and share is None:
        raise _bad("the resize names neither memory nor a share", "give memory_bytes, share_percent or both")
    return ResizeLimits(memory_bytes, share)


def named_owner(asked: pb.AllocateRequest) -> Owner | None:
    """The owner that the request names, or None; only an administrator may name one."""
    if not asked.HasField("owner_uid") and not asked.HasField("owner_gid"):
        return None
    if not (asked.HasField("owner_uid") and asked.HasField("owner_gid")):
        raise _bad("owner_uid and owner_gid belong together, one is missing", "give both or neither")
    # chown(2) and setresuid(2) take this id (-1) as "no change", so no owner can have it
    if ANYONE in (asked.owner_uid, asked.owner_gid):
        raise _bad(f"{ANYONE} is not a valid uid or gid", "give the uid and gid of the tenant")
    return Owner(asked.owner_uid, asked.owner_gid)


def mig_targets(asked: pb.MigRequest) -> tuple[MigTarget, ...]:
    """The layouts of a MIG request. Raises VgpuError(BAD_REQUEST), also for a request
    without targets.
    """
    refuse_unknown_fields(asked)
    if not asked.targets or len(asked.targets) > MAX_COUNT:
        raise _bad(f"{len(asked.targets)} layouts are asked for", f"ask for 1 to {MAX_COUNT}")
    return tuple(_mig_target(target) for target in asked.targets)


def _mig_target(asked: pb.MigTarget) -> MigTarget:
    refuse_unknown_fields(asked)
    if not asked.layout or len(asked.layout) > MAX_COUNT:
        raise _bad(
            f"a layout has {len(asked.layout)} words, and 1 to {MAX_COUNT} are allowed",
            '"none" is the layout without instances',
        )
    return MigTarget(selector(asked.selector), tuple(text(word, "layout").lower() for word in asked.layout))


def identifier(value: str, field: str) -> str:
    """Checks and returns a request id or allocation id: 1 to 128 printable characters."""
    if not value:
        lister = {"allocation_id": "vgpuctl ls", "device_uuid": "vgpuctl devices", "to": "vgpuctl devices"}
        raise _bad(f"{field} is empty", f"see '{lister[field]}'" if field in lister else f"give the {field}")
    return _printable(value, field, MAX_ID_CHARACTERS)


def text(value: str, field: str) -> str:
    """Checks and returns a text field: up to 256 printable characters."""
    return _printable(value, field, MAX_TEXT_CHARACTERS)


def refuse_unknown_fields(asked: Message) -> None:
    """Raises BAD_REQUEST for fields that this daemon does not know: a newer caller may ask for a limit, and
    the daemon would silently ignore it.
    """
    fields = UnknownFieldSet(asked)
    unknown = sorted({fields[i].field_number for i in range(min(len(fields), _LISTED_FIELDS))})
    if unknown:
        listed = ", ".join(map(str, unknown))
        raise _bad(
            f"{asked.DESCRIPTOR.name} has fields that this vgpud does not know (number {listed})",
            "upgrade vgpud, or use the caller of its version",
        )


def _printable(value: str, field: str, longest: int) -> str:
    if len(value) > longest:
        raise _bad(f"{field} has {len(value)} characters, at most {longest} are allowed", "shorten it")
    if not value.isprintable():
        raise _bad(f"{field} {value!r} has characters that cannot be printed", "leave those out")
    return value


def _count(value: int) -> int:
    if value > MAX_COUNT:
        raise _bad(f"count {value} is more than {MAX_COUNT} devices", f"ask for at most {MAX_COUNT}")
    return value or 1


def _isolation(word: str) -> Isolation | None:
    if not word:
        return None
    try:
        return Isolation(word)
    except ValueError:
        words = ", ".join(isolation.value for isolation in Isolation)
        shown = word[:32]
        raise _bad(f"isolation {shown!r} is not known", f"use one of {words}, or leave it out") from None


def selector(asked: pb.Selector) -> Selector:
    refuse_unknown_fields(asked)
    for field, entries in (("uuids", len(asked.uuids)), ("indices", len(asked.indices))):
        if entries > MAX_COUNT:
            raise _bad(
                f"selector.{field} has {entries} entries, at most {MAX_COUNT} are allowed", "use fewer"
            )
    return Selector(
        uuids=tuple(text(uuid, "selector.uuids") for uuid in asked.uuids),
        indices=tuple(asked.indices),
        name_glob=text(asked.name_glob, "selector.name_glob"),
    )


def _bad(sentence: str, hint: str) -> VgpuError:
    return VgpuError(ErrorCode.BAD_REQUEST, sentence, hint)
