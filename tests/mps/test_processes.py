"""What /proc says of control daemons and servers."""

import subprocess
import sys
import time
from pathlib import Path

from vgpud.modes.mps.folders import DeviceFolder
from vgpud.modes.mps.processes import end_servers, of_lives, still_there

SLOW = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep({})"
)


def server(folder: DeviceFolder, seconds: float) -> subprocess.Popen[str]:
    """A process of a daemon's life, which ends by itself after so long."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW.format(seconds)],
        env={"CUDA_MPS_PIPE_DIRECTORY": str(folder.life(1))},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_the_end_of_servers_is_waited_for(tmp_path: Path) -> None:
    folder = DeviceFolder(tmp_path)
    quick, slow = server(folder, 0.5), server(folder, 60)
    known = of_lives(folder)
    assert {one.pid for one in known} == {quick.pid, slow.pid}
    began = time.monotonic()
    assert still_there(known, 2.0) == (slow.pid,), "it says who did not end"
    assert time.monotonic() - began >= 2.0
    assert quick.wait(0) == 0
    assert end_servers(folder) == (slow.pid,)
    assert still_there(known, 10.0) == ()
    slow.communicate()
    assert of_lives(folder) == ()
