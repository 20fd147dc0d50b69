"""Fixtures: slurmctld, slurmd and munged in folders of their own, with a vgpud on a simulated node."""

import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conditions import unmet
from tests.demo.node import ROOT, DemoNode
from tests.e2e.conftest import node_maker
from tests.ports import free_port

SCRIPTS = ROOT / "configs" / "slurm"
_START_SECONDS = 30.0
CONF = """
ClusterName=vgpudtest
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
ReturnToService=2
KillWait=2
PrologFlags=Alloc
Prolog={folder}/prolog
TaskProlog={folder}/task-prolog
Epilog={folder}/epilog
GresTypes=vgpu_memory,vgpu_cores,vgpu_cards
NodeName=vgpunode NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=500 \
Gres=vgpu_memory:{gib},vgpu_cores:100,vgpu_cards:1
PartitionName=all Nodes=vgpunode Default=YES MaxTime=5 State=UP OverSubscribe=FORCE:4
"""
# Slurm starts prologs without an environment, so this script sets the variables of the test's vgpud
WRAPPER = """#!/bin/sh
export PATH="{bin}:$PATH" VGPUD_SOCKET={socket} VGPUD_SLURM_DIR={folder}/jobs
export VGPUD_RUN_DIR={run_dir} SLURM_CONF={folder}/slurm.conf
exec {script}
"""


@dataclass
class Cluster:
    folder: Path
    node: DemoNode

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *words: str, uid: int = 0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            user=uid,
            cwd="/",
        )

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))


def write_files(folder: Path, node: DemoNode, gib: int) -> None:
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    conf = CONF.format(
        folder=folder,
        host=socket.gethostname().split(".")[0],
        controller_port=free_port(),
        node_port=free_port(),
        gib=gib,
    )
    (folder / "slurm.conf").write_text(conf)
    (folder / "gres.conf").write_text(
        f"Name=vgpu_memory Count={gib}\nName=vgpu_cores Count=100\nName=vgpu_cards Count=1\n"
    )
    (folder / "bin").mkdir()
    ctl = folder / "bin" / "vgpuctl"
    ctl.write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m vgpud.ctl "$@"\n')
    for name in ("prolog", "task-prolog", "epilog"):
        text = WRAPPER.format(
            bin=folder / "bin",
            socket=node.run_dir / "admin.sock",
            folder=folder,
            run_dir=node.run_dir,
            script=folder / "scripts" / name,
        )
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    ctl.chmod(0o755)


def start_munge(folder: Path) -> subprocess.Popen[bytes]:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    where = {
        "socket": "munge.socket",
        "key-file": "munge.key",
        "pid-file": "munged.pid",
        "log-file": "munged.log",
        "seed-file": "munged.seed",
    }
    options = [f"--{option}={folder / name}" for option, name in where.items()]
    return subprocess.Popen(["munged", "--foreground", "--force", *options], stderr=subprocess.DEVNULL)


def start(folder: Path, program: str, *words: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    with (folder / f"{program}.log").open("wb") as log:
        return subprocess.Popen(
            [program, "-D", "-f", str(folder / "slurm.conf"), *words],
            env=environment,
            stdout=log,
            stderr=log,
        )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    running: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="vgpud-slurm-") as name, node_maker(Path(name)) as make:
        folder = Path(name)
        # jobs of other users enter this folder, because they may have no permission for the source tree
        folder.chmod(0o755)
        shutil.copytree(SCRIPTS, folder / "scripts")
        node = make("h200x1")
        node.start()
        write_files(folder, node, 139)
        made = Cluster(folder, node)
        try:
            running.append(start_munge(folder))
            running.append(start(folder, "slurmctld", "-c"))
            running.append(start(folder, "slurmd", "-N", "vgpunode"))
            wait_idle(made)
            yield made
        finally:
            for process in reversed(running):
                process.terminate()
            for process in running:
                try:
                    process.wait(300)
                except subprocess.TimeoutExpired:
                    process.kill()


def wait_idle(cluster: Cluster) -> None:
    """Skips the test if Slurm does not start, with Slurm's output as the reason."""
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        shown = cluster.run("sinfo", "-h", "-o", "%t")
        if shown.stdout.strip() == "idle":
            return
        time.sleep(0.2)
    unmet("slurm", f"it does not start here: {shown.stdout}{shown.stderr}{cluster.logs()}")


def nobody() -> int:
    return pwd.getpwnam("nobody").pw_uid
