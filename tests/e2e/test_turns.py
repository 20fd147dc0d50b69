"""Turns of tenants on a device: libvgpu swaps a tenant's memory out to the host and back in."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.conditions import needs
from tests.demo.node import BUILD, DemoNode, Tenant
from tests.e2e.conftest import NodeMaker
from tests.e2e.cuda import cuda_program
from tests.e2e.support import MIB, client, eventually, simulate, states, was_killed
from tests.e2e.test_idle import TURNS, ask, shown
from vgpud.lease import (
    ArbiterClient,
    LeaseMemory,
    SwapPhase,
    read_activity,
    read_limits,
    read_swaps,
    read_usage,
    update_limits,
)
from vgpud.planner.kept import MARGIN_BYTES, SHARE_ALL

MARGIN_MIB = MARGIN_BYTES >> 20
ROOMY = f'{TURNS}\n[pool]\nhost_memory_reserve = "1MiB"\n'
SIZE_MIB = 8

# Each thread keeps a number in its own device memory, changes it by memsets, copies and frees, and checks it
# at each step. Every call needs its memory on the device. Prints the progress of all threads for each line of
# input.
RACES = cuda_program("""
import threading
begin()
sizes, threads = [2 << 20, 5 << 20, 300 << 10], 3
rounds, wrong, addresses, ended = [0] * threads, [], [set() for _ in range(threads)], threading.Event()
def work(number):
    call("cuCtxSetCurrent", context)
    stream, memory, back, more = c.c_void_p(), c.c_uint64(), (c.c_uint32 * 256)(), c.c_uint64()
    call("cuStreamCreate", c.byref(stream), 1)
    size = sizes[number]
    call("cuMemAlloc_v2", c.byref(memory), c.c_size_t(size))
    addresses[number].add(memory.value)
    while not ended.is_set():
        rounds[number] += 1
        mark = rounds[number] << 4 | number
        call("cuMemsetD32Async", memory, c.c_uint(mark), c.c_size_t(size // 4), stream)
        call("cuMemAlloc_v2", c.byref(more), c.c_size_t(size))
        call("cuMemcpyDtoDAsync_v2", more, memory, c.c_size_t(size), stream)
        call("cuMemcpyDtoHAsync_v2", back, c.c_uint64(more.value + size - 1024), c.c_size_t(1024), stream)
        call("cuStreamSynchronize", stream)
        if any(word != mark for word in back): wrong.append((number, mark, list(back)[:4]))
        call("cuMemFree_v2", more)
pool = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
for one in pool: one.start()
say(ready=True)
for line in sys.stdin:
    say(rounds=list(rounds), wrong=wrong[:3], alive=sum(one.is_alive() for one in pool))
ended.set()
""")

# Holds a pattern in pieces of several sizes; the second piece may be larger than a chunk of libvgpu. Prints
# for each line of input their addresses and whether the pattern is unchanged.
HOLD = cuda_program("""
held = []
begin()
second_mib = int(sys.argv[2]) if len(sys.argv) > 2 else 6
for size in [int(sys.argv[1]) << 20, second_mib << 20, 3 << 20, 2 << 20, 4096]:
    # a period of 251 bytes divides no page, and pieces of different sizes begin at different bytes of it
    memory, data = c.c_uint64(), (bytes(range(251)) * 4179)[size % 249:][:min(size, 1 << 20)]
    call("cuMemAlloc_v2", c.byref(memory), c.c_size_t(size))
    for at in range(0, size, 64 << 20):
        call("cuMemcpyHtoD_v2", c.c_uint64(memory.value + at), data, c.c_size_t(min(len(data), size - at)))
    held.append((memory, size, data))
say(ready=True)
for line in sys.stdin:
    whole = True
    for memory, size, data in held:
        for at in range(0, size, 64 << 20):
            back = c.create_string_buffer(min(len(data), size - at))
            call("cuMemcpyDtoH_v2", back, c.c_uint64(memory.value + at), c.c_size_t(len(back)))
            whole = whole and back.raw == data[:len(back)]
    base, bytes_, second = c.c_uint64(), c.c_size_t(), held[1][0].value
    last = second + (second_mib - 1 << 20)
    call("cuMemGetAddressRange_v2", c.byref(base), c.byref(bytes_), c.c_uint64(last))
    whole = whole and base.value == second and bytes_.value == second_mib << 20
    say(whole=whole, at=[memory.value for memory, _, _ in held])
""")
# Allocates pieces of many sizes until a refusal, frees half of them, and destroys its context with the rest
LIMITS = cuda_program("""
pitch = c.c_size_t()
call("cuInit", 0)
def fill():
    held, size = [], 1
    while True:
        memory = c.c_uint64()
        asked = (size % 5) * (20 << 20) + (2 << 20) + size
        code = u.cuMemAlloc_v2(c.byref(memory), c.c_size_t(asked))
        if code: return held, asked, code
        held.append((memory, asked))
        size += 1
for line in sys.stdin:
    call("cuCtxCreate_v2", c.byref(context), 0, 0)
    held, refused, code = fill()
    rows = c.c_uint64()
    pages = sum(-(-asked >> 21) * 2 for _, asked in held)
    say(mib=pages, refused=-(-refused >> 21) * 2, code=code)
    sys.stdin.readline()
    for memory, _ in held[::2]: call("cuMemFree_v2", memory)
    call("cuMemAllocPitch_v2", c.byref(rows), c.byref(pitch), c.c_size_t(5000), c.c_size_t(1000), 16)
    say(mib=sum(-(-asked >> 21) * 2 for _, asked in held[1::2]) + 6, pitch=pitch.value)
    sys.stdin.readline()
    call("cuCtxDestroy_v2", context)
    say(ended=True)
""")
# Prefers the first NUMA node for a piece of its memory (mbind)
PREFERS = """
import ctypes as c, mmap, platform, sys
memory, nodes = mmap.mmap(-1, 1 << 21), (c.c_ulong * 16)(1)
at, number = c.addressof(c.c_char.from_buffer(memory)), {"x86_64": 237, "aarch64": 235}[platform.machine()]
c.CDLL(None).syscall(number, c.c_void_p(at), c.c_ulong(1 << 21), 1, nodes, c.c_ulong(1024), 0)
print(flush=True)
sys.stdin.readline()
"""
# Runs a kernel that ends when the next line of input arrives.
SPINS = cuda_program("""
memory, module, kernel = c.c_uint64(), c.c_void_p(), c.c_void_p()
word, says = c.c_uint64(), c.c_uint64()
PTX = b".version 7.8\\n.target sm_80\\n// vgpu-sim-waits\\n"
PTX += b".visible .entry work(.param .u64 a, .param .u64 b, .param .u64 c)\\n{\\nret;\\n}\\n"
begin()
call("cuMemAlloc_v2", c.byref(memory), c.c_size_t(8 << 20))
call("cuModuleLoadData", c.byref(module), PTX)
call("cuModuleGetFunction", c.byref(kernel), module, b"work")
words = [c.c_uint64(c.addressof(word)), c.c_uint64(1), c.c_uint64(c.addressof(says))]
given = (c.c_void_p * 3)(*[c.addressof(one) for one in words])
call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, None, given, None)
say(spins=True)
sys.stdin.readline()
word.value = 1
call("cuCtxSynchronize")
say(done=True)
sys.stdin.readline()
""")
FUTEX = ("202", "98")  # the number of the system call futex(2) on x86-64 and on aarch64
GRAIN_MIB = 32  # libvgpu makes host buffers of whole multiples of this size
LARGE_MIB = 130  # MiB; more than one chunk of libvgpu
HELD_MIB = SIZE_MIB + LARGE_MIB + 4 + 2  # MiB in the tenant's whole pages; the small piece is not included
OWN_MIB = 4  # MiB of device memory that libvgpu's copy stream needs
# MiB. A swapped-out tenant uses less (its context and what cannot move), by at most MARGIN_MIB.
CONTEXT_MIB = 700


@pytest.fixture(scope="module")
def still(make_shared_node: NodeMaker) -> DemoNode:
    """A node whose turns last one hour, so that only the test swaps memory out."""
    node = make_shared_node(policy=ROOMY.replace("500ms", "1h"))
    node.start()
    return node


@pytest.fixture(scope="module")
def turns(make_shared_node: NodeMaker) -> DemoNode:
    node = make_shared_node(policy=ROOMY)
    node.start()
    return node


@pytest.fixture
def cut_node(make_node: NodeMaker) -> Iterator[DemoNode]:
    node = make_node(policy=ROOMY)
    yield node
    node.stop()


def all_but(node: DemoNode, mib: int) -> int:
    """A limit in MiB that leaves `mib` MiB of the device's memory unallocated."""
    with client(node) as calls:
        device = calls.list_devices().devices[0]
    return int(device.memory_total_bytes - device.memory_reserved_bytes) // MIB - mib


def tenant(node: DemoNode, program: str, *words: str, limit_mib: int = 0) -> tuple[Tenant, str]:
    """Starts a tenant. With the default limit two tenants fit only if the movable memory of one of them is
    swapped out.
    """
    before = states(node)
    limit_mib = limit_mib or all_but(node, CONTEXT_MIB)
    asked = ["--isolation", "quota", "--memory", f"{limit_mib}MiB", "--device", "0"]
    made = node.tenant(asked, [sys.executable, "-c", program, *words])
    eventually(lambda: states(node).keys() - before.keys(), "it is there")
    (name,) = states(node).keys() - before.keys()
    return made, name


def answer(one: Tenant) -> dict[str, Any]:
    ask(one)
    return dict(one.line())


def close(*all_: Tenant) -> None:
    for one in all_:
        assert one.process.stdin is not None
        one.process.stdin.close()


def put(node: DemoNode, name: str, out: bool, keep_share: int = 0) -> None:
    """Writes the order to swap out or in into the lease, as vgpud does."""
    folder = node.run_dir / "leases" / name
    memory = LeaseMemory.OUT if out else LeaseMemory.HERE
    update_limits(folder, read_limits(folder).devices, away=out, memory=memory, keep_share=keep_share)
    ArbiterClient(node.run_dir / "arbiter" / "control.sock", 300).look(name)


def phases(node: DemoNode, name: str) -> set[SwapPhase]:
    return {swap.phase for swap in read_swaps(node.run_dir / "leases" / name)}


def reads_the_order_again(node: DemoNode, name: str) -> None:
    """Repeats the order to swap out, and waits until the tenant's libvgpu has reported after it."""

    def reports() -> int:
        return sum(times for _, times in read_activity(node.run_dir / "leases" / name).answers)

    before = reports()
    put(node, name, True)
    eventually(lambda: reports() > before, "libvgpu reports")


def follows(node: DemoNode, name: str, out: bool) -> None:
    put(node, name, out)
    wanted = SwapPhase.OUT if out else SwapPhase.HERE
    eventually(lambda: phases(node, name) == {wanted}, f"all is {wanted.name}")


def simulated(node: DemoNode) -> dict[str, Any]:
    """The state of the simulated driver."""
    simctl = BUILD / "sim" / "bin" / "vgpu-simctl"
    return dict(json.loads(subprocess.check_output([simctl, node.environment["VGPU_SIM_STATE"], "dump"])))


def used_mib(node: DemoNode) -> int:
    """MiB in use on the simulated card."""
    return int(simulated(node)["devices"][0]["memory_used"]) // MIB


def waits_for_a_lock(one: Tenant) -> bool:
    words = Path(f"/proc/{one.process.pid}/syscall").read_text().split()
    return words[0] in FUTEX


def test_a_swapped_in_tenant_has_its_contents_at_the_same_addresses(still: DemoNode) -> None:
    one, name = tenant(still, HOLD, str(SIZE_MIB), str(LARGE_MIB))
    one.line()
    before = answer(one)
    assert before["whole"]
    lease = still.run_dir / "leases" / name
    (swap,) = read_swaps(lease)
    assert swap.movable_bytes == HELD_MIB * MIB
    # besides HELD_MIB the tenant uses the 2 MiB page of the small piece
    assert read_usage(lease).device(0).used_bytes == (HELD_MIB + 2) * MIB
    full = used_mib(still)
    for _ in range(2):
        follows(still, name, True)
        eventually(lambda: used_mib(still) <= full - HELD_MIB + OWN_MIB, "NVML shows what stays")
        follows(still, name, False)
        assert answer(one) == before
    close(one)
    eventually(lambda: not states(still), "it ends")


def test_a_swapped_out_tenant_keeps_as_much_memory_on_the_card_as_it_is_allowed(still: DemoNode) -> None:
    one, name = tenant(still, HOLD, "260", str(LARGE_MIB))
    one.line()
    before = answer(one)
    lease = still.run_dir / "leases" / name
    (held,) = read_swaps(lease)
    full = used_mib(still)

    def keeps(share: int) -> int:
        """Lets `share` of the movable memory (in 1/10000) stay on the device, and waits. Returns the MiB that
        stay, in whole chunks.
        """
        put(still, name, True, share)
        allowed = held.movable_bytes * share // 10000

        def stands() -> bool:
            (now,) = read_swaps(lease)
            return now.phase is SwapPhase.OUT and now.kept_bytes <= allowed

        eventually(stands, "it is out but for that")
        (now,) = read_swaps(lease)
        assert now.kept_bytes > allowed - 2 * (128 << 20)
        gone = (held.movable_bytes - now.kept_bytes) // MIB
        eventually(lambda: full - gone <= used_mib(still) <= full - gone + OWN_MIB, "NVML shows it")
        return now.kept_bytes // MIB

    shares = [keeps(share) for share in (10000, 7000, 3000, 3000, 0)]
    assert shares[0] == held.movable_bytes // MIB
    assert shares == sorted(shares, reverse=True) and shares[1] > shares[2] > shares[4] == 0
    follows(still, name, False)
    assert answer(one) == before
    keeps(6000)
    follows(still, name, False)
    assert answer(one) == before
    simulate(still, "fault", "fail", "--function", "cuMemcpyDtoHAsync_v2", "--code", "2", "--count", "2")
    keeps(10000)
    # here all memory may stay, so the order to swap out must be repeated with a smaller share until all
    # memory is out
    keeps(5000)
    simulate(still, "fault", "clear")
    follows(still, name, False)
    assert answer(one) == before
    close(one)
    eventually(lambda: not states(still), "it ends")


def test_calls_of_many_threads_race_with_swaps_without_loss(still: DemoNode) -> None:
    one, name = tenant(still, RACES)
    one.line()
    seen = [0, 0, 0]
    for _ in range(6):
        follows(still, name, True)
        follows(still, name, False)

        def went_on(seen: list[int] = seen) -> bool:
            said = answer(one)
            assert said["wrong"] == [] and said["alive"] == 3, said
            return all(b > a for a, b in zip(seen, said["rounds"], strict=True))

        eventually(went_on, "each thread goes on")
        seen = answer(one)["rounds"]
    close(one)
    eventually(lambda: not states(still), "it ends")


def test_a_kernel_that_does_not_end_holds_up_the_swap_out(still: DemoNode) -> None:
    one, name = tenant(still, SPINS, limit_mib=1024)
    assert one.line()["spins"]
    put(still, name, True)
    eventually(lambda: phases(still, name) == {SwapPhase.DRAINING}, "it waits for the kernel")
    for _ in range(3):
        reads_the_order_again(still, name)
        assert phases(still, name) == {SwapPhase.DRAINING}
    follows(still, name, False)
    assert answer(one)["done"]  # the tenant's calls no longer wait
    follows(still, name, True)
    follows(still, name, False)
    close(one)
    eventually(lambda: not states(still), "it ends")


def test_the_limit_of_evictable_memory_is_exact(still: DemoNode) -> None:
    one, name = tenant(still, LIMITS, limit_mib=1024)
    lease = still.run_dir / "leases" / name

    def charged() -> int:
        return sum(process.devices[0].used_bytes for process in read_usage(lease).processes) // MIB

    for _ in range(2):
        full = answer(one)
        context = read_usage(lease).device(0).context_bytes // MIB
        assert full["code"] == 2
        assert charged() == full["mib"]
        assert charged() + context <= 1024 < charged() + context + int(str(full["refused"]))
        half = answer(one)
        assert (charged(), half["pitch"]) == (half["mib"], 5120)
        assert sum(swap.movable_bytes for swap in read_swaps(lease)) == charged() * MIB
        assert answer(one)["ended"]
        assert charged() == 0
        assert sum(swap.movable_bytes for swap in read_swaps(lease)) == 0
    close(one)
    eventually(lambda: not states(still), "it ends")


def test_a_swap_that_is_revoked_in_progress_is_undone(still: DemoNode) -> None:
    one, name = tenant(still, HOLD, str(SIZE_MIB))
    one.line()
    for pause in (0.0, 0.002, 0.01, 0.03):
        put(still, name, True)
        time.sleep(pause)
        follows(still, name, False)
        assert answer(one)["whole"]
        follows(still, name, True)
        put(still, name, False)
        time.sleep(pause)
        follows(still, name, True)
        follows(still, name, False)
        assert answer(one)["whole"]
    close(one)
    eventually(lambda: not states(still), "it ends")


def test_a_refused_swap_out_leaves_the_tenants_memory_in_place(still: DemoNode) -> None:
    one, name = tenant(still, HOLD, str(SIZE_MIB))
    one.line()
    for function in ("cuMemHostRegister_v2", "cuMemcpyDtoHAsync_v2", "cuEventRecord"):
        simulate(still, "fault", "fail", "--function", function, "--code", "304", "--count", "1")
        put(still, name, True)
        eventually(lambda: phases(still, name) == {SwapPhase.REFUSED}, "it says so")
        assert {swap.error for swap in read_swaps(still.run_dir / "leases" / name)} == {304}
        follows(still, name, False)
        assert answer(one)["whole"], function
    follows(still, name, True)
    follows(still, name, False)
    assert answer(one)["whole"]
    close(one)
    eventually(lambda: not states(still), "it ends")


def test_a_swap_in_that_fails_for_want_of_memory_is_tried_again(still: DemoNode) -> None:
    one, name = tenant(still, HOLD, str(SIZE_MIB))
    one.line()
    for function in ("cuMemCreate", "cuMemcpyHtoDAsync_v2", "cuMemSetAccess"):
        follows(still, name, True)
        simulate(still, "fault", "fail", "--function", function, "--code", "2", "--count", "3")
        follows(still, name, False)
        assert answer(one)["whole"], function
    close(one)
    eventually(lambda: not states(still), "it ends")


def test_two_tenants_take_turns_without_the_drivers_checkpoint(turns: DemoNode) -> None:
    simulate(turns, "fault", "fail", "--function", "cuCheckpointProcess*", "--code", "801")
    first, _one = tenant(turns, HOLD, str(SIZE_MIB), str(LARGE_MIB))
    second, _two = tenant(turns, HOLD, str(SIZE_MIB), str(LARGE_MIB))
    first.line()
    second.line()  # the second tenant prints this line during its first turn

    def went_four_times() -> bool:
        # a tenant whose suspension has begun may still answer, so that not every answer needs a turn
        assert answer(first)["whole"]
        assert answer(second)["whole"]
        log = turns.log.read_text()
        gone = sum(map(log.count, ("swapped out at the end of its turn", "evicted by libvgpu as idle")))
        return gone >= 4

    eventually(went_four_times, "the tenants take turns")
    assert "swap_out_failed_suspending_by_driver" not in turns.log.read_text()
    assert list(states(turns).values()).count("active") <= 1
    close(first, second)
    eventually(lambda: not states(turns), "both end")
    simulate(turns, "fault", "clear")


def made_mib(node: DemoNode, name: str) -> int:
    (swap,) = read_swaps(node.run_dir / "leases" / name)
    return swap.host_bytes // MIB


def prefers_first_node(pid: int) -> bool:
    """Returns whether the process prefers the first NUMA node for some of its memory."""
    maps = Path(f"/proc/{pid}/numa_maps")
    return maps.exists() and "prefer:0" in maps.read_text()


def may_prefer_a_node() -> bool:
    """Returns whether this machine lets a process prefer a NUMA node. A kernel without NUMA and some seccomp
    filters do not.
    """
    with subprocess.Popen(
        [sys.executable, "-c", PREFERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as one:
        assert one.stdout is not None
        one.stdout.readline()
        return prefers_first_node(one.pid)


def test_host_buffers_for_an_eviction_are_made_while_another_tenant_waits(still: DemoNode) -> None:
    """Without host buffers made in advance, the first eviction of a large tenant takes ten times as long as
    later ones.
    """
    first, one = tenant(still, HOLD, str(4 * SIZE_MIB), str(LARGE_MIB))
    first.line()
    assert made_mib(still, one) == 0
    second, two = tenant(still, HOLD, str(SIZE_MIB))
    eventually(lambda: made_mib(still, one) > 0.9 * (HELD_MIB + 3 * SIZE_MIB), "the buffers are made")
    assert states(still) == {one: "active", two: "suspended"}
    assert read_limits(still.run_dir / "leases" / one).memory is LeaseMemory.SOON
    assert prefers_first_node(first.process.pid) == may_prefer_a_node(), "the node of the device"
    assert answer(first)["whole"]
    second.process.kill()
    second.end()
    eventually(
        lambda: read_limits(still.run_dir / "leases" / one).memory is LeaseMemory.HERE,
        "the order is taken back",
    )
    put(still, one, out=True)
    follows(still, one, out=True)
    put(still, one, out=False)
    follows(still, one, out=False)
    assert answer(first)["whole"]
    close(first)
    eventually(lambda: not states(still), "both end")


def test_no_host_buffer_is_made_for_memory_that_stays_on_the_device(still: DemoNode) -> None:
    """Page-locking memory slows a running program. The rest of the buffer is made when it has to leave."""
    one, name = tenant(still, HOLD, str(SIZE_MIB), str(LARGE_MIB))
    one.line()
    lease = still.run_dir / "leases" / name
    half = SHARE_ALL // 2
    update_limits(lease, read_limits(lease).devices, memory=LeaseMemory.SOON, keep_share=half)
    eventually(lambda: made_mib(still, name) > 0, "a buffer is made")
    assert HELD_MIB // 2 <= made_mib(still, name) < HELD_MIB // 2 + GRAIN_MIB
    put(still, name, out=True)
    follows(still, name, out=True)
    assert made_mib(still, name) >= HELD_MIB
    follows(still, name, out=False)
    assert answer(one)["whole"]
    close(one)
    eventually(lambda: not states(still), "it ends")


@needs("ptrace")
def test_the_end_of_a_context_waits_for_host_buffers_that_are_being_made_in_it(still: DemoNode) -> None:
    """CUDA requires that no other thread uses a context while the context is destroyed. Therefore the
    destruction waits for libvgpu's thread that makes host buffers.
    """
    one, name = tenant(still, LIMITS, limit_mib=2048)
    lease = still.run_dir / "leases" / name
    answer(one)  # a new context, filled up to the limit
    answer(one)
    # the driver's call hangs as long as this fault is set
    simulate(still, "fault", "fail", "--function", "none", "--code", "1")
    simulate(still, "fault", "hang", "--function", "cuMemHostRegister_v2", "--count", "1")
    update_limits(lease, read_limits(lease).devices, memory=LeaseMemory.SOON)
    eventually(lambda: len(simulated(still)["faults"]) == 1, "a buffer is being made")
    ask(one)  # makes the tenant destroy its context
    eventually(lambda: waits_for_a_lock(one), "the call waits")
    assert [use["contexts"] for process in simulated(still)["processes"] for use in process["uses"]] == [1]
    simulate(still, "fault", "clear")
    assert one.line()["ended"]
    update_limits(lease, read_limits(lease).devices, memory=LeaseMemory.HERE)
    answer(one)  # the tenant makes a second context and destroys it, now without the hang
    update_limits(lease, read_limits(lease).devices, memory=LeaseMemory.SOON)
    eventually(lambda: made_mib(still, name) > 0, "a part of the buffers is made")
    answer(one)
    assert answer(one)["ended"]
    close(one)
    eventually(lambda: not states(still), "it ends")


@needs("driver-580")
def test_a_refused_swap_out_falls_back_to_the_drivers_checkpoint(turns: DemoNode) -> None:
    first, _one = tenant(turns, HOLD, str(SIZE_MIB))
    first.line()
    before = turns.log.read_text().count("swap_out_failed_suspending_by_driver")
    simulate(turns, "fault", "fail", "--function", "cuMemHostRegister_v2", "--code", "304")
    second, _two = tenant(turns, HOLD, str(SIZE_MIB))
    second.line()
    simulate(turns, "fault", "clear")
    assert turns.log.read_text().count("swap_out_failed_suspending_by_driver") > before
    for each in (first, second):
        assert answer(each)["whole"]
    close(first, second)
    eventually(lambda: not states(turns), "both end")


def test_a_tenant_killed_while_swapped_out_leaves_the_other_tenant_unharmed(turns: DemoNode) -> None:
    first, one = tenant(turns, HOLD, str(SIZE_MIB))
    first.line()
    second, two = tenant(turns, HOLD, str(SIZE_MIB))
    second.line()
    eventually(lambda: states(turns)[one] == "suspended", "the first is out")
    first.process.kill()
    eventually(lambda: one not in states(turns), "it is released")
    assert answer(second)["whole"]
    # vgpud may already have begun to suspend the second tenant for the next turn of the killed tenant
    eventually(lambda: states(turns) == {two: "active"}, "the other tenant is on the device")
    close(second)
    eventually(lambda: not states(turns), "it ends")


def kept_mib(node: DemoNode, name: str) -> int:
    return sum(swap.kept_bytes for swap in read_swaps(node.run_dir / "leases" / name)) // MIB


def swapped_away(node: DemoNode, name: str) -> bool:
    return "swapped out by libvgpu" in shown(node, name).standing


def test_a_suspension_by_hand_also_takes_memory_that_a_swap_out_left_on_the_card(turns: DemoNode) -> None:
    limit = all_but(turns, CONTEXT_MIB + MARGIN_MIB + 300)
    first, one = tenant(turns, HOLD, "500", limit_mib=limit)
    first.line()
    second, two = tenant(turns, HOLD, str(SIZE_MIB), limit_mib=limit)
    second.line()
    eventually(lambda: swapped_away(turns, one), "the first is out")
    assert kept_mib(turns, one) > 0
    with client(turns) as calls:
        before = calls.get_allocation(one)
        gone = calls.suspend(one)
    assert (gone.cause, kept_mib(turns, one)) == ("hand", 0)
    assert gone.suspended_bytes == pytest.approx(before.suspended_bytes, abs=8 * MIB)
    assert "until others need the room" not in shown(turns, one).standing
    close(second)
    eventually(lambda: two not in states(turns), "it ends")
    with client(turns) as calls:
        calls.resume(one)
    assert answer(first)["whole"]
    close(first)
    eventually(lambda: not states(turns), "both end")


def is_killed_in_a_turn(node: DemoNode, point: str, *tenants: Tenant) -> None:
    """Starts vgpud and gives each tenant one more call. The turns that these calls need kill vgpud; those of
    earlier calls may kill it during its start.
    """
    with suppress(RuntimeError):
        node.start(fault_point=point)
    for one in tenants:
        ask(one)
    was_killed(node)


def test_turns_cut_after_any_step_converge_at_the_next_start(cut_node: DemoNode) -> None:
    """vgpud is killed after a step of a turn, and the next start continues. Only these four steps are tested,
    because the other steps of a turn write no record that the next start could read.
    """
    node = cut_node
    node.start()
    tenants = [tenant(node, HOLD, str(SIZE_MIB))[0]]
    tenants[0].line()
    tenants.append(tenant(node, HOLD, str(SIZE_MIB))[0])
    tenants[1].line()
    # Neither tenant has work now. The call of the swapped-out tenant below causes the swap that is cut.
    node.stop()
    points = ["swap-out.limit", "swap-in.limit", "swap-out.out", "swap-in.open"]
    for point in points:
        is_killed_in_a_turn(node, point, *tenants)
    node.start()
    for one in tenants:
        assert all(one.line()["whole"] for _ in points)
    close(*tenants)
    eventually(lambda: not states(node), "both end")
