"""Targets for Python parsers of foreign bytes. A target raises if the parser breaks its contract.

A target takes bytes, so its corpus is data as sent by another program and stays valid when a strategy
changes.
"""

import asyncio
import json
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.fuzz import test_claims, test_containers, test_grpc_messages, test_lease_pages, test_mig_parted
from tests.fuzz.nvml import BrokenNvml
from tests.hardware.fakenvml import uuid_of
from tests.node.world import device
from tests.policy import test_fuzz as policies
from vgpud import lease_layout as layout
from vgpud.api.gen.kubelet import deviceplugin_v1beta1_pb2 as dp
from vgpud.api.gen.kubelet import dra_v1_pb2 as dra
from vgpud.api.gen.kubelet import pluginregistration_v1_pb2 as registration
from vgpud.api.gen.kubelet import podresources_v1_pb2 as pr
from vgpud.ctl import hami, policy_cases
from vgpud.hardware.gateway import Gateway
from vgpud.inject.driver import DriverFiles, toolkit_files
from vgpud.lease import (
    ArbiterClient,
    read_activity,
    read_limits,
    read_meters,
    read_stays,
    read_swaps,
    read_usage,
)
from vgpud.model.device import MigProfile, Node
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.modes.mps import answers as mps
from vgpud.policy.kubelet import KubeletResource
from vgpud.proc import Stat, parse_stat
from vgpud.remote import relay, wire
from vgpud.serve.calls import SERVICE
from vgpud.serve.dra.api import ApiServer
from vgpud.serve.dra.publisher import Publisher
from vgpud.serve.gate import FrameCounter
from vgpud.serve.handlers import HANDLERS
from vgpud.serve.http.server import Response, Server
from vgpud.serve.kubelet.pods import held_in
from vgpud.serve.kubelet.resources import Resource, request_id, request_of
from vgpud.serve.old_files import read_state

ROOT = Path(__file__).resolve().parents[2]
LONG = 6000  # Python refuses to convert a number with so many digits


@dataclass(frozen=True)
class Target:
    """A fuzz target. `check` raises if it finds a bug. `inputs` are bytes of about the right form."""

    check: Callable[[bytes], None]
    inputs: SearchStrategy[bytes]
    runs: int = 100  # examples in a run of the suite


def refused(work: Callable[[], object], *codes: ErrorCode) -> object:
    """Returns the result of `work`, or None if `work` refuses with one of these codes and a short line. The
    code must not be BUG.
    """
    try:
        return work()
    except VgpuError as error:
        assert error.code is not ErrorCode.BUG
        assert not codes or error.code in codes, error
        assert len(str(error).splitlines()) == 1
        assert len(error.sentence) < 1100
        return None


@cache
def folder() -> Path:
    """Returns a temporary folder of this process. Python removes it when the process ends."""
    made = tempfile.TemporaryDirectory(prefix="fuzz")
    folder.made = made  # type: ignore[attr-defined]  # kept as long as the process
    return Path(made.name)


def as_json(data: bytes) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(data)
    return None


def dumped(strategy: SearchStrategy[Any]) -> SearchStrategy[bytes]:
    return strategy.map(lambda value: json.dumps(value).encode())


NUMBERS = st.integers(0, 99999).map(str) | st.sampled_from(["²", "٣", "-1", "9" * LONG, "1e9", "0x1", "nan"])
WORDS = NUMBERS | st.sampled_from(
    ["PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND", "ACTIVE", "FAULT", "2G"]
)
LINES = st.lists(st.lists(WORDS | st.text(max_size=4), max_size=8).map(" ".join), max_size=6)


def check_mps(data: bytes) -> None:
    answer = data.decode(errors="replace")  # decodes as subprocess does
    assert all(pid >= 0 for pid in mps.pids(answer))
    assert all(client.pid >= 0 and client.server_pid >= 0 for client in mps.clients(answer))
    percent = mps.share(answer)
    mps.share_agrees(33.3, percent)
    mps.is_memory(mps.memory(answer))
    mps.refusal(answer)
    assert mps.server_state(answer) in ("", "ACTIVE", "FAULT", "INITIALIZING")


