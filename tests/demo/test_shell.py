"""./dev shell: a command on a simulated node with vgpud running."""

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


def test_a_command_runs_on_a_node_of_the_chosen_profile() -> None:
    done = shell("--profile", "t4x1", "--", "vgpuctl", "devices", "-o", "json")
    assert done.returncode == 0, done.stderr
    (device,) = json.loads(done.stdout)["items"]
    assert device["name"] == "Tesla T4"


def test_the_shells_node_has_the_chosen_driver_and_its_vgpuctl_is_the_checkouts_in_every_folder(
    tmp_path: Path,
) -> None:
    (tmp_path / "vgpud").mkdir()
    (tmp_path / "vgpud" / "__init__.py").touch()
    status = 'cd "$0" && vgpuctl status -o json'
    done = shell("--profile", "t4x1", "--driver", "550", "--", "sh", "-c", status, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["driverVersion"].startswith("550.")


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


def test_tenants_that_the_shell_left_running_end_with_it() -> None:
    """A suspended tenant and one that computes, each in a session of its own."""
    leave = """start() {
      setsid vgpuctl run --memory 1GiB --isolation quota --label $1 -- "$@" </dev/null >/dev/null 2>&1 &
    }
    start vgpu-probe hold 8MiB --seconds 300
    start vgpu-spin --kernel-us 1000 --seconds 300
    until [ "$(vgpuctl ps --no-headers | grep -c vgpu-)" = 2 ]; do :; done
    vgpuctl suspend "$(vgpuctl ls --label vgpu-probe -o name)" >&2
    vgpuctl ps -o name
    cut -d" " -f1 $VGPUD_RUN_DIR/units/vgpud-arbiter.pid
    """
    done = shell("--profile", "t4x1", "--", "sh", "-c", leave)
    assert done.returncode == 0, done.stderr
    left = [Path("/proc", pid) for pid in done.stdout.split()]
    assert len(left) == 3
    eventually(lambda: not any(path.exists() for path in left), "their parents have reaped them")


def test_the_exit_code_is_that_of_the_command() -> None:
    assert shell("--profile", "t4x1", "--", "sh", "-c", "exit 7").returncode == 7


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    done = shell("--profile", "nope", "--", "true")
    assert done.returncode == 1
    assert "no profile 'nope'; there are: a100x8" in done.stderr
