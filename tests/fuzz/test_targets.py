"""Runs each fuzz target for a moment: its corpus, examples and mutations. `./dev fuzz` runs them for
minutes.
"""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings

from tests.fuzz.mutate import mutated
from tests.fuzz.run import CORPUS, NATIVE, corpus, run_native
from tests.fuzz.targets import TARGETS

KEPT = [(name, path) for name in TARGETS for path in corpus(name)]


def test_each_corpus_belongs_to_a_fuzz_target_and_each_target_has_a_corpus() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} == TARGETS.keys() | set(NATIVE)


@pytest.mark.parametrize(("name", "path"), KEPT, ids=[f"{name}-{path.name}" for name, path in KEPT])
def test_an_input_that_once_crashed_is_understood_or_refused(name: str, path: Path) -> None:
    TARGETS[name].check(path.read_bytes())


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_any_bytes_are_understood_or_refused(name: str) -> None:
    target = TARGETS[name]

    @settings(max_examples=target.runs)
    @given(target.inputs)
    def one(data: bytes) -> None:
        target.check(data)

    one()
    pool, dice = [path.read_bytes() for path in corpus(name)], random.Random(0)
    for _ in range(target.runs):
        target.check(mutated(pool, dice))


@pytest.mark.parametrize("name", sorted(NATIVE))
def test_a_parser_in_c_survives_its_corpus_and_mutations(name: str, tmp_path: Path) -> None:
    done = run_native(name, seconds=60, runs=NATIVE[name], seed=0, kept=tmp_path)
    assert done.returncode == 0, done.stdout
