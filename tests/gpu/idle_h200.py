"""Idle suspension and turns on a real GPU: prints one JSON object for each scene, whose `held` says whether
the scene's claim is true.

    python -m tests.gpu.idle_h200 [SCENE...]

Scenes: `idle` (a tenant is suspended after 1 s without work, and its next call resumes it: the times),
`first` (every kind of first call resumes it), `turns` (two tenants with 75 % of the device each take turns of
5 s and of 20 s: the rate of each compared with a tenant alone, and that no memory is lost). Needs root,
build/native, driver 570 or later, and a python3 with PyTorch. It ends all that it started.

On the simulated node it runs with plain driver calls instead of PyTorch, and shorter (figures mean nothing):

    build/native/bin/vgpu-sim run --profile h200x8 --state FOLDER -- python -m tests.gpu.idle_h200
"""

import os
import select
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from tests.demo.node import DemoNode, Tenant
from tests.demo.scenes import torch_python
from tests.e2e.support import client, eventually, states
from tests.e2e.test_idle import BUSY, CALLS
from tests.e2e.test_suspend import PROGRAM, resume
from tests.gpu.scenes import HOLD, ask, play, say, started
from vgpud.lease import read_activity

SIMULATED = "VGPU_SIM_STATE" in os.environ
IDLE_SECONDS = 1.0
SIZE_GIB = 1 if SIMULATED else 8
TURNS_SECONDS = (1.0,) if SIMULATED else (5.0, 20.0)
ROUNDS = 3
PATIENCE_SECONDS = 40.0
ITSELF_SECONDS = 10.0
POLICY = """version = 1
[[device]]
mode = "preload"
[device.preload]
"""
FIRST = """
import json, sys, torch
a = torch.randn(2048, 2048, device="cuda")
b, host = torch.empty_like(a), torch.empty(16, pin_memory=True)
event, stream = torch.cuda.Event(), torch.cuda.Stream()
torch.mm(a, a, out=b)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    torch.mm(a, a, out=b)
graph.replay(); torch.cuda.synchronize()
half, image = a.bfloat16(), torch.randn(8, 64, 64, 64, device="cuda")
kernel = torch.randn(64, 64, 3, 3, device="cuda")
heads = torch.randn(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16)
calls = {
    "matmul": lambda: torch.mm(a, a, out=b),
    "half matmul": lambda: half @ half,
    "convolution": lambda: torch.nn.functional.conv2d(image, kernel, padding=1),
    "attention": lambda: torch.nn.functional.scaled_dot_product_attention(heads, heads, heads),
    "fft": lambda: torch.fft.fft(a),
    "sort": lambda: torch.sort(a),
    "solve": lambda: torch.linalg.solve(a[:64, :64], a[:64, :64]),
    "item": lambda: a[0, 0].item(),
    "synchronize": torch.cuda.synchronize,
    "graph": graph.replay,
    "to host": lambda: a[0].cpu(),
    "pinned": lambda: host.copy_(a[0, :16], non_blocking=True),
    "allocate": lambda: torch.empty(1 << 28, device="cuda"),
    "record": event.record,
    "query": event.query,
    "other stream": stream.synchronize,
    "memory": torch.cuda.mem_get_info,
    "empty cache": torch.cuda.empty_cache,
    "pin": lambda: torch.empty(1 << 16, pin_memory=True),
}
for call in calls.values(): call()  # once, as any program that has been idle has done
print(json.dumps({"calls": list(calls)}), flush=True)
for line in sys.stdin:
    calls[line.strip()]()
    print(json.dumps({"done": line.strip()}), flush=True)
"""
WORK = """
import json, select, sys, torch
held = torch.arange(int(sys.argv[1]) << 17, dtype=torch.int64, device="cuda")
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
print(json.dumps({"ready": True}), flush=True)
rounds = 0
while True:
    for _ in range(10): b = a @ a
    torch.cuda.synchronize()
    rounds += 1
    if select.select([sys.stdin], [], [], 0)[0]:
        if not sys.stdin.readline(): break
        whole = held[-1].item() == held.numel() - 1 and held[12345].item() == 12345
        print(json.dumps({"rounds": rounds, "whole": whole}), flush=True)
"""


def running(rules: str) -> AbstractContextManager[DemoNode]:
    return started(DemoNode(POLICY + rules))


def tenant(node: DemoNode, memory: str, program: str, plain: str) -> tuple[Tenant, str, dict[str, object]]:
    """Starts a tenant that runs `program`, or `plain` if PyTorch is missing. The argument of both is
    the memory to hold, SIZE_GIB in MiB. Both print a line when they are ready.
    """
    python = None if SIMULATED else torch_python()
    assert python or SIMULATED, "no python3 with PyTorch here"
    before = states(node)
    asked = ["--isolation", "quota", "--memory", memory, "--device", "0"]
    code = plain if python is None else program
    made = node.tenant(asked, [python or sys.executable, "-c", code, str(SIZE_GIB << 10)])
    said = made.line()
    (name,) = states(node).keys() - before.keys()
    return made, name, said


