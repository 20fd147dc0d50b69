"""`./dev fuzz [NAME...] [--minutes N] [--seed N]`: runs fuzz targets and adds findings to the corpus.

One target runs on each processor.

A finding ends the run of its target with status 1. Its input is in tests/fuzz/corpus/NAME/found-*, which
every later run of the suite tries: fix the program and commit the input.
"""

import argparse
import hashlib
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import structlog
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.mutate import mutated
from tests.fuzz.targets import ROOT, TARGETS, Target
from tests.native.harness import TEST_BUILD

CORPUS = ROOT / "tests" / "fuzz" / "corpus"
#: The programs of tests/fuzz/native, and the number of inputs of each in a run of the suite.
NATIVE = {"arbiter": 50, "json": 20000, "pages": 5000, "reply": 500}
POOL_MAX = 2000


def corpus(name: str) -> list[Path]:
    return sorted((CORPUS / name).iterdir())


def keep(name: str, data: bytes) -> Path:
    path = CORPUS / name / f"found-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path


def run_native(
    name: str, seconds: int, runs: int, seed: int, kept: Path
) -> "subprocess.CompletedProcess[str]":
    """Runs a fuzz program in C. Its last input stays in the file `current` of `kept`. The output has the
    sanitizer's report.
    """
    words = [str(word) for word in (seconds, runs, seed, kept / "current", CORPUS / name)]
    said = dict.fromkeys(("ASAN_OPTIONS", "UBSAN_OPTIONS"), f"log_path={kept / 'said'}:print_stacktrace=1")
    done = subprocess.run(
        [TEST_BUILD / "fuzz" / f"fuzz-{name}", *words],
        env={**os.environ, **said},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    done.stdout += "".join(path.read_text() for path in kept.glob("said.*"))
    return done


def fuzz_native(name: str, seconds: float, number: int) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        done = run_native(name, int(seconds), 1 << 62, number, Path(folder))
        print(f"{name}: {done.stdout.strip()}", flush=True)
        if done.returncode != 0:
            raw = (Path(folder) / "current").read_bytes()
            size = int.from_bytes(raw[:4], sys.byteorder)
            print(f"{name}: ended with {done.returncode}: {keep(name, raw[4 : 4 + size])}", flush=True)
    return done.returncode == 0


def fuzz(name: str, target: Target, seconds: float, number: int) -> bool:
    """Fuzzes a Python target, with new examples of its strategy and mutations of all inputs so far in
    turn.
    """
    pool, dice = [path.read_bytes() for path in corpus(name)], random.Random(number)
    end, runs, data = time.monotonic() + seconds, 0, b""
    failed: Exception | None = None

    def one(given_data: bytes) -> None:
        nonlocal data, runs
        data, runs = given_data, runs + 1
        target.check(data)
        if len(pool) < POOL_MAX:
            pool.append(data)

    while time.monotonic() < end and failed is None:
        try:
            examples = settings(
                max_examples=200,
                deadline=None,
                database=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            )
            seed(dice.getrandbits(32))(examples(given(target.inputs)(one)))()
            for _ in range(200):
                one(mutated(pool, dice))
        except Exception as error:  # any exception is a finding
            failed = error
    print(f"{name}: {runs} runs, seed {number}", flush=True)
    if failed is not None:
        print(
            "".join(traceback.format_exception(failed)[-6:])[-3000:],
            f"{name}: kept in {keep(name, data)}",
            flush=True,
        )
    return failed is None


def fuzz_named(seconds: float, chosen_seed: int | None, name: str) -> bool:
    number = random.SystemRandom().randrange(1 << 31) if chosen_seed is None else chosen_seed
    return (
        fuzz(name, TARGETS[name], seconds, number) if name in TARGETS else fuzz_native(name, seconds, number)
    )


def main(words: Sequence[str]) -> int:
    names = sorted([*TARGETS, *NATIVE])
    parser = argparse.ArgumentParser(prog="./dev fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "name", nargs="*", choices=[*names, []], help=f"of {', '.join(names)}; all if none is named"
    )
    parser.add_argument("--minutes", type=float, default=1.0, help="for each target; 1 if not said")
    parser.add_argument("--seed", type=int, help="the same inputs as in another run; new ones if not said")
    asked = parser.parse_args(words)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    chosen = asked.name or names
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        fine = dict(
            zip(
                chosen,
                processes.map(partial(fuzz_named, 60 * asked.minutes, asked.seed), chosen),
                strict=True,
            )
        )
    found = [name for name in chosen if not fine[name]]
    print(f"findings: {', '.join(found) or 'none'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
