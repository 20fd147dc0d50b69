"""The edits that put a process or container under its MPS share: pipes, limits and the guard, and nothing of
other tenants.
"""

from pathlib import Path

from vgpud.model.quantity import MIB, WHOLE
from vgpud.model.tenancy import Allocation, DeviceNode, Edits, Mount, Slice
from vgpud.modes.edits import cuda_env
from vgpud.modes.mps.folders import DeviceFolder
from vgpud.modes.mps.rules import MpsRules

# Paths inside a container; native/guard/guard.h has the same paths.
CONTAINER_PIPES = "/run/vgpu/mps"
CONTAINER_TENANT = "/run/vgpu/mps-tenant"
CONTAINER_GUARD = "/run/vgpu/libvgpu-guard.so"


def part_of_process(part: Slice, processes: int, pooled_memory: bool = False) -> tuple[int, float]:
    """The limits of one process in MiB and percent, if `processes` processes share the slice. Their sum does
    not exceed the slice, but a share is at least 0.01 %.

    With `pooled_memory`, libvgpu enforces the sum, and each process may use all of the memory.
    """
    share = (part.share or WHOLE).hundredths // processes
    mebibytes = part.memory_bytes // MIB
    return mebibytes if pooled_memory else mebibytes // processes, max(share, 1) / 100


def with_libvgpu(edits: Edits, lease: Edits) -> Edits:
    """Adds libvgpu to the edits of mode mps. `lease` has the edits of mode preload. In LD_PRELOAD, the guard
    comes before libvgpu, because the guard calls libvgpu.
    """

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
    """The edits of a slice in mode mps. The pipe folder is mounted as a whole, because each new daemon has a
    new folder in it.

    The mount is read-only: connect(2) still works (tried with NVIDIA's daemon), and a container's root cannot
    unlink the sockets of other tenants. The tenant's folder is mounted read-only too: the container's root
    must not change the limits, nor fill the host's run folder. /dev/shm is not shared, because client and
    server do not need it (measured on an H200, driver 580).
    """
    mebibytes, percent = part_of_process(part, rules.processes_per_tenant, rules.pooled_memory)
    asked = allocation.request.priority or ("below-normal" if rules.below_normal else "")
    # Without CUDA_MPS_CLIENT_PRIORITY, a client gets the daemon's default priority.
    priority = (("CUDA_MPS_CLIENT_PRIORITY", str(int(asked == "below-normal"))),) if asked else ()
    return Edits(
        env=(
            *cuda_env(allocation),
            ("CUDA_MPS_PIPE_DIRECTORY", f"{CONTAINER_PIPES}/p"),
            # The key is the ordinal 0, because the tenant sees only this device.
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
            Mount(str(tenant), CONTAINER_TENANT),
            Mount(str(guard), CONTAINER_GUARD),
        ),
        device_nodes=nodes,
    )
