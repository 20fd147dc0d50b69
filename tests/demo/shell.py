"""`./dev shell`: runs a shell or a command on a simulated node with vgpud.

    ./dev shell                      bash on a node of 8 H200
    ./dev shell --profile h100x8     another node of configs/sim
    ./dev shell --driver 615         another driver than the profile's
    ./dev shell -- vgpuctl devices   one command; the exit code is its own

Everything is in a folder of its own and is gone when the shell ends.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.demo.node import BUILD, ROOT, DemoNode
from tests.demo.scenes import clear_away

WELCOME = """a simulated node of profile {profile}; vgpud runs, this shell is root's on it. Try:
  vgpuctl devices
  vgpuctl plan --memory 90GiB
  vgpuctl run --memory 8GiB --cores 25 -- vgpu-spin --kernel-us 1000 --seconds 60 >/dev/null &
  vgpuctl run --memory 8GiB --label holds -- vgpu-probe hold 1GiB --seconds 60 >/dev/null &
  vgpuctl top
vgpu-spin keeps a device busy; vgpu-probe holds memory, or prints what it sees (info). Both have --help.
The policy is $VGPUD_CONFIG, the run folder $VGPUD_RUN_DIR, vgpud's log {log}.
'exit' ends the node.
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./dev shell", description="A shell on a simulated node.")
    parser.add_argument("--profile", default="h200x8", help="a node of configs/sim (default h200x8)")
    parser.add_argument("--driver", default="", metavar="BRANCH", help="another driver: 535 to 615")
    parser.add_argument("command", nargs="*", help="run this instead of a shell")
    return parser.parse_args()


def enter(profile: str, driver: str) -> int:
    """Runs this program again on a new simulated node."""
    with tempfile.TemporaryDirectory(prefix="vgpu-sim-") as folder:
        state = str(Path(folder) / "node")
        simulated = [str(BUILD / "bin" / "vgpu-sim"), "run", "--profile", profile, "--state", state]
        simulated += ["--driver", driver]
        return subprocess.call([*simulated, "--", sys.executable, "-m", "tests.demo.shell", *sys.argv[1:]])


def environment(node: DemoNode, commands: Path) -> dict[str, str]:
    """Environment variables for a shell on the node. The shell finds vgpuctl and the node's programs by
    name.
    """
    wrapper = commands / "vgpuctl"
    # with -P, Python does not load a package vgpud from the current folder, for example in another clone
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -P -m vgpud.ctl "$@"\n')
    wrapper.chmod(0o755)
    path = f"{commands}:{BUILD / 'bin'}:{os.environ.get('PATH', os.defpath)}"
    return {**node.environment, "PATH": path, "PS1": "(vgpud) \\w\\$ "}


def main() -> int:
    asked = arguments()
    if "VGPU_SIM_STATE" not in os.environ:
        return enter(asked.profile, asked.driver)
    node = DemoNode()
    try:
        node.start()
        commands = node.folder / "commands"
        commands.mkdir()
        if asked.command:
            return subprocess.call(asked.command, env=environment(node, commands))
        print(WELCOME.format(profile=asked.profile, log=node.log), end="", flush=True)
        return subprocess.call(["bash", "--norc"], env=environment(node, commands))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        clear_away(node)


if __name__ == "__main__":
    sys.exit(main())