def check_limits(data: bytes) -> None:
    (folder() / layout.LIMITS_FILE).write_bytes(data)
    limits = refused(lambda: read_limits(folder()), ErrorCode.LEASE_FAILED)
    assert limits is None or 0 < len(limits.devices) <= layout.MAX_DEVICES  # type: ignore[attr-defined]


def check_usage(data: bytes) -> None:
    """Applies the changes in `data` (a place of 4 bytes, a length of 1 byte, and bytes) to a usage page of
    zeros. The first bytes set the page's size.
    """
    size = (
        int.from_bytes(data[:4], "little") % (2 * layout.USAGE_SIZE)
        if data[3:4] == b"\x01"
        else layout.USAGE_SIZE
    )
    page = bytearray(layout.USAGE_SIZE)
    page[: len(test_lease_pages.HEAD)] = test_lease_pages.HEAD
    at = 4
    while at + 5 <= len(data):
        place, length = int.from_bytes(data[at : at + 4], "little") % layout.USAGE_SIZE, data[at + 4]
        written = data[at + 5 : at + 5 + length]
        page[place : place + len(written)] = written
        at += 5 + length
    (folder() / layout.USAGE_FILE).write_bytes(bytes(page[:size]))
    for read in (
        read_usage,
        read_swaps,
        read_stays,
        read_activity,
        lambda path: read_meters(path, layout.MAX_DEVICES),
    ):
        refused(lambda read=read: read(folder()), ErrorCode.LEASE_FAILED)  # type: ignore[misc]


