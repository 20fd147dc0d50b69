"""An eviction copies only what has changed since the last one: libvgpu compares digests of device memory."""

import json
import random
import sys

import pytest

from tests.demo.node import DemoNode, Tenant
from tests.e2e.conftest import NodeMaker
from tests.e2e.cuda import cuda_program
from tests.e2e.support import MIB, eventually, simulate, states
from tests.e2e.test_evict import EVICTS, LIMIT, end, refused, suspend
from tests.e2e.test_suspend import resume
from vgpud.lease import read_swaps
from vgpud.model.errors import ErrorCode

PIECES_MIB = (8, 150, 3)  # the second piece is larger than a chunk of libvgpu
STEPS = 30
SOME_MIB = 170  # a piece that is larger than a chunk, and others
NO_COPY = ("fault", "fail", "--function", "cuMemcpyDtoHAsync_v2", "--code", "1")

# Holds pieces of memory. Each line of input is a list: ["make", MiB], ["free", piece], ["change", piece,
# word], or ["check"], which prints whether all pieces have the contents that they should have. Most of each
# MiB is zeros, which the simulator does not store.
HOLDS = cuda_program("""
import random
pieces = []
def make(mib):
    memory, data = c.c_uint64(), random.Random(len(pieces)).randbytes(1 << 16) + bytes(15 << 16)
    call("cuMemAlloc_v2", c.byref(memory), c.c_size_t(mib << 20))
    for at in range(mib):
        call("cuMemcpyHtoD_v2", c.c_uint64(memory.value + (at << 20)), data, c.c_size_t(1 << 20))
    pieces.append((memory, mib, data, {}))  # a piece repeats a MiB, but for the MiB with changed words
def free(number):
    call("cuMemFree_v2", pieces.pop(number)[0])
def change(number, word):
    memory, _, data, changed = pieces[number]
    part, at = changed.setdefault(word >> 18, bytearray(data)), 4 * (word & (1 << 18) - 1)
    part[at:at + 4] = bytes(255 - byte for byte in part[at:at + 4])
    value = c.c_uint(int.from_bytes(part[at:at + 4], "little"))
    call("cuMemsetD32_v2", c.c_uint64(memory.value + 4 * word), value, c.c_size_t(1))
def check():
    whole, back = True, (c.c_char * (1 << 20))()
    for memory, mib, data, changed in pieces:
        for at in range(mib):
            call("cuMemcpyDtoH_v2", back, c.c_uint64(memory.value + (at << 20)), c.c_size_t(1 << 20))
            whole = whole and memoryview(back).cast("B") == changed.get(at, data)
    return whole
begin()
for mib in map(int, sys.argv[1:]): make(mib)
say(ready=True)
verbs = {"make": make, "free": free, "change": change, "check": check}
for line in sys.stdin:
    verb, *words = json.loads(line)
    say(answer=verbs[verb](*words))
""")


@pytest.fixture(scope="module")
def node(make_shared_node: NodeMaker) -> DemoNode:
    made = make_shared_node(policy=f'{EVICTS}unevictable = "keep"\n')
    made.start()
    return made


def holding(node: DemoNode) -> tuple[Tenant, str]:
    before = states(node)
    tenant = node.tenant([*LIMIT, "0"], [sys.executable, "-c", HOLDS, *map(str, PIECES_MIB)])
    assert tenant.line()["ready"]
    (name,) = states(node).keys() - before.keys()
    return tenant, name


def ask(tenant: Tenant, *words: object) -> object:
    assert tenant.process.stdin is not None
    tenant.process.stdin.write(json.dumps(words) + "\n")
    tenant.process.stdin.flush()
    return tenant.line()["answer"]


def away_and_back(node: DemoNode, name: str) -> None:
    assert suspend(node, name).state == "suspended"
    assert resume(node, name).state == "active"


def test_only_memory_with_a_changed_word_is_copied_again(node: DemoNode) -> None:
    tenant, name = holding(node)
    away_and_back(node, name)
    words = PIECES_MIB[1] * MIB // 4
    for word in (None, 0, words // 2 + 1, words - 1):
        if word is not None:
            ask(tenant, "change", 1, word)
            simulate(node, *NO_COPY)
            assert refused(node, name).code is ErrorCode.SUSPEND_FAILED, f"the change of word {word}"
            simulate(node, "fault", "clear")
            eventually(lambda: states(node)[name] == "active", "it goes on")
            away_and_back(node, name)
        simulate(node, *NO_COPY)
        away_and_back(node, name)  # no word has changed
        simulate(node, "fault", "clear")
    assert ask(tenant, "check")
    end(node, tenant, name)


def test_memory_is_copied_in_full_if_the_digests_cannot_be_computed(node: DemoNode) -> None:
    tenant, name = holding(node)
    simulate(node, "fault", "fail", "--function", "cuModuleLoadData", "--code", "221")
    for _ in range(2):
        ask(tenant, "change", 1, 77)
        away_and_back(node, name)
    assert ask(tenant, "check")
    simulate(node, "fault", "clear")
    end(node, tenant, name)


def test_no_content_is_lost_in_random_changes_between_evictions(node: DemoNode) -> None:
    tenant, name = holding(node)
    draw, sizes = random.Random(19), list(PIECES_MIB)
    for _ in range(STEPS):
        match draw.choice(["make", "free", "change", "change", "suspend", "suspend"]):
            case "make" if sum(sizes) < SOME_MIB:
                sizes.append(draw.choice([2, 5, 140]))
                ask(tenant, "make", sizes[-1])
            case "free" if len(sizes) > 1:
                piece = draw.randrange(len(sizes))
                sizes.pop(piece)
                ask(tenant, "free", piece)
            case "change":
                piece = draw.randrange(len(sizes))
                ask(tenant, "change", piece, draw.randrange(sizes[piece] * MIB // 4))
            case "suspend":
                away_and_back(node, name)
    assert ask(tenant, "check")
    (swap,) = read_swaps(node.run_dir / "leases" / name)
    assert swap.movable_bytes == sum(-(-mib // 2) * 2 for mib in sizes) * MIB
    assert swap.host_bytes <= (max(SOME_MIB, sum(sizes)) + 150 + 32) * MIB, (
        "the host's buffer does not grow without need"
    )
    end(node, tenant, name)
