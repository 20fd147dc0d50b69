"""The audit trail: one line for each change, written where the change is made.

A door records the caller (`asked_by`). Every change of the same task, and of the tasks that it starts, has
this caller as its cause. Changes that vgpud makes by itself have a reason instead (`by_itself`).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import structlog

from vgpud import clock
from vgpud.model.caller import Caller
from vgpud.model.errors import VgpuError
from vgpud.model.journal import Message
from vgpud.model.log_event import LogEvent
from vgpud.model.tenancy import Allocation

log = structlog.get_logger("vgpud.audit")

# The log event and the MESSAGE_ID for each change that was made (_MADE) or refused (_REFUSED). Changes that
# are in neither table have those of _AUDIT.
_MADE = {
    "allocate": (LogEvent.ALLOCATED, Message.ALLOCATED),
    "release": (LogEvent.RELEASED, Message.RELEASED),
    "resize": (LogEvent.RESIZED, Message.RESIZED),
    "fail": (LogEvent.ALLOCATION_FAILED, Message.ALLOCATION_FAILED),
    "mark": (LogEvent.ALLOCATION_MARKED, Message.MARKED),
    "drain": (LogEvent.DEVICE_DRAINED, Message.DRAINED),
    "undrain": (LogEvent.DEVICE_UNDRAINED, Message.DRAINED),
    "reload policy": (LogEvent.POLICY_RELOADED, Message.POLICY_RELOADED),
}
_REFUSED = {
    "allocate": (LogEvent.ALLOCATION_REFUSED, Message.REFUSED),
    "reload policy": (LogEvent.POLICY_REJECTED, Message.POLICY_REJECTED),
}
_AUDIT = LogEvent.AUDIT, Message.AUDIT
# Changes that vgpud makes because something is wrong. They are logged as warnings, for which alerts look.
_WARNINGS = frozenset({"fail", "mark"})


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause of a change: a caller and its door; or `reason`, if vgpud acts by itself."""

    door: str
    uid: int
    gid: int
    pid: int
    container: str = ""
    pod: str = ""  # the pod as "namespace/pod/container"
    claim: str = ""
    reason: str = ""


@dataclass(slots=True)
class Change:
    """What an audit line says of a change, besides the change's name. `made` is False if nothing had to be
    changed.
    """

    words: dict[str, object] = field(default_factory=dict)
    made: bool = True


def _itself(reason: str, pod: str = "") -> Cause:
    return Cause("vgpud", os.geteuid(), os.getegid(), os.getpid(), pod=pod, reason=reason)


_cause: ContextVar[Cause | None] = ContextVar("vgpud_audit_cause", default=None)
_running: ContextVar[Change | None] = ContextVar("vgpud_audit_change", default=None)


def asked_by(caller: Caller, door: str = "", container: str = "", claim: str = "") -> None:
    """Sets the caller as the cause of further changes in this task and in tasks that it starts."""
    name = door or caller.door.name.lower()
    _cause.set(Cause(name, caller.uid, caller.gid, caller.process.pid, container, claim=claim))


def by_itself(reason: str) -> None:
    """Sets `reason` as the cause of further changes in this task and in tasks that it starts, in place of a
    caller.
    """
    _cause.set(_itself(reason))


@contextmanager
def because(reason: str, pod: str = "") -> Iterator[None]:
    """Inside the block, changes have `reason` as their cause; afterwards the former cause holds again."""
    former = _cause.set(_itself(reason, pod))
    try:
        yield
    finally:
        _cause.reset(former)


@contextmanager
def of_pod(pod: str) -> Iterator[None]:
    """Inside the block, audit lines name the pod; the cause stays."""
    former = _cause.set(replace(_cause.get() or _itself(""), pod=pod))
    try:
        yield
    finally:
        _cause.reset(former)


def of(allocation: Allocation) -> dict[str, object]:
    """The fields of an audit line that identify an allocation, its owner, and its pod or claim."""
    workload = allocation.request.workload
    owner = allocation.request.owner.uid
    return {
        "allocation": allocation.id,
        "owner": owner,
        "pod": workload.pod_path,
        "claim": workload.claim_path,
    }


@contextmanager
def change(name: str, **words: object) -> Iterator[Change]:
    """Writes an audit line when the block ends: a change that was made, or the VgpuError of the block. Writes
    none if the block sets `made` to False or raises another exception.
    """
    told, began = Change(words), clock.now()
    outer = _running.set(told)
    try:
        yield told
    except VgpuError as failure:
        record(name, failure, **told.words)
        raise
    finally:
        _running.reset(outer)
    if told.made:
        told.words["seconds"] = round(clock.now() - began, 4)
        record(name, None, **told.words)


def did(sentence: str) -> None:
    """Sets the field `did` in the audit line of the change whose block runs now, in this task or in the task
    that started it.
    """
    if (running := _running.get()) is not None:
        running.words |= {"did": sentence}


def automatic(name: str, reason: str, **words: object) -> None:
    """Writes an audit line for a change that vgpud made by itself. The running task may have been started by
    an earlier caller, so its cause is not used.
    """
    _write(name, None, _itself(reason), words)


def record(name: str, failure: VgpuError | None, **words: object) -> None:
    """Writes an audit line; `failure` is the error if the change was not made."""
    _write(name, failure, _cause.get() or _itself(""), words)


def _write(name: str, failure: VgpuError | None, cause: Cause, words: dict[str, object]) -> None:
    told: dict[str, object] = {key: value for key, value in words.items() if value not in (None, "")}
    for key in ("container", "pod", "claim", "reason"):
        if text := getattr(cause, key):
            told[key] = text
    told["outcome"] = "done" if failure is None else failure.code.name
    if failure is not None:
        told |= {"error": failure.code.number, "why": failure.sentence}
    event, message = (_MADE if failure is None else _REFUSED).get(name, _AUDIT)
    say = log.info if failure is None and name not in _WARNINGS else log.warning
    if message == Message.POLICY_REJECTED:
        say = log.error
    say(
        event,
        message_id=message,
        audit=name,
        uid=cause.uid,
        gid=cause.gid,
        pid=cause.pid,
        door=cause.door,
        **told,
    )