class Arbiter(ArbiterClient):
    """An arbiter client whose arbiter gives a prepared answer."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(Path("/none"))
        self._answer = answer

    def _receive(self, message: bytes, patience_seconds: float) -> bytes:
        return self._answer[: layout.PROCESS_LIST_SIZE]


def check_arbiter_answer(data: bytes) -> None:
    client = Arbiter(data)
    for work in (lambda: client.add("a"), lambda: client.remove("a"), lambda: client.look("a")):
        refused(work, ErrorCode.HELPER_FAILED)
    pids = refused(lambda: client.list("a"), ErrorCode.HELPER_FAILED)
    assert pids is None or len(pids) <= layout.MAX_SLOTS  # type: ignore[arg-type]
    refused(lambda: client.registered("a"), ErrorCode.HELPER_FAILED)


def check_profile(profile: MigProfile) -> None:
    """Checks the bounds of a MIG profile that the planner relies on."""
    assert 0 < profile.slice_count <= 64
    assert profile.instance_count <= 64
    assert all(place.size > 0 and place.start + place.size <= 64 for place in profile.placements)
    for compute in profile.compute:
        check_profile(compute)


def check_nvml(data: bytes) -> None:
    """Takes two snapshots, because the second uses values of the first, and makes each query of a device."""
    gateway = Gateway(deadline_seconds=30.0, binding=BrokenNvml(data))
    for _ in range(2):
        node = refused(gateway.snapshot)
        for card in node.devices if isinstance(node, Node) else ():
            for profile in card.mig.profiles:
                check_profile(profile)
    for ask in (gateway.processes, gateway.vitals, gateway.gpu_instances):
        refused(partial(ask, uuid_of(0)))


def check_podresources(data: bytes) -> None:
    with suppress(DecodeError):
        for held in held_in(pr.ListPodResourcesResponse.FromString(data)):
            request_id(held.resource, held.ids)


UNITS = Resource("vgpud.io/memory-gib", KubeletResource(name="vgpud.io/memory-gib", kind="memory"))


def check_kubelet_call(data: bytes) -> None:
    """Checks Allocate calls and DRA claims of the kubelet, and its answer to a registration."""
    with suppress(DecodeError):
        for one in dp.AllocateRequest.FromString(data).container_requests:
            refused(
                lambda one=one: request_of(  # type: ignore[misc]
                    UNITS,
                    frozenset(one.devices_ids),
                    (device(0), device(1)),
                    request_id(UNITS.name, one.devices_ids),
                )
            )
    for kind in (
        dra.NodePrepareResourcesRequest,
        registration.RegistrationStatus,
        dp.PreferredAllocationRequest,
    ):
        with suppress(DecodeError):
            kind.FromString(data)


class Answered(ApiServer):
    """An API server that answers every call with the same data."""

    def __init__(self, answer: Any) -> None:
        super().__init__(Path("/none"))
        self._answer = answer

    async def _call(self, pick: Callable[[Any], Any], *arguments: Any, **options: Any) -> Any:
        return self._answer


METHODS = sorted(HANDLERS)


def check_grpc(data: bytes) -> None:
    """Checks a gRPC request. The first byte selects the method."""
    if data:
        test_grpc_messages.answered(METHODS[data[0] % len(METHODS)], data[1:])


def check_http(data: bytes) -> None:
    """Checks an HTTP request by TCP. A page is answered only if the Host header names this host."""

    async def page() -> Response:
        return Response(b"figures")

    response = asyncio.run(Server({"/metrics": page}, only_loopback=True).answer(data, 0))
    if response.body == b"figures":
        assert data.startswith((b"GET /metrics", b"HEAD /metrics"))
        assert any(name in data.lower() for name in (b"localhost", b"127.", b"[::1]"))


def check_http2(data: bytes) -> None:
    """Checks the bytes of an HTTP/2 connection: the counts of streams and frames do not depend on where reads
    cut the bytes. The first bytes say where.
    """
    cut = int.from_bytes(data[:2], "little") % (len(data) + 1)
    whole, parts = FrameCounter(), FrameCounter()
    counts = [parts.count(memoryview(part)) for part in (data[:cut], data[cut:]) if part]
    opened, frames = (sum(column) for column in zip((0, 0), *counts, strict=True))
    assert (opened, frames) == (whole.count(memoryview(data)) if data else (0, 0))
    assert opened <= frames <= len(data) // 9


def check_process(data: bytes) -> None:
    """Checks a line of /proc/PID/stat of a process that chose its own command name."""
    line = b"7 (%s) S 5" % data[:15] + b" 0" * 15 + b" 3 0 99 0\n"
    assert parse_stat(line) == Stat(7, "S", 5, 3, 99)
    parse_stat(data)


def check_api_server(data: bytes) -> None:
    api = Answered(as_json(data))

    async def publish() -> None:
        await Publisher(api, "node-1", lambda: None).publish(
            lambda _: ({"pool": {"name": "p"}, "driver": "d", "nodeName": "n"},)
        )

    async def withdraw() -> None:
        await Publisher(api, "node-1", lambda: None).withdraw()

    for work in (lambda: api.claim("n", "c"), api.minor, lambda: api.slices("d", "n"), publish, withdraw):
        refused(lambda work=work: asyncio.run(work()))  # type: ignore[misc]


def check_claim(data: bytes) -> None:
    test_claims.check_claim(as_json(data))


def check_toolkit(data: bytes) -> None:
    """Checks the output of nvidia-ctk. find_driver treats these errors like a toolkit that lists no files."""
    try:
        files = toolkit_files(data.decode(errors="replace"))
    except (ValueError, KeyError, TypeError):
        return
    assert isinstance(files, DriverFiles)
    assert all(
        isinstance(part, str) for mount in files.mounts for part in (mount.host_path, mount.container_path)
    )


def check_runtime_message(data: bytes) -> None:
    test_containers.check_message(data)


def check_yaml(data: bytes) -> None:
    path = folder() / "config.yaml"
    test_mig_parted.check(path, data)
    test_mig_parted.check(path, b"version: v1\nmig-configs:\n  c:\n  - " + data, "c")


def check_policy(data: bytes) -> None:
    policies.try_file(folder() / "policy.toml", data)


def check_policy_cases(data: bytes) -> None:
    path = folder() / "cases.toml"
    path.write_bytes(data)
    refused(lambda: policy_cases.read(path))


def check_remote(data: bytes) -> None:
    """Checks a line that a client sends to the remote door, and one that a node sends to a client."""
    call = refused(lambda: wire.decode(data), ErrorCode.BAD_REQUEST)
    assert call is None or wire.decode(wire.encode(call)) == call  # type: ignore[arg-type]
    with suppress(VgpuError):
        assert isinstance(wire.result(data), dict)


class Written:
    """A connection whose bytes are kept."""

    def __init__(self) -> None:
        self.data, self.ended = b"", False

    def write(self, data: bytes) -> None:
        self.data += data

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None: ...

    async def drain(self) -> None: ...

    async def wait_closed(self) -> None: ...


def check_remote_pieces(data: bytes) -> None:
    """Checks the data that a client sends for the engine's server, in pieces with their lengths."""
    server, client = Written(), Written()

    async def relayed() -> None:
        ended, sent = asyncio.StreamReader(), asyncio.StreamReader()
        sent.feed_data(data)
        for reader in (ended, sent):
            reader.feed_eof()
        await relay.relay((ended, cast(Any, server)), (sent, cast(Any, client)))

    asyncio.run(relayed())
    whole, at = b"", 0
    while size := int.from_bytes(data[at : at + 4]) if at + 4 <= len(data) else 0:
        whole, at = whole + data[at + 4 : at + 4 + size], at + 4 + size
    assert server.data == whole
    assert server.ended == (data[at : at + 4] == bytes(4))


