"""`vgpuctl watch`: prints events line by line, and continues after a restart of the daemon."""

import time
from argparse import Namespace

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl import words
from vgpud.ctl.connect import connect
from vgpud.ctl.document import plain
from vgpud.ctl.table import clean
from vgpud.ctl.terminal import Terminal, machine
from vgpud.model.errors import ErrorCode, VgpuError

AWAY = (ErrorCode.UNREACHABLE, ErrorCode.STOPPING)
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0


def watch(arguments: Namespace, terminal: Terminal) -> int:
    """Prints events until an error or an interrupt. Raises VgpuError, also if the daemon does not answer at
    the start; if it stops answering later, waits for it.
    """
    with connect(arguments) as client:
        # The watch continues from this revision if the daemon restarts before the first event.
        now = client.get_node().revision
    follower = Follower(arguments, terminal, now if arguments.after is None else arguments.after)
    while True:
        follower.follow()


class Follower:
    """Prints each event once. `revision` is the revision of the last event printed; at first, the revision
    after which the events are wanted.
    """

    def __init__(self, arguments: Namespace, terminal: Terminal, revision: int) -> None:
        self.arguments = arguments
        self.terminal = terminal
        self.revision = revision
        self.away = False
        self.gap = False
        self.connections = 0
        self.pause_seconds = FIRST_PAUSE_SECONDS

    def follow(self) -> None:
        """Prints one stream of events to its end. Returns if the stream is to be opened again; raises
        VgpuError otherwise.
        """
        try:
            with connect(self.arguments) as client:
                if self.connections:
                    self._resume(client.get_node().revision)
                self.connections += 1
                for event in client.watch(self.revision):
                    self._print(event)
        except VgpuError as error:
            if error.code is ErrorCode.BAD_REVISION and self.connections > 1 and not self.gap:
                self.gap = True
                return
            if error.code not in AWAY:
                raise
        self._pause()

    def _resume(self, now: int) -> None:
        """After a reconnection: continues at `now`, the daemon's current revision, if the events in between
        are no longer kept or the revisions were reset.
        """
        if self.away:
            self.terminal.say("vgpud is back")
        self.away = False
        self.pause_seconds = FIRST_PAUSE_SECONDS
        if not self.gap and now >= self.revision:
            return
        if self.terminal.is_machine:
            gap = {"afterRevision": self.revision, "resumedRevision": now}
            self.terminal.write_document(machine("Gap", gap))
        self.terminal.say(f"events after revision {self.revision} are lost, going on from {now}")
        self.revision = now
        self.gap = False

    def _pause(self) -> None:
        if not self.away:
            self.terminal.say("vgpud is away, waiting for it")
        self.away = True
        time.sleep(self.pause_seconds)
        self.pause_seconds = min(self.pause_seconds * 2, LONGEST_PAUSE_SECONDS)

    def _print(self, event: pb.Event) -> None:
        self.revision = event.revision
        if self.terminal.is_machine:
            document = plain(event)
            self.terminal.write_document(machine("Event", {"type": document.pop("kind"), **document}))
            return
        moment = words.moment(event.unix_ns) or "-"
        cells = (str(event.revision), moment, event.kind, event.subject, event.sentence)
        print("  ".join(clean(cell) for cell in cells), flush=True)
