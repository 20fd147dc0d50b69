"""The audit trail: who asked for which change, through which door, and what came of it: a line each."""

import structlog
from google.protobuf.message import Message as Sent
from google.protobuf.text_format import MessageToString

from vgpud.model.caller import Caller
from vgpud.model.errors import VgpuError
from vgpud.model.journal import Message

log = structlog.get_logger("vgpud.audit")

_LONGEST = 400


def record(call: str, caller: Caller, asked: Sent | None, failure: VgpuError | None) -> None:
    """When the change is made or refused; `asked` is None where the door refused it unread."""
    outcome = {"outcome": "done"}
    if failure is not None:
        outcome = {"outcome": failure.code.name, "why": failure.sentence}
    level = log.info if failure is None else log.warning
    level(
        "audit",
        message_id=Message.AUDIT,
        audit=call,
        uid=caller.uid,
        gid=caller.gid,
        pid=caller.process.pid,
        door=caller.door.name.lower(),
        asked=_words(asked),
        **outcome,
    )


def _words(asked: Sent | None) -> str:
    """The request on one line; texts of callers come escaped."""
    if asked is None:
        return ""
    text = MessageToString(asked, as_one_line=True)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
