"""Suspension by libvgpu's copies on a real GPU: prints JSON lines, whose `held` says whether the line's claim
is true.

    python -m tests.gpu.pool_h200 [--mib 1024 8192 32768 102400] [SCENE...]

Scenes: `sizes` (a tenant of each size is suspended and resumed, bit-equal: first, then with all of its memory
changed since, both with a host buffer that was made while it ran, then twice with none changed, then with
some words changed; claim: both ways within 1.15 times a pinned copy in the same run, and 0.1 s; with
unchanged memory within 0.2 times), `deep` (of the third size: suspended with --deep, and from evicted to
deep, and resumed; claim: under 2 s), `exact` (a training run
in PyTorch, with expandable segments off and on, a decoder with CUDA graphs and a training run in JAX,
suspended and resumed 20 times, each third time deep, end bit-equal to undisturbed ones). Needs root,
build/native, as much host memory as the largest size and 8 GiB, and a python3 with PyTorch and JAX. It ends
every process that it started.

On the simulated node it runs with plain driver calls instead of PyTorch, and smaller (figures mean nothing):

    build/native/bin/vgpu-sim run --profile h200x8 --state FOLDER -- python -m tests.gpu.pool_h200
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from tests.demo.node import DemoNode, Tenant
from tests.e2e.support import client, eventually, states
from tests.gpu.holding import DECODE, HOLD, JAX, PLAIN_HOLD, make_buffer, told
from tests.gpu.idle_h200 import SIMULATED, running
from tests.gpu.scenes import play, say
from tests.gpu.suspend_h200 import TRAIN, card_used_gib
from tests.gpu.suspend_h200 import tenant as training
from tests.gpu.turns_h200 import PATIENCE_SECONDS, pinned_seconds, tenant
from vgpud.lease import read_swaps

SIZES_MIB = (64, 128, 256) if SIMULATED else (1 << 10, 8 << 10, 32 << 10, 100 << 10)
MORE_GIB = 8  # the memory that a tenant may use beside the memory that it holds
FEW = 1000  # words that are changed
AIM_OF_UNCHANGED = 0.2
AIM_OF_COPY, AIM_MORE_SECONDS, AIM_DEEP_SECONDS = 1.15, 0.1, 2.0
TIMES = 3 if SIMULATED else 20
STEPS = 1500
POLICY = "evictable = true\n"


def timed(node: DemoNode, verb: str, name: str, **words: bool) -> float:
    with client(node, timeout_seconds=300) as calls:
        began = time.perf_counter()
        getattr(calls, verb)(name, **words)
        return round(time.perf_counter() - began, 3)


@contextmanager
def held(node: DemoNode, mib: int) -> Iterator[tuple[Tenant, str]]:
    one, name = tenant(node, HOLD, PLAIN_HOLD, mib, limit=f"{(mib >> 10) + MORE_GIB}GiB")
    try:
        yield one, name
    finally:
        one.process.kill()
        eventually(lambda: not states(node), "it ends", PATIENCE_SECONDS)


def used_gib() -> float:
    return 0.0 if SIMULATED else round(card_used_gib(), 2)


def sizes(arguments: argparse.Namespace) -> None:
    with running(POLICY) as node:
        for mib in arguments.mib:
            copy = pinned_seconds(mib)
            with held(node, mib) as (one, name):
                before, made = used_gib(), list[float]()
                spans: dict[str, tuple[float, float]] = {}
                away, good = 0.0, []
                for kind in ("first", "changed", "unchanged", "unchanged again", "few words changed"):
                    changes = {"changed": "all", "few words changed": str(FEW)}
                    if kind in changes:
                        told(one, changes[kind])
                    if kind in ("first", "changed"):  # the first check of the contents has allocated more
                        made.append(make_buffer(node, name))
                    out = timed(node, "suspend", name)
                    away = used_gib()
                    spans[kind] = out, timed(node, "resume", name)
                    # the next suspension must find unchanged memory, which this check could change
                    if kind != "unchanged":
                        good.append(told(one))
                (swap,) = read_swaps(node.run_dir / "leases" / name)
            bounds = {way: AIM_OF_COPY * copy[way] + AIM_MORE_SECONDS for way in copy}
            within = (
                max(spans[kind][0] for kind in ("first", "changed")) <= bounds["out"]
                and max(back for _, back in spans.values()) <= bounds["in"]
                and spans["unchanged again"][0] <= AIM_OF_UNCHANGED * copy["out"] + AIM_MORE_SECONDS
            )
            say(
                "sizes",
                held=all(good) and (SIMULATED or within),
                mib=mib,
                movable_mib=swap.movable_bytes >> 20,
                whole=good,
                buffer_made_in_seconds=made,
                suspend_and_resume_seconds=spans,
                pinned_out_seconds=round(copy["out"], 3),
                pinned_in_seconds=round(copy["in"], 3),
                bound_seconds={way: round(bound, 3) for way, bound in bounds.items()},
                card_gib=(before, away),
            )


def deep(arguments: argparse.Namespace) -> None:
    mib = arguments.mib[min(2, len(arguments.mib) - 1)]
    with running(POLICY) as node, held(node, mib) as (one, name):
        timed(node, "suspend", name)  # the first suspension allocates the host buffer
        timed(node, "resume", name)
        for way in ("at once", "from evicted"):
            evicted = timed(node, "suspend", name) if way == "from evicted" else 0.0
            out = timed(node, "suspend", name, deep=True)
            away = used_gib()
            back = timed(node, "resume", name)
            good = told(one)
            within = out <= AIM_DEEP_SECONDS and back <= AIM_DEEP_SECONDS
            say(
                "deep",
                held=bool(good) and (SIMULATED or within),
                way=way,
                mib=mib,
                whole=good,
                evict_seconds=evicted,
                deep_seconds=out,
                resume_seconds=back,
                card_gib_suspended=away,
            )


def exact(_arguments: argparse.Namespace) -> None:
    if SIMULATED:
        say("exact", held=True, skipped="no PyTorch on a simulated node")
        return
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    programs = {"training": TRAIN, "training, expandable segments": TRAIN, "decoder": DECODE, "JAX": JAX}
    for kind, program in programs.items():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{'expandable' in kind}"
        digests, spans = [], []
        with running(POLICY) as node:
            slow = node.folder / "slow"
            for times in (0, TIMES):
                slow.touch() if times else slow.unlink(missing_ok=True)
                one, name = training(node, 8, program, str(STEPS), str(slow))
                for number in range(times):
                    out = timed(node, "suspend", name, deep=number % 3 == 2)
                    spans.append((out, timed(node, "resume", name)))
                slow.unlink(missing_ok=True)
                digests.append(one.line())
                one.end()
                eventually(lambda: not states(node), "it ends", PATIENCE_SECONDS)
        say(
            "exact",
            held=digests[0] == digests[1],
            program=kind,
            times=TIMES,
            digests=digests,
            suspend_and_resume_seconds=spans,
        )


SCENES: dict[str, Callable[[argparse.Namespace], None]] = {"sizes": sizes, "deep": deep, "exact": exact}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="suspension by libvgpu's copies on a real GPU")
    parser.add_argument("scenes", nargs="*", choices=[[], *SCENES], metavar="SCENE")
    parser.add_argument("--mib", type=int, nargs="+", default=list(SIZES_MIB))
    arguments = parser.parse_args(words)
    return play((name, partial(SCENES[name], arguments)) for name in arguments.scenes or SCENES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
