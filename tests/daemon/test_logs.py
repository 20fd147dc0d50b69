"""Lines in the journal: fields, message ids that the message catalog explains, rate limits, and the audit
trail.
"""

import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import structlog

from tests.conditions import needs
from vgpud import logs
from vgpud.model.journal import Message

ROOT = Path(__file__).resolve().parents[2]
CATALOG = ROOT / "systemd" / "vgpud.catalog"


def entries() -> dict[str, str]:
    found = re.split(r"^-- ([0-9a-f]{32})$", CATALOG.read_text(), flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))


def test_a_log_line_becomes_journal_fields_with_a_message_id() -> None:
    event = {
        "event": "allocation_refused",
        "level": "info",
        "message_id": Message.REFUSED,
        "uid": 7,
        "gpu_uuid": "GPU-1",
        "waiting": ("device 1", "device 2"),
    }
    fields = dict(logs.journal_fields(event))
    assert fields["MESSAGE_ID"] == Message.REFUSED.value
    assert fields["VGPUD_UID"] == "7"
    assert fields["VGPUD_GPU_UUID"] == "GPU-1"
    assert fields["VGPUD_WAITING"] == "device 1, device 2"
    assert all(re.fullmatch(r"[A-Z][A-Z0-9_]*", name) for name in fields)


def test_a_line_of_the_audit_trail_has_the_message_ids_of_its_event_and_of_the_trail() -> None:
    event = {"event": "allocated", "message_id": Message.ALLOCATED, "audit": "allocate"}
    ids = [value for name, value in logs.journal_fields(event) if name == "MESSAGE_ID"]
    assert ids == [Message.ALLOCATED, Message.AUDIT]
    other = {"event": "audit", "message_id": Message.AUDIT, "audit": "suspend"}
    assert [value for name, value in logs.journal_fields(other) if name == "MESSAGE_ID"] == [Message.AUDIT]


def test_the_message_text_of_a_journal_line_has_all_fields() -> None:
    event = {"event": "allocation_refused", "level": "info", "message_id": Message.REFUSED, "uid": 7}
    why = {"why": 'no "room"', "label": "", "left_out": 2}
    assert logs.journal_message(event) == "allocation_refused: uid=7"
    text = logs.journal_message({**event, **why})
    assert text == 'allocation_refused: uid=7 why="no \\"room\\"" label="" left_out=2'
    assert logs.journal_message({"event": "ready"}) == "ready"
    listed = {"event": "x", "waiting": (), "lost": {7: "a1", 8: "a2"}}
    assert logs.journal_message(listed) == 'x: waiting="" lost="7: a1, 8: a2"'
    failed = logs.journal_message({"event": "a bug", "uid": 7, "exception": "Traceback\n  here"})
    assert failed == "a bug: uid=7\nTraceback\n  here"
    # the value of a field can neither add a line to the journal nor move the reader's cursor
    assert logs.journal_message({"event": "x", "label": "a\x1b[2J"}) == 'x: label="a\\u001b[2J"'
    assert logs.journal_message({"event": "x", "label": "Büro 1"}) == 'x: label="Büro 1"'
    assert logs.journal_message({"event": "x", "label": "a\nb"}) == 'x: label="a\\nb"'


LOGS = """
import structlog
from vgpud import logs
logs.configure(0)
try:
    raise ValueError("b\\x1b[2J")
except ValueError:
    structlog.get_logger().exception("x\\x1b[2J", container="a\\x1b[2J\\x9b2J")
"""


def test_log_lines_send_no_control_characters_to_the_terminal() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb") as read:
        subprocess.run([sys.executable, "-c", LOGS], stderr=theirs, check=True, cwd=ROOT, timeout=300)
        os.close(theirs)
        shown = read.read1().decode()
    assert "\\x1b[2J" in shown and "ValueError" in shown
    assert "\x1b[2J" not in shown and "\x9b" not in shown


