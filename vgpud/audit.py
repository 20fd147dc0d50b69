"""The audit trail: one line for each change, written where the change is made.

The door says who asks (`asked_by`); what happens because of that, in this task and in those that it starts,
has the same cause. What vgpud does by itself names its reason instead (`by_itself`).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import structlog

from vgpud.model.caller import Caller
from vgpud.model.errors import VgpuError
from vgpud.model.journal import Message

log = structlog.get_logger("vgpud.audit")


@dataclass(frozen=True, slots=True)
class Cause:
    """Who asked, through which door; or `reason`, where vgpud acts by itself."""

    door: str
    uid: int
    gid: int
    pid: int
    container: str = ""
    pod: str = ""  # namespace/pod/container
    claim: str = ""
    reason: str = ""


@dataclass(slots=True)
class Change:
    """What is told of a change beside its name; `made` is False where there was nothing to change."""

    words: dict[str, object] = field(default_factory=dict)
    made: bool = True


def _itself(reason: str, pod: str = "") -> Cause:
    return Cause("vgpud", os.geteuid(), os.getegid(), os.getpid(), pod=pod, reason=reason)


_cause: ContextVar[Cause | None] = ContextVar("vgpud_audit_cause", default=None)


def asked_by(caller: Caller, door: str = "", container: str = "", claim: str = "") -> None:
    """From here on in this task, and in those that it starts."""
    name = door or caller.door.name.lower()
    _cause.set(Cause(name, caller.uid, caller.gid, caller.process.pid, container, claim=claim))


def by_itself(reason: str) -> None:
    """As `asked_by`, where no caller asked."""
    _cause.set(_itself(reason))


@contextmanager
def because(reason: str, pod: str = "") -> Iterator[None]:
    """What the block changes, vgpud changes by itself; after the block the cause is as before."""
    former = _cause.set(_itself(reason, pod))
    try:
        yield
    finally:
        _cause.reset(former)


@contextmanager
def of_pod(pod: str) -> Iterator[None]:
    """What the block changes is of this pod; the cause stays."""
    former = _cause.set(replace(_cause.get() or _itself(""), pod=pod))
    try:
        yield
    finally:
        _cause.reset(former)


@contextmanager
def change(name: str, **words: object) -> Iterator[Change]:
    """A line of what came of the block: done, or the error that it raises."""
    told = Change(words)
    try:
        yield told
    except VgpuError as failure:
        record(name, failure, **told.words)
        raise
    if told.made:
        record(name, None, **told.words)


def automatic(name: str, reason: str, **words: object) -> None:
    """A line for what vgpud has done by itself, in a task that an earlier caller may have started."""
    _write(name, None, _itself(reason), words)


def record(name: str, failure: VgpuError | None, **words: object) -> None:
    """`failure` is why the change was not made."""
    _write(name, failure, _cause.get() or _itself(""), words)


def _write(name: str, failure: VgpuError | None, cause: Cause, words: dict[str, object]) -> None:
    told: dict[str, object] = {key: value for key, value in words.items() if value not in (None, "")}
    for key in ("container", "pod", "claim", "reason"):
        if text := getattr(cause, key):
            told[key] = text
    told["outcome"] = "done" if failure is None else failure.code.name
    if failure is not None:
        told["why"] = failure.sentence
    (log.info if failure is None else log.warning)(
        "audit",
        message_id=Message.AUDIT,
        audit=name,
        uid=cause.uid,
        gid=cause.gid,
        pid=cause.pid,
        door=cause.door,
        **told,
    )
