"""Data on runtime.sock: vgpud reads a message, refuses it with BAD_REQUEST, or notices that the caller has
disconnected.
"""

import asyncio
import json
import socket
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from vgpud.inject.driver import DriverFiles
from vgpud.inject.hooks import HookProgram
from vgpud.inject.oci import edited, refused
from vgpud.model.errors import ErrorCode, Exit, VgpuError
from vgpud.model.tenancy import DeviceNode, Edits, Mount
from vgpud.serve import runtime, runtime_wire

HOOK = HookProgram(Path("/usr/bin/vgpu-hook"), Path("/run/vgpud"))
NO_DRIVER = DriverFiles()
EDITS = Edits(
    env=(("CUDA_VISIBLE_DEVICES", "GPU-1"),),
    mounts=(Mount("/run/vgpud/leases/a1", "/run/vgpud/lease"),),
    device_nodes=(DeviceNode("/dev/nvidia0", major=195, minor=0),),
)

HEADS = st.builds(
    runtime_wire.REQUEST.pack,
    st.sampled_from([runtime_wire.MAGIC, 0]),
    st.integers(0, 4),
    st.integers(0, 255),
    st.integers(0, 200),
    st.integers(0, 300) | st.just(0xFFFFFFFF),
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
TEXTS = st.sampled_from(["4GiB", "-1", "50", "1e9", "quota", "all", "0", "GPU-1", "\0"]) | st.text(max_size=8)
KEYS = st.sampled_from(
    ["memory", "cores", "count", "isolation", "profile", "device", "device-name", "label", "x"]
)
ANNOTATIONS = st.dictionaries(KEYS.map("vgpud.io/{}".format), TEXTS | SCALARS, max_size=5)
VARIABLES = st.lists(st.builds("VGPU_{}={}".format, KEYS.map(str.upper), TEXTS) | SCALARS, max_size=5)
ANY_JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)
HOOKS = st.dictionaries(st.sampled_from(["createRuntime", "poststop", "x"]), ANY_JSON, max_size=2) | ANY_JSON
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "annotations": ANNOTATIONS | SCALARS,
        "mounts": ANY_JSON,
        "hooks": HOOKS,
        "process": st.fixed_dictionaries({}, optional={"env": VARIABLES | SCALARS, "user": SCALARS})
        | SCALARS,
        "linux": st.fixed_dictionaries(
            {}, optional={"devices": ANY_JSON, "resources": ANY_JSON, "uidMappings": ANY_JSON}
        )
        | SCALARS,
    },
)


def received(words: bytes) -> runtime_wire.Message | None:
    async def run() -> runtime_wire.Message | None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours, theirs:
            ours.setblocking(False)
            theirs.sendall(words)
            theirs.shutdown(socket.SHUT_WR)
            try:
                return await asyncio.wait_for(runtime_wire.receive(ours, 0), 300)
            except VgpuError as error:
                assert error.code is ErrorCode.BAD_REQUEST
            except OSError:
                pass
            return None

    return asyncio.run(run())


@given(st.binary(max_size=300) | st.tuples(HEADS, st.binary(max_size=600)).map(b"".join))
def test_any_message_of_the_runtime_socket_is_bounded(words: bytes) -> None:
    check_message(words)


def check_message(words: bytes) -> None:
    message = received(words)
    if message is not None:
        assert len(message.id.encode(errors="replace")) <= 4 * runtime_wire.MAX_ID_BYTES
        assert len(message.body) <= runtime_wire.MAX_BODY_BYTES
        assert message.process is None  # the message came without a descriptor


def understood(body: bytes) -> None:
    try:
        _, found = runtime.understood(body, True, True)
    except VgpuError as error:
        assert error.code.exit_code is Exit.BAD_ARGUMENT
        assert len(str(error).splitlines()) == 1
        return
    if found is not None:
        assert found.owner.uid >= 0 and found.pod.isprintable()
        assert found.wish.memory_bytes is None or found.wish.memory_bytes > 0
        for make in (
            lambda: edited(found.config, "a1", EDITS, NO_DRIVER, HOOK),
            lambda: refused(found.config, "no", HOOK),
        ):
            assert isinstance(json.loads(runtime.dumped(make)), dict)


@given(st.binary(max_size=200))
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b'{"linux": ' + b"9" * 5000 + b"}")
@example(b'{"annotations": {"vgpud.io/count": "' + b"9" * 5000 + b'"}}')
@example(b'{"annotations": {"vgpud.io/memory": "1GiB"}, "x": ' + b"[" * 700 + b"]" * 700 + b"}")
@example(b'{"annotations": {"vgpud.io/memory": "1GiB"}, "hooks": {"createRuntime": [3]}}')
@example(b'{"annotations": {"vgpud.io/memory": "1GiB"}, "process": {"env": [3]}}')
@example(b'{"annotations": {"vgpud.io/memory": "1GiB"}, "linux": {"resources": {"devices": {"a": 1}}}}')
def test_any_body_of_a_message_of_the_container_runtime_is_understood_or_refused(body: bytes) -> None:
    understood(body)


@given(CONFIGS)
def test_any_request_of_a_container_is_understood_or_refused(config: dict[str, object]) -> None:
    understood(json.dumps(config).encode())