def check_hami(data: bytes) -> None:
    path = folder() / "pods.yaml"
    path.write_bytes(data)
    documents = refused(lambda: hami.read_documents(str(path)))
    for document in documents or ():  # type: ignore[attr-defined]
        for target in ("runtime", "kubelet"):
            refused(lambda d=document, t=target: hami.convert_document(d, t, 80 << 30, lambda *_: None))  # type: ignore[misc]


def check_slurm(data: bytes) -> None:
    """Checks the prolog, which reads a field of squeue and passes it to vgpuctl as a number."""
    text = data.replace(b"\0", b"").decode(errors="replace")[:4096]
    done = subprocess.run(
        ["sh", "-c", f'. {ROOT}/configs/slurm/vgpud-slurm.sh; asked "$1" vgpu_memory', "sh", text],
        capture_output=True,
        check=True,
    )
    assert not done.stderr
    assert all(not line or line.isdigit() for line in done.stdout.split(b"\n")), done.stdout


def check_state_file(data: bytes) -> None:
    path = folder() / "state.json"
    path.write_bytes(data)
    assert isinstance(read_state(path), dict | None)


ANY = st.binary(max_size=400)
REMOTE = st.fixed_dictionaries(
    {
        "version": st.sampled_from([wire.VERSION, 1, None]),
        "call": st.sampled_from(["open", "attach", "status", ""]),
    },
    optional={
        name: st.text(max_size=9) | test_claims.ANY_JSON for name in ("token", "memory", "session", "key")
    },
) | st.fixed_dictionaries({"error": st.fixed_dictionaries({"number": test_claims.ANY_JSON})})
PIECES = st.lists(st.binary(max_size=60).map(lambda piece: len(piece).to_bytes(4) + piece), max_size=5).map(
    b"".join
)
SLICE = st.fixed_dictionaries(
    {},
    optional={
        "metadata": test_claims.ANY_JSON | st.fixed_dictionaries({"name": st.text(max_size=4)}),
        "spec": test_claims.ANY_JSON
        | st.fixed_dictionaries({"pool": st.fixed_dictionaries({"generation": test_claims.SCALARS})}),
    },
)
TRES = st.lists(
    st.builds(
        "{}vgpu_memory{}{}".format,
        st.sampled_from(["gres/", "gres:", ""]),
        st.sampled_from([":", "=", ""]),
        NUMBERS,
    )
    | st.text(max_size=6),
    max_size=4,
).map(",".join)

