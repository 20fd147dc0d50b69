"""The engine probe as a process: its answers, and how vgpud ends a probe that does not answer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vgpud.hardware.engine_probe import EngineProbe
from vgpud.model.engine import Engine

ANSWER = '{"engine": "cut", "why": "it stood still", "off_us": 449.5, "on_us": 275, "context_mib": 512}'


def program(folder: Path, script: str) -> Path:
    path = folder / "probe"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_the_probes_answer_is_stored_with_the_boot_and_the_driver_for_which_it_is_valid(
    tmp_path: Path,
) -> None:
    said = EngineProbe(program(tmp_path, f"echo '{ANSWER}'"), tmp_path).ask("GPU-1", "boot", "580.1")
    assert (said.engine, said.why, said.off_us, said.on_us) == (Engine.CUT, "it stood still", 449.5, 275.0)
    assert (said.boot_id, said.driver_version, said.failed) == ("boot", "580.1", False)


def test_the_probe_program_gets_the_device_and_cannot_reach_an_mps_daemon(tmp_path: Path) -> None:
    script = 'echo "$1 $CUDA_MPS_PIPE_DIRECTORY $CUDA_CACHE_DISABLE" >&2; exit 1'
    said = EngineProbe(program(tmp_path, script), tmp_path).ask("GPU-1", "boot", "580.1")
    assert said.why == f"the probe ended with status 1: GPU-1 {tmp_path} 1"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 3", "the probe ended with status 3: no output"),
        ("kill -9 $$", "the probe ended with signal 9: no output"),
        ("echo no CUDA >&2; exit 1", "the probe ended with status 1: no CUDA"),
        ("echo '[]'", "the probe ended with status 0: no output"),
        ('echo \'{"engine": "cut"}\'', "the probe ended with status 0: no output"),
    ],
)
def test_a_probe_without_an_answer_selects_the_gate_with_a_reason(
    tmp_path: Path, script: str, why: str
) -> None:
    said = EngineProbe(program(tmp_path, script), tmp_path).ask("GPU-1", "boot", "580.1")
    assert (said.engine, said.failed, said.why) == (Engine.GATE, True, why)


def test_a_missing_probe_program_selects_the_gate_with_a_reason(tmp_path: Path) -> None:
    said = EngineProbe(tmp_path / "none", tmp_path).ask("GPU-1", "boot", "580.1")
    assert (said.engine, said.failed) == (Engine.GATE, True)
    assert said.why.endswith("does not start: no such file or directory")


def test_a_probe_that_hangs_is_killed(tmp_path: Path) -> None:
    script = f"trap '' TERM; echo $$ > {tmp_path}/pid; exec sleep 1000"
    pid, hangs = tmp_path / "pid", EngineProbe(program(tmp_path, script), tmp_path, seconds=0.5)
    # on a busy machine the first probe may be killed before it has written its pid
    while not pid.exists() or not pid.read_text():
        said = hangs.ask("GPU-1", "boot", "580.1")
        assert said.failed and said.why == "the probe did not answer within 0.5 seconds, and was killed"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_probe_waits_for_the_probe_of_a_killed_vgpud(tmp_path: Path) -> None:
    """The probe that a killed vgpud has left is still running. Two probes of one device at the same time
    would disturb each other.
    """
    hangs = program(tmp_path, f"touch {tmp_path}/began; exec sleep 1000")
    code = (
        "import sys; from pathlib import Path; from vgpud.hardware.engine_probe import EngineProbe\n"
        "EngineProbe(Path(sys.argv[1]), Path(sys.argv[2])).ask('GPU-1', 'b', 'd')"
    )
    first = subprocess.Popen([sys.executable, "-c", code, str(hangs), str(tmp_path)])
    try:
        while not (tmp_path / "began").exists():
            assert first.poll() is None
    finally:
        first.kill()
        first.wait()
    said = EngineProbe(program(tmp_path, f"echo '{ANSWER}'"), tmp_path, seconds=0.3).ask("GPU-1", "b", "d")
    left = [p for p in Path("/proc").iterdir() if p.name.isdigit() and _holds(p, tmp_path / ".lock")]
    assert left and said.why == "another probe did not end within 0.3 seconds"
    for one in left:
        os.kill(int(one.name), 9)
    again = EngineProbe(tmp_path / "probe", tmp_path).ask("GPU-1", "b", "d")
    assert again.engine is Engine.CUT


def _holds(process: Path, lock: Path) -> bool:
    try:
        return (process / "fd" / "0").readlink() == lock
    except OSError:
        return False
