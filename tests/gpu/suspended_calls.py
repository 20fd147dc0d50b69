"""Finds the calls that block in a suspended process, and checks that libvgpu wraps all of them.

python -m tests.gpu.suspended_calls

A thread that has been idle may begin with any driver call. Calls that block, fail or end the process while
its memory is saved must wait in libvgpu, where vgpud sees the wait and resumes the tenant. The program prints
a JSON line for each call that it tried (suspended_calls.c). The last line has `held`, and the names of the
calls that are not wrapped. Needs driver 570 or later, cc and cuda.h.
"""

import json
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
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


def wrapped() -> set[str]:
    """The functions that libvgpu wraps."""
    done = subprocess.run([BUILD / "bin" / "vgpu-hooks-doc"], capture_output=True, text=True, check=True)
    return set(re.findall(r"^\| `(\w+)` \| \w+ \| wrapped: ", done.stdout, re.MULTILINE))


def open_ways(tried: Iterable[dict[str, Any]], known: set[str]) -> list[str]:
    """Calls that do not return in a suspended process and that libvgpu does not wrap."""
    good = [row["call"] for row in tried if (row["it"], row["result"]) == ("answers", 0)]
    left = [row["call"] for row in tried if row["call"] not in good]
    return [call for call in left if call.split()[0] not in known]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([build(Path(folder))], stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, end="")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    tried = [row for row in rows if row["it"] not in ("did not start", "was not suspended")]
    lost = [row["call"] for row in rows if row not in tried]
    left = open_ways(tried, wrapped())
    say("suspended calls", held=not left + lost, tried=len(tried), not_wrapped=left, not_tried=lost)
    return 1 if left + lost else 0


if __name__ == "__main__":
    sys.exit(main())
