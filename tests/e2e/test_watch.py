"""Watches across restarts of the daemon: every event arrives once and in order."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.demo.node import ROOT, DemoNode
from tests.e2e.conftest import NodeMaker
from tests.e2e.support import READ, client, eventually, quota, release, states
from vgpud.model.errors import ErrorCode, VgpuError


@contextmanager
def watching(node: DemoNode, *words: str) -> Iterator[list[dict[str, Any]]]:
    """Yields the output of `vgpuctl watch` so far. The watch uses the socket that every user may open."""
    process = subprocess.Popen(
        [sys.executable, "-m", "vgpud.ctl", "watch", "-o", "json", *words],
        env={**node.environment, "VGPUD_SOCKET": str(node.run_dir / READ)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    )
    seen: list[dict[str, Any]] = []

    def read_lines() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            seen.append(json.loads(line))

    reader = threading.Thread(target=read_lines)
    reader.start()
    try:
        yield seen
    finally:
        process.kill()
        process.wait()
        reader.join(300)


def subjects(seen: list[dict[str, Any]], kind: str) -> list[str]:
    return [event["subject"] for event in seen if event.get("type") == kind]


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_watch_continues_across_a_restart_of_vgpud(make_node: NodeMaker, end: str) -> None:
    node = make_node()
    node.start()
    first = quota(node).id
    with watching(node, "--after", "0") as seen:
        eventually(lambda: first in subjects(seen, "allocation_active"), "the past is told")
        getattr(node, end)()
        node.start()
        later = [quota(node).id for _ in range(3)]
        release(node, first)
        eventually(lambda: first in subjects(seen, "allocation_released"), "the watch has come back")
    assert subjects(seen, "allocation_active") == [first, *later]
    assert subjects(seen, "allocation_released") == [first]
    revisions = [event["revision"] for event in seen]
    assert revisions == sorted(set(revisions))
    assert "Gap" not in {event.get("kind") for event in seen}
    release(node, *states(node))


def test_a_watch_gets_the_events_of_earlier_daemon_runs(make_node: NodeMaker) -> None:
    """The watch reads these events from the ledger, which outlives the daemon."""
    node = make_node()
    node.start()
    with client(node) as calls:
        before = calls.get_node().revision
    made = [quota(node).id for _ in range(3)]
    node.kill()
    node.start()
    release(node, *made)
    node.kill()
    node.start()
    told = []
    with client(node, READ) as calls:
        for event in calls.watch(before):
            told.append((event.kind, event.subject))
            if len(told) == 7:
                break
    active, released = ([(f"allocation_{k}", one) for one in made] for k in ("active", "released"))
    assert told == [*active, ("vgpud_started", "vgpud"), *released]


def test_sigterm_ends_watches_and_the_daemon(make_node: NodeMaker) -> None:
    node = make_node()
    node.start()
    with client(node) as calls:
        with pytest.raises(VgpuError) as refused:
            next(iter(calls.watch(10**9)))
        assert refused.value.code is ErrorCode.BAD_REVISION, "a watch from a future revision"
        events = calls.watch()
        assert node.stop() == 0
        with pytest.raises(VgpuError) as ended:
            next(events)
    assert ended.value.code in (ErrorCode.STOPPING, ErrorCode.UNREACHABLE)
