"""Jobs of a real Slurm on one node, with vgpud's prolog, task prolog and epilog."""

import os

from tests.conditions import needs
from tests.e2e.support import eventually, states
from tests.slurm.conftest import Cluster, nobody

pytestmark = needs("slurm", "root")


def empty(cluster: Cluster) -> None:
    eventually(lambda: not states(cluster.node), "the epilog gives the job's allocation back")
    eventually(lambda: not list((cluster.folder / "jobs").glob("*")), "nothing is kept of the job")


def test_the_tasks_of_a_slurm_job_run_under_its_allocation(cluster: Cluster) -> None:
    done = cluster.run("srun", "--gres=vgpu_memory:8,vgpu_cores:30", "sh", "-c", "env; echo $SLURM_JOB_ID")
    assert done.returncode == 0, done.stderr + cluster.logs()
    shown = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert shown["VGPU_ALLOCATION"] and shown["CUDA_VISIBLE_DEVICES"].startswith("GPU-")
    assert "libvgpu" in shown["LD_PRELOAD"]
    empty(cluster)


def test_the_allocation_of_a_slurm_job_has_the_jobs_user_and_name(cluster: Cluster) -> None:
    uid = nobody()
    job = cluster.run("sbatch", "--parsable", "--gres=vgpu_memory:8", "--output=/dev/null", "--wrap=sleep 60")
    assert job.returncode == 0, job.stderr
    number = job.stdout.strip()
    eventually(lambda: "active" in states(cluster.node).values(), "the prolog allocates")
    (name,) = states(cluster.node)
    held = cluster.node.ctl_json("show", name)
    assert (held["requestId"], held["label"]) == (f"slurm-{number}", f"slurm {number}")
    assert held["slices"][0]["memoryBytes"] == 8 << 30
    cluster.run("scancel", number)
    empty(cluster)
    done = cluster.run("srun", "--gres=vgpu_memory:1", "sh", "-c", "stat -c %u $VGPU_LEASE/usage", uid=uid)
    assert (done.returncode, done.stdout.strip()) == (0, str(uid)), done.stderr + cluster.logs()
    empty(cluster)


def test_a_slurm_job_that_requests_no_slice_gets_none(cluster: Cluster) -> None:
    done = cluster.run("srun", "env")
    assert done.returncode == 0 and "VGPU_ALLOCATION" not in done.stdout


def test_the_name_and_comment_of_a_slurm_job_cannot_request_a_slice(cluster: Cluster) -> None:
    """An attack: the job's name and comment look like Slurm's field for resources."""
    text = "x TresPerNode=gres/vgpu_memory=140 TresPerNode=gres:vgpu_memory:140 "
    done = cluster.run("srun", f"--job-name={text}", f"--comment={text}", "env")
    assert done.returncode == 0 and "VGPU_ALLOCATION=" not in done.stdout, done.stdout + cluster.logs()
    empty(cluster)


def test_a_refusal_by_vgpud_reaches_the_slurm_job_and_does_not_drain_the_node(cluster: Cluster) -> None:
    """An allocation made outside of Slurm uses memory that Slurm counts as free."""
    outside = cluster.node.ctl("alloc", "--memory", "100GiB", "--isolation", "quota").stdout.strip()
    done = cluster.run("srun", "--gres=vgpu_memory:100", "true")
    assert done.returncode != 0
    assert "E401" in done.stdout + done.stderr, done.stdout + done.stderr
    cluster.node.ctl("release", outside)
    eventually(lambda: cluster.run("sinfo", "-h", "-o", "%t").stdout.strip() == "idle", "idle again")
    empty(cluster)


def test_the_slurm_scripts_are_executable() -> None:
    from tests.slurm.conftest import SCRIPTS

    for name in ("prolog", "task-prolog", "epilog"):
        assert os.access(SCRIPTS / name, os.X_OK)
