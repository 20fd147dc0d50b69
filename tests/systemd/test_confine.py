"""tests/gpu/confine.py confines a program as vgpud's unit says: it knows every line of the unit, and its
restrictions work.
"""

import ctypes.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conditions import needs, unmet
from tests.gpu import confine

TRIES = {
    "write to /usr": "touch /usr/vgpud-was-here",
    "a namespace": "unshare -m true",
    "another priority": '"$2" -c "import os; os.nice(5)"',
    "a set-user-ID file": 'touch "$1/s" && chmod u+s "$1/s"',
    "a packet socket": '"$2" -c "import socket; socket.socket(17, 3, 0)"',
    "memory to write and execute": '"$2" -c "import mmap; mmap.mmap(-1, 4096, prot=7)"',
}
# As vgpud does, reads /proc files of a thread that waits inside the driver, in another user's process.
LOOK = """
import os, sys
own = f"/proc/{sys.argv[1]}/task/{sys.argv[1]}"
while len(words := open(f"{own}/syscall").read().split()) < 9: pass
memory = os.open(f"/proc/{sys.argv[1]}/mem", os.O_RDONLY)
sys.exit(len(os.pread(memory, 8, int(words[-2], 16))) != 8 or not open(f"/proc/{sys.argv[1]}/maps").read())
"""


def test_the_test_program_confine_refuses_lines_of_the_unit_that_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "CAP_SYS_ADMIN" in confine.directives()["CapabilityBoundingSet"]
    more = tmp_path / "vgpud.service"
    more.write_text(confine.UNIT.read_text().replace("[Service]\n", "[Service]\nProtectProc=invisible\n"))
    monkeypatch.setattr(confine, "UNIT", more)
    with pytest.raises(ValueError, match="ProtectProc"):
        confine.directives()


@needs("seccomp", "root")
def test_a_confined_program_is_denied_what_the_unit_forbids(tmp_path: Path) -> None:
    if ctypes.util.find_library("seccomp") is None:
        unmet("seccomp", "libseccomp2 is not installed")
    prepared = tmp_path / "confine.json"
    confine.prepare(prepared)
    confined = [sys.executable, "-m", "tests.gpu.confine", "run", str(prepared), "--writable", str(tmp_path)]
    tries = [f"({script}) && echo {what}" for what, script in TRIES.items()]
    script = "\n".join(['touch "$1/here" || exit 9', '"$2" -c "$3" "$4" || exit 8', *tries, "true"])
    with subprocess.Popen(["sleep", "60"], user=65534) as other:
        seen = [LOOK, str(other.pid)]
        words = [*confined, "--", "sh", "-c", script, "sh", str(tmp_path), sys.executable, *seen]
        try:
            done = subprocess.run(
                words, cwd=confine.ROOT, capture_output=True, text=True, check=False, timeout=300
            )
        finally:
            other.kill()
    if "not applied: ProtectSystem" in done.stderr:
        unmet("namespaces", done.stderr.strip())
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert (tmp_path / "here").exists()
