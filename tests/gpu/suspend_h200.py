"""Suspending and resuming on a real GPU: prints one JSON object for each scene, whose `held` says whether the
scene's claim is true.

    python -m tests.gpu.suspend_h200 [SCENE...]

Scenes: `sizes` (times for 1, 8 and 32 GiB beside a pinned copy of as much in the same run), `exact` (a
training run suspended 20 times ends bit-equal to an undisturbed one), `room` (a tenant that fits only while
another is suspended), `killed` (vgpud killed while a tenant is suspended, and in the middle of it). Needs
root, build/native, driver 570 or later, and a python3 with PyTorch. It ends every process that it started.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from tests.demo.node import POLICY, DemoNode, Tenant
from tests.demo.scenes import torch_python
from tests.e2e.support import client, states
from tests.gpu.scenes import HOLD, ask, play, say, started
from vgpud.model.errors import VgpuError

SIZES_GIB = (1, 8, 32)
TIMES = 20
PINNED = """
import json, time, torch
device = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
def seconds(copy):
    copy(); torch.cuda.synchronize(); began = time.perf_counter()
    for _ in range(4): copy()
    torch.cuda.synchronize(); return (time.perf_counter() - began) / 4
print(json.dumps({"out": seconds(lambda: host.copy_(device, non_blocking=True)),
                  "in": seconds(lambda: device.copy_(host, non_blocking=True))}))
"""
TRAIN = """
import hashlib, json, os, sys, time, torch
torch.manual_seed(7); torch.use_deterministic_algorithms(True)
layers = [part for _ in range(4) for part in (torch.nn.Linear(2048, 2048), torch.nn.GELU())]
model = torch.nn.Sequential(*layers).cuda()
best = torch.optim.Adam(model.parameters(), 1e-4)
print(json.dumps({"ready": True}), flush=True)
steps = int(sys.argv[1])
for step in range(steps):
    data = torch.randn(512, 2048, generator=torch.Generator().manual_seed(step)).cuda()
    best.zero_grad(); loss = (model(data) - data).square().mean(); loss.backward(); best.step()
    torch.cuda.synchronize()
    if os.path.exists(sys.argv[2]): time.sleep(0.02)
digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).hexdigest()
print(json.dumps({"digest": digest, "loss": loss.item()}), flush=True)
"""
STEPS = 1500


def on_a_node(scene: Callable[[DemoNode], None]) -> None:
    with started(DemoNode(POLICY, {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"})) as node:
        scene(node)


def tenant(node: DemoNode, gib: int, program: str, *words: str) -> tuple[Tenant, str]:
    python = torch_python()
    assert python, "no python3 with PyTorch here"
    before = states(node)
    asked = ["--isolation", "quota", "--memory", f"{gib}GiB", "--device", "0"]
    made = node.tenant(asked, [python, "-c", program, *words])
    assert made.line()["ready"]
    (name,) = states(node).keys() - before.keys()
    return made, name


def whole(one: Tenant) -> bool:
    return bool(ask(one)["whole"])


def timed(node: DemoNode, verb: str, name: str) -> float:
    with client(node, timeout_seconds=300) as calls:
        began = time.perf_counter()
        getattr(calls, verb)(name)
        return time.perf_counter() - began


def card_used_gib() -> float:
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[0]) / 1024


def sizes(node: DemoNode) -> None:
    python = torch_python()
    done = subprocess.run([str(python), "-c", PINNED], capture_output=True, text=True, check=True)
    pinned = json.loads(done.stdout)
    for gib in SIZES_GIB:
        one, name = tenant(node, gib + 4, HOLD, str(gib << 10))
        before = card_used_gib()
        out = timed(node, "suspend", name)
        away = card_used_gib()
        back = timed(node, "resume", name)
        good = whole(one)
        one.end()
        say(
            "sizes",
            held=good and before - away >= gib,
            gib=gib,
            suspend_seconds=round(out, 2),
            resume_seconds=round(back, 2),
            pinned_out_seconds=round(gib * pinned["out"], 3),
            pinned_in_seconds=round(gib * pinned["in"], 3),
            card_gib_before=round(before, 2),
            card_gib_suspended=round(away, 2),
        )


def exact(node: DemoNode) -> None:
    slow = node.folder / "slow"
    digests = []
    for times in (0, TIMES):
        slow.touch() if times else slow.unlink(missing_ok=True)
        one, name = tenant(node, 8, TRAIN, str(STEPS), str(slow))
        spans = [(timed(node, "suspend", name), timed(node, "resume", name)) for _ in range(times)]
        slow.unlink(missing_ok=True)
        digests.append(one.line())
        one.end()
        if spans:
            say(
                "exact",
                held=digests[0] == digests[1],
                times=times,
                undisturbed=digests[0],
                disturbed=digests[1],
                suspend_seconds=[round(out, 2) for out, _ in spans],
                resume_seconds=[round(back, 2) for _, back in spans],
            )


def room(node: DemoNode) -> None:
    one, first = tenant(node, 100, HOLD, "4096")
    timed(node, "suspend", first)
    two, _ = tenant(node, 100, HOLD, "12288")
    refused = ""
    try:
        timed(node, "resume", first)
    except VgpuError as error:
        refused = str(error)
    second = whole(two)
    two.end()
    while len(states(node)) > 1:
        time.sleep(0.1)
    timed(node, "resume", first)
    first_again = whole(one)
    say("room", held=bool(refused) and second and first_again, refused=refused, whole=(first_again, second))
    one.end()


def killed(node: DemoNode) -> None:
    one, name = tenant(node, 12, HOLD, "8192")
    timed(node, "suspend", name)
    node.kill()
    node.start()
    stays = states(node) == {name: "suspended"}
    timed(node, "resume", name)
    good = whole(one)
    half = subprocess.Popen(
        [sys.executable, "-m", "vgpud.ctl", "suspend", name], env=node.environment, stderr=subprocess.DEVNULL
    )
    time.sleep(1.0)  # after this time the save of 8 GiB is under way
    node.kill()
    half.wait()
    began = time.perf_counter()
    node.start()
    took = time.perf_counter() - began
    again = states(node) == {name: "active"}
    say("killed", held=stays and good and again and whole(one), start_seconds=round(took, 2))
    one.end()


SCENES: dict[str, Callable[[DemoNode], None]] = {
    "sizes": sizes,
    "exact": exact,
    "room": room,
    "killed": killed,
}


def main(names: list[str]) -> int:
    return play((name, partial(on_a_node, SCENES[name])) for name in names or SCENES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
