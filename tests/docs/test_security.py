"""Each bound that docs/security.md states is the one in the code, and the page defines its terms first."""

import pytest

from tests.simnode import ROOT
from tests.systemd.test_units import words
from vgpud import proc
from vgpud.inject import oci
from vgpud.lease import pages
from vgpud.model.quantity import GIB, KIB, MIB
from vgpud.node.tenants import activities, residency
from vgpud.policy.model import PlannerSettings
from vgpud.serve import calls, gate, intake, peers, relay, runtime, runtime_wire, server
from vgpud.serve.http import server as http

PAGE = (ROOT / "docs" / "security.md").read_text()
TEXT = " ".join(PAGE.split())
B, C, R = intake.Bounds(), relay.ConnectionLimits(), runtime.RuntimeLimits()
PARTS = {9.0: "a tenth", 0.2: "a fifth", 75: "three quarters"}
(STREAMS,) = [value for name, value in server._OPTIONS if name == "grpc.max_concurrent_streams"]
READS = round(1 / (intake._LEAST_READ_SECONDS * (1 + intake._READ_REST_FACTOR)))
HISTORIES = round(1 / (calls._DELIVERY_SECONDS * calls._HISTORY_DELIVERIES))
ABANDONED_MS = round(proc._LOOK_SECONDS * proc._LOOKS_HELD * 1000)
_BURST = "LogRateLimitBurst"
SENTENCES = [
    f"{PARTS[PlannerSettings().user_places_percent]} of the places for shared slices",
    f"| connections by gRPC | {C.per_uid} | {C.per_stranger} | {C.total} |",
    f"| calls under way, {STREAMS} on a connection "
    f"| {B.calls_per_user} | {B.calls_per_stranger} | {B.calls} |",
    f"| watches | {B.watches_per_user} | {B.watches_per_user} | {B.watches} |",
    f"{server.MAX_REQUEST_BYTES // KIB} KiB at most, each within {B.message_seconds:g} s "
    f"| {B.messages_per_user} |",
    f"each taken within {B.reply_seconds:g} s | {B.unread_bytes_per_user // MIB} MiB |",
    f"| connections to `metrics.sock` | {http.CONNECTIONS_PER_USER} | {http.CONNECTIONS_PER_USER} | "
    f"{http.MAX_CONNECTIONS} |",
    f"| connections to `runtime.sock` | {R.per_user} | | {R.total} |",
    f"| connections that wait to be identified "
    f"| {C.arrivals_per_user} | {C.arrivals_per_user} | {C.arrivals} |",
    f"Of more than {http.MAX_CONNECTIONS} TCP connections the oldest is closed",
    f"messages of at most {runtime_wire.MAX_BODY_BYTES // MIB} MiB",
    f"and {oci._MAX_VALUES // 1000} 000 JSON values",
    f"A message must end within {R.receive_seconds:g} s, and a reply be read within {R.reply_seconds:g} s",
    f"| calls that only read | {PARTS[intake._READ_REST_FACTOR]} | {READS} begin in a second |",
    f"one of a user at a time, or one in {B.change_seconds:g} s |",
    f"| reading `config.json`, on a thread | {PARTS[runtime._REST_FACTOR]} |",
    f"| `/metrics` and the status page | {PARTS[http._REST_FACTOR]} |",
    f"| new connections, in turns by user | {PARTS[relay._ARRIVAL_REST_FACTOR]} |",
    f"| new connections, in turns by user | {PARTS[peers._REST_FACTOR]} |",
    f"| bytes that one user sends by gRPC | {PARTS[gate._TIME_SHARE]} "
    f"| {round(gate._TIME_SHARE / gate.FRAME_SECONDS)} HTTP/2 frames in a second,",
    f"{round(1 / calls._DELIVERY_SECONDS)} in a second | {HISTORIES} watches begin in a second",
    f"while {gate.MOST_QUEUED} calls of a user wait in that queue",
    f"the listener pauses for {relay._CLOSED_PAUSE_SECONDS * 1000:g} ms",
    f"{activities._MOVE_SECONDS:g} s, and {activities._MOVE_SECONDS:g} s more for each "
    f"{activities._MOVE_BYTES // GIB} GiB",
    f"at least as long, and for {residency._BACK_OFF_SECONDS:g} s at least",
    f"on a thread, for which it waits {pages._REMOVAL_SECONDS:g} s",
    f"the kernel holds for {ABANDONED_MS} ms",
    f"or does not answer within {proc._LOOK_SECONDS * proc._LOOKS:g} s",
    f"After {proc._MOST_LEFT_OF_A_USER} such questions about processes of one user",
    f"while the {proc._MOST_LEFT_OF_A_USER} wait and for {proc._LATELY_SECONDS:g} s",
    f"vgpud {words('vgpud.service', _BURST)[0]}, the arbiter {words('vgpud-arbiter.service', _BURST)[0]}",
    f"`vgpud-mps@` {words('vgpud-mps@.service', _BURST)[0]}",
    *(f"`{name}`" for name in words("vgpud.service", "CapabilityBoundingSet")),
]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_page_states_the_bounds_that_the_code_has(sentence: str) -> None:
    assert sentence in TEXT


def test_the_page_begins_with_a_summary_and_defines_its_terms() -> None:
    first = PAGE.splitlines()[2]
    assert first == "## In short"
    assert TEXT.index("**Not held**") < TEXT.index("Not held:")


def test_cells_of_the_pages_tables_are_short() -> None:
    cells = [cell.strip() for line in PAGE.splitlines() if line.startswith("|") for cell in line.split("|")]
    assert max(map(len, cells)) <= 90