HTTP = st.builds(
    "{} {} HTTP/1.{}\r\n{}\r\n\r\n".format,
    st.sampled_from(["GET", "HEAD", "POST", ""]),
    st.sampled_from(["/metrics", "/metrics?a", "/", "http://localhost/metrics"]),
    NUMBERS,
    st.lists(
        st.builds(
            "{}:{}{}".format,
            st.sampled_from(["Host", "host", "X", "Host "]),
            st.sampled_from([" ", "", "\t", "\n"]),
            st.sampled_from(["localhost", "127.0.0.1:80", "[::1]", "a.example", "localhost.a"])
            | st.text(max_size=4),
        ),
        max_size=3,
    ).map("\r\n".join),
).map(lambda text: text.encode(errors="replace"))
GRPC = st.sampled_from(METHODS).flatmap(
    lambda name: test_grpc_messages.requests(GetMessageClass(SERVICE.methods_by_name[name].input_type))
)

TARGETS = {
    "api-server": Target(
        check_api_server,
        dumped(st.fixed_dictionaries({"items": st.lists(SLICE, max_size=2)}) | SLICE | test_claims.ANY_JSON),
        runs=50,
    ),
    "arbiter-answer": Target(
        check_arbiter_answer,
        st.tuples(
            st.sampled_from([19, 20, 21, 0]).map(lambda kind: kind.to_bytes(4, "little")),
            st.binary(max_size=1200),
        ).map(b"".join),
    ),
    "cdi-toolkit": Target(
        check_toolkit,
        dumped(
            st.fixed_dictionaries(
                {
                    "containerEdits": st.fixed_dictionaries(
                        {}, optional={"mounts": test_claims.ANY_JSON, "hooks": test_claims.ANY_JSON}
                    )
                    | st.fixed_dictionaries(
                        {
                            "mounts": st.lists(
                                st.fixed_dictionaries(
                                    {"hostPath": test_claims.SCALARS, "containerPath": test_claims.SCALARS}
                                )
                            )
                        }
                    )
                }
            )
        ),
    ),
    "claim": Target(check_claim, dumped(test_claims.CLAIMS | test_claims.ANY_JSON)),
    "grpc": Target(check_grpc, st.tuples(st.binary(min_size=1, max_size=1), GRPC).map(b"".join), runs=20),
    "hami": Target(check_hami, dumped(test_claims.ANY_JSON) | ANY),
    "http": Target(check_http, HTTP | ANY),
    "http2": Target(check_http2, ANY),
    "kubelet": Target(check_kubelet_call, ANY),
    "limits": Target(check_limits, ANY.map(lambda tail: test_lease_pages.HEAD + tail) | ANY),
    "mig-parted": Target(check_yaml, dumped(test_mig_parted.FILE | test_mig_parted.JSON) | ANY),
    "mps": Target(check_mps, LINES.map(lambda lines: "\n".join(lines).encode(errors="replace")) | ANY),
    "nvml": Target(check_nvml, ANY, runs=30),
    "oci-config": Target(test_containers.understood, dumped(test_containers.CONFIGS) | ANY),
    "podresources": Target(check_podresources, ANY),
    "policy": Target(
        check_policy,
        ANY
        | st.lists(policies.LINES | st.sampled_from(policies.HEADERS), max_size=8).map(
            lambda lines: f"version = 1\n{''.join(lines)}".encode()
        ),
    ),
    "policy-cases": Target(check_policy_cases, ANY),
    "process": Target(check_process, ANY),
    "remote": Target(check_remote, dumped(REMOTE | test_claims.ANY_JSON) | ANY),
    "remote-pieces": Target(check_remote_pieces, PIECES | ANY, runs=40),
    "runtime-message": Target(
        check_runtime_message, st.tuples(test_containers.HEADS, st.binary(max_size=300)).map(b"".join) | ANY
    ),
    "slurm": Target(check_slurm, TRES.map(lambda text: text.encode(errors="replace")), runs=20),
    "state-file": Target(check_state_file, dumped(test_claims.ANY_JSON) | ANY),
    "usage": Target(check_usage, ANY),
}
