"""Reads how much host memory is free, for the device memory of suspended tenants."""

from pathlib import Path

from vgpud.planner.suspend import HostMemory
from vgpud.policy.model import PoolSettings

_MEMINFO = Path("/proc/meminfo")


def host_memory(pool: PoolSettings, meminfo: Path = _MEMINFO) -> HostMemory:
    """The host's available memory (MemAvailable of proc(5), in units of 1024 bytes), and the policy's bounds
    on its use.
    """
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    return HostMemory(available, pool.host_memory_reserve, pool.host_memory)
