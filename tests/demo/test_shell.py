"""./dev shell runs a command on a simulated node with vgpud."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.support import eventually
from tests.simnode import ROOT


def shell(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "VGPU_SIM_STATE"}
    return subprocess.run(
        [sys.executable, "-m", "tests.demo.shell", *words],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_command_runs_in_any_folder_on_the_chosen_node_and_tenants_that_it_left_end_with_the_shell(
    tmp_path: Path,
) -> None:
    """vgpuctl in the shell is that of the checkout, and the exit code of the command is that of the shell.
    One of the tenants is suspended and one computes. Each is in a session of its own.
    """
    (tmp_path / "vgpud").mkdir()
    (tmp_path / "vgpud" / "__init__.py").touch()
    leave = """cd "$0"
    start() {
      setsid vgpuctl run --memory 1GiB --isolation quota --label $1 -- "$@" </dev/null >/dev/null 2>&1 &
    }
    start vgpu-probe hold 8MiB --seconds 300
    start vgpu-spin --kernel-us 1000 --seconds 300
    vgpuctl devices -o json >devices && vgpuctl status -o json >status || exit 1
    until [ "$(vgpuctl ps --no-headers | grep -c vgpu-)" = 2 ]; do :; done
    vgpuctl suspend "$(vgpuctl ls --label vgpu-probe -o name)" >&2
    vgpuctl ps -o name
    cut -d" " -f1 $VGPUD_RUN_DIR/units/vgpud-arbiter.pid
    exit 7
    """
    done = shell("--profile", "t4x1", "--driver", "550", "--", "sh", "-c", leave, str(tmp_path))
    assert done.returncode == 7, done.stderr
    (device,) = json.loads((tmp_path / "devices").read_text())["items"]
    assert device["name"] == "Tesla T4"
    assert json.loads((tmp_path / "status").read_text())["driverVersion"].startswith("550.")
    left = [Path("/proc", pid) for pid in done.stdout.split()]
    assert len(left) == 3
    eventually(lambda: not any(path.exists() for path in left), "their parents have reaped them")


def test_the_end_of_the_shell_leaves_no_helper_of_a_killed_vgpud() -> None:
    """The arbiter outlives the killed vgpud, and ends with the shell."""
    kill = """vgpuctl alloc --memory 1GiB --isolation quota >/dev/null
    cut -d" " -f1 $VGPUD_RUN_DIR/units/vgpud-arbiter.pid
    pgrep -f "vgpud[.]daemon" -P $PPID | xargs kill -9
    while vgpuctl status >/dev/null 2>&1; do :; done
    """
    done = shell("--profile", "t4x1", "--", "sh", "-c", kill)
    arbiter = int(done.stdout)
    assert done.returncode == 0, done.stderr
    eventually(lambda: not Path(f"/proc/{arbiter}").exists(), "its parent has reaped it")


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    done = shell("--profile", "nope", "--", "true")
    assert done.returncode == 1
    assert "no profile 'nope'; there are: a100x8" in done.stderr
