"""`./dev test --explore MINUTES`: runs the property tests with new seeds, in rounds, until a round
fails or ends after this time.

A failure prints its seed and the shrunk example. Keep the example by an `@example(...)` above the test's
`@given` (for a state machine: as a test of its own). Every later run of the suite tries it.
"""

import random
import subprocess
import sys
import time

import pytest

from tests.simnode import ROOT

CHOSEN = ("-m", "hypothesis and not real", "--hypothesis-profile=explore", "-x", "-q", "-n", "2")


def main(words: list[str]) -> int:
    end = time.monotonic() + 60 * float(words[0])
    rounds = 0
    while True:
        seed = random.SystemRandom().randrange(1 << 32)
        command = [sys.executable, "-m", "pytest", *CHOSEN, f"--hypothesis-seed={seed}", *words[1:]]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code == pytest.ExitCode.NO_TESTS_COLLECTED:
            print("no property test is selected", file=sys.stderr)
            return code
        if code:
            found = f"found with --hypothesis-seed={seed}"
            print(f"{found}: keep it as an @example (docs/testing.md)", file=sys.stderr)
            return code
        rounds += 1
        if time.monotonic() > end:
            print(f"{rounds} rounds, each with a seed of its own: nothing found")
            return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