def card_used_gib(node: DemoNode) -> float:
    with client(node) as calls:
        return int(calls.list_devices().devices[0].memory_used_bytes) / 2**30


def is_empty(node: DemoNode) -> bool:
    return not states(node)


def goes(node: DemoNode, name: str) -> float:
    """Waits until the tenant is suspended. Returns the seconds."""
    began = time.perf_counter()
    try:
        eventually(lambda: states(node)[name] == "suspended", f"{name} is suspended", PATIENCE_SECONDS)
    except AssertionError:
        says = read_activity(node.run_dir / "leases" / name)
        say("stays", state=states(node)[name], activity=says, log=node.log.read_text()[-3000:])
        raise
    return time.perf_counter() - began


def idle() -> None:
    with running(f'idle_suspend = "{IDLE_SECONDS:g}s"\nmin_residence = "500ms"\n') as node:
        one, name, _said = tenant(node, f"{SIZE_GIB + 4}GiB", HOLD, PROGRAM)
        eventually(lambda: card_used_gib(node) > SIZE_GIB / 2, "its memory is on the card")
        before = card_used_gib(node)
        went, came, whole, away = [], [], [], before
        for _turn in range(ROUNDS):
            went.append(round(goes(node, name), 2))
            eventually(lambda: card_used_gib(node) < before - SIZE_GIB / 2, "its memory is off the card")
            away = card_used_gib(node)
            began = time.perf_counter()
            whole.append(bool(ask(one)["whole"]))
            came.append(round(time.perf_counter() - began, 2))
        one.end()
        say(
            "idle",
            held=all(whole),
            gib=SIZE_GIB,
            seconds_until_suspended=went,
            seconds_waited_by_its_work=came,
            card_gib_before=round(before, 2),
            card_gib_suspended=round(away, 2),
        )


def comes_back(node: DemoNode, name: str, one: Tenant, kind: str) -> tuple[float, bool]:
    """Returns the seconds until the tenant answers, and whether it had to be resumed by hand because vgpud
    missed its first call.
    """
    assert one.process.stdin is not None
    began = time.perf_counter()
    one.process.stdin.write(f"{kind}\n")
    one.process.stdin.flush()
    assert one.process.stdout is not None
    itself, _, _ = select.select([one.process.stdout], [], [], ITSELF_SECONDS)
    if not itself:
        resume(node, name)
    assert one.line() == {"done": kind}
    return round(time.perf_counter() - began, 2), not itself


def first() -> None:
    with running(f'idle_suspend = "{IDLE_SECONDS:g}s"\nmin_residence = "500ms"\n') as node:
        one, name, said = tenant(node, "8GiB", FIRST, CALLS)
        kinds = said["calls"]
        assert isinstance(kinds, list)
        took, by_hand = {}, {}
        for kind in kinds:
            goes(node, name)
            # a tenant that works again soon after its suspension gets a longer idle time
            time.sleep(IDLE_SECONDS)
            took[kind], by_hand[kind] = comes_back(node, name, one, kind)
            say("first", call=kind, seconds_until_it_was_back=took[kind], by_hand=by_hand[kind])
        one.end()
        say("first", held=not any(by_hand.values()), seconds=took)


def rounds(one: Tenant) -> int:
    said = ask(one)
    assert said["whole"], "something was lost"
    return int(str(said["rounds"]))


def turns() -> None:
    for turn in TURNS_SECONDS:
        with running(f'memory_overcommit = 2.0\nturn = "{turn:g}s"\n') as node:
            share = "105GiB"  # 75 % of an H200
            one, _name, _said = tenant(node, share, WORK, BUSY)
            began, start = time.perf_counter(), rounds(one)
            time.sleep(2 * turn)
            alone = (rounds(one) - start) / (time.perf_counter() - began)
            two, _name, _said = tenant(node, share, WORK, BUSY)
            begun, starts = time.perf_counter(), [rounds(one), rounds(two)]
            time.sleep((6 if turn > 10 else 10) * turn)
            ends = [rounds(one), rounds(two)]
            seconds = time.perf_counter() - begun
            both = [(b - a) / seconds for a, b in zip(starts, ends, strict=True)]
            for tenant_ in (one, two):
                assert tenant_.process.stdin is not None
                tenant_.process.stdin.close()
            eventually(partial(is_empty, node), "both end", PATIENCE_SECONDS)
            say(
                "turns",
                held=all(b > a for a, b in zip(starts, ends, strict=True)),
                turn_seconds=turn,
                gib_of_each=SIZE_GIB,
                rounds_per_second_alone=round(alone, 2),
                of_solo_each=[round(rate / alone, 3) for rate in both],
                of_solo_together=round(sum(both) / alone, 3),
                seconds=round(seconds, 1),
            )


SCENES: dict[str, Callable[[], None]] = {
    "idle": idle,
    "first": first,
    "turns": turns,
}


def main(names: list[str]) -> int:
    return play((name, SCENES[name]) for name in names or SCENES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