def test_the_message_catalog_explains_all_message_ids_and_no_others() -> None:
    assert set(entries()) == {message.value for message in Message}
    assert len({message.value for message in Message}) == len(Message)
    for text in entries().values():
        assert re.search(r"^Subject: .+$", text, re.MULTILINE)
        assert "Defined-By: vgpud" in text
        assert len(text.split("\n\n", 1)[1].strip()) > 30


def test_the_message_catalog_names_only_fields_that_log_lines_have() -> None:
    """For a field that no line has, journalctl shows only the name."""
    source = "".join(path.read_text() for path in (ROOT / "vgpud").rglob("*.py"))
    named = set(re.findall(r"@VGPUD_([A-Z_]+)@", CATALOG.read_text()))
    given = set(re.findall(r"\b([a-z_]+)=", source)) | set(re.findall(r'"([a-z_]+)":', source))
    assert named
    assert {name for name in named if name.lower() not in given} == set()


def test_every_message_id_is_used_in_the_code() -> None:
    source = "".join(path.read_text() for path in (ROOT / "vgpud").rglob("*.py"))
    assert {message.name for message in Message if f"Message.{message.name}" not in source} == set()


def test_the_manual_names_every_message_id() -> None:
    manual = (ROOT / "docs" / "metrics.md").read_text()
    assert {message.name for message in Message if f"`{message.value}`" not in manual} == set()


@needs("systemd")
def test_journalctl_accepts_the_message_catalog(tmp_path: Path) -> None:
    folder = tmp_path / "usr/lib/systemd/catalog"
    folder.mkdir(parents=True)
    (tmp_path / "var/lib/systemd/catalog").mkdir(parents=True)
    shutil.copy(CATALOG, folder)
    made = ["journalctl", f"--root={tmp_path}", "--update-catalog"]
    subprocess.run(made, check=True, capture_output=True, timeout=300)
    asked = ["journalctl", f"--root={tmp_path}", "--dump-catalog", Message.REFUSED.value]
    shown = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=300).stdout
    assert "Subject: A request of uid @VGPUD_UID@ was refused" in shown


# --- rate limits


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def kept(thin: logs.Thinned, count: int, **fields: object) -> list[dict[str, object]]:
    found = []
    for _ in range(count):
        try:
            found.append(dict(thin(None, "info", {"event": "allocation_refused", **fields})))
        except structlog.DropEvent:
            continue
    return found


def test_one_user_cannot_fill_the_journal_nor_silence_another() -> None:
    clock = Clock()
    thin = logs.Thinned(clock)
    assert len(kept(thin, 5000, uid=1000)) == logs.LINES
    assert len(kept(thin, 5, uid=1001)) == 5
    clock.now += logs.SECONDS
    (first,) = kept(thin, 1, uid=1000)
    assert first["left_out"] == 5000 - logs.LINES
    assert "left_out" not in kept(thin, 1, uid=1000)[0]


def test_log_lines_of_many_users_are_limited_in_total() -> None:
    clock = Clock()
    thin = logs.Thinned(clock)
    assert sum(len(kept(thin, 20, uid=uid)) for uid in range(10_000)) == 10 * logs.LINES
    assert len(thin._windows) <= logs._FORGET_AT


def test_many_log_lines_about_one_refused_change_suppress_no_lines_about_another() -> None:
    thin = logs.Thinned(Clock())
    refused = {"message_id": Message.AUDIT, "outcome": "NOT_ALLOWED"}
    found = [kept(thin, 100, audit="start container", uid=uid, **refused) for uid in range(20)]
    assert sum(map(len, found)) == 10 * logs.LINES
    assert len(kept(thin, 1, audit="reload", uid=1000, **refused)) == 1


def test_audit_lines_are_never_dropped() -> None:
    thin = logs.Thinned(Clock())
    audit = {"audit": "allocate", "uid": 7}
    assert len(kept(thin, 1000, outcome="done", **audit)) == 1000
    assert len(kept(thin, 1000, outcome="OVER_QUOTA", **audit)) == logs.LINES
