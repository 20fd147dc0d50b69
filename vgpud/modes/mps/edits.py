"""What puts a process or a container under its MPS share: pipes, limits, guard; nothing of other tenants."""

from pathlib import Path

from vgpud.model.quantity import MIB, WHOLE
from vgpud.model.tenancy import Allocation, DeviceNode, Edits, Mount, Slice
from vgpud.modes.edits import cuda_env
from vgpud.modes.mps.folders import DeviceFolder
from vgpud.modes.mps.rules import MpsRules

# native/guard/guard.h has them too
CONTAINER_PIPES = "/run/vgpu/mps"
CONTAINER_TENANT = "/run/vgpu/mps-tenant"
CONTAINER_GUARD = "/run/vgpu/libvgpu-guard.so"


def part_of_process(part: Slice, processes: int, pooled_memory: bool = False) -> tuple[int, float]:
    """Limits of one process, in MiB and percent, if `processes` share the slice; their sum never exceeds it.

    With `pooled_memory` libvgpu keeps the sum, and each may have all of it.
    """
    share = (part.share or WHOLE).hundredths // processes
    mebibytes = part.memory_bytes // MIB
    return mebibytes if pooled_memory else mebibytes // processes, max(share, 1) / 100


def with_libvgpu(edits: Edits, lease: Edits) -> Edits:
    """`lease` is mode preload's; the guard stands before libvgpu, and hands on to it."""

    def both(guard: tuple[tuple[str, str], ...], libvgpu: tuple[tuple[str, str], ...]) -> tuple[str, str]:
        return "LD_PRELOAD", f"{dict(guard)['LD_PRELOAD']}:{dict(libvgpu)['LD_PRELOAD']}"

    stacked = Edits(
        env=(both(edits.env, lease.env),),
        host_env=(both(edits.host_env, lease.host_env),),
    )
    return edits.merged(lease).merged(stacked)


def mps_edits(
    allocation: Allocation,
    part: Slice,
    folder: DeviceFolder,
    tenant: Path,
    guard: Path,
    rules: MpsRules,
    nodes: tuple[DeviceNode, ...],
) -> Edits:
    """The pipe folder is mounted whole: a new life of the daemon is a new folder in it.

    Read-only is no hindrance to connect(2) (tried with NVIDIA's daemon), and keeps a container's root
    from unlinking what its neighbours need. /dev/shm stays the container's own: client and server need no
    common one (measured on an H200, driver 580).
    """
    mebibytes, percent = part_of_process(part, rules.processes_per_tenant, rules.pooled_memory)
    asked = allocation.request.priority or ("below-normal" if rules.below_normal else "")
    # without the variable a client takes the daemon's default
    priority = (("CUDA_MPS_CLIENT_PRIORITY", str(int(asked == "below-normal"))),) if asked else ()
    return Edits(
        env=(
            *cuda_env(allocation),
            ("CUDA_MPS_PIPE_DIRECTORY", f"{CONTAINER_PIPES}/p"),
            # keyed by ordinal: the tenant sees this one device
            ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", f"0={mebibytes}M"),
            ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", f"{percent:g}"),
            *priority,
            ("LD_PRELOAD", CONTAINER_GUARD),
        ),
        host_env=(
            ("CUDA_MPS_PIPE_DIRECTORY", str(folder.pipe)),
            ("VGPU_MPS_TENANT", str(tenant)),
            ("LD_PRELOAD", str(guard)),
        ),
        mounts=(
            Mount(str(folder.pipes), CONTAINER_PIPES),
            Mount(str(tenant), CONTAINER_TENANT, read_only=False),
            # the container's root is not the node's: limits stay read-only to it too
            Mount(str(tenant / "limits"), f"{CONTAINER_TENANT}/limits"),
            Mount(str(guard), CONTAINER_GUARD),
        ),
        device_nodes=nodes,
    )
