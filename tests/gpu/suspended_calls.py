"""Finds the calls that block in a suspended process, and checks that libvgpu wraps all of them.

python -m tests.gpu.suspended_calls

A thread that has been idle may begin with any driver call. Calls that block, fail or end the process while
its memory is saved must wait in libvgpu, where vgpud sees the wait and resumes the tenant. The program prints
a JSON line for each call that it tried (suspended_calls.c). The last line has `held`, and the names of the
calls that are not wrapped. Needs driver 570 or later, cc and cuda.h.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.demo.node import BUILD
from tests.gpu.scenes import say

HERE = Path(__file__).parent
CUDA = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "include"


def build(folder: Path, cuda_include: Path = CUDA) -> Path:
    """Builds the program. Raises CalledProcessError."""
    program = folder / "suspended_calls"
    source = str(HERE / "suspended_calls.c")
    subprocess.run(["cc", "-O1", f"-I{cuda_include}", source, "-o", str(program), "-ldl"], check=True)
    return program


def run_group(
    words: Sequence[str], env: Mapping[str, str] | None = None, seconds: float | None = None
) -> str:
    """Runs a program in a process group of its own and returns its output. Ends the group in any case. Raises
    CalledProcessError and TimeoutExpired.
    """
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, words, said)
    return said


def wrapped() -> set[str]:
    """The functions that libvgpu wraps."""
    done = subprocess.run([BUILD / "bin" / "vgpu-hooks-doc"], capture_output=True, text=True, check=True)
    return set(re.findall(r"^\| `(\w+)` \| \w+ \| wrapped: ", done.stdout, re.MULTILINE))


def open_ways(tried: Iterable[dict[str, Any]], known: set[str]) -> list[str]:
    """The calls that do not return in a suspended process and that libvgpu does not wrap."""
    good = [row["call"] for row in tried if (row["it"], row["result"]) == ("answers", 0)]
    left = [row["call"] for row in tried if row["call"] not in good]
    return [call for call in left if call.split()[0] not in known]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        said = run_group([str(build(Path(folder)))])
    print(said, end="")
    rows = [json.loads(line) for line in said.splitlines()]
    tried = [row for row in rows if row["it"] not in ("did not start", "was not suspended")]
    lost = [row["call"] for row in rows if row not in tried]
    left = open_ways(tried, wrapped())
    say("suspended calls", held=not left + lost, tried=len(tried), not_wrapped=left, not_tried=lost)
    return 1 if left + lost else 0


if __name__ == "__main__":
    sys.exit(main())
