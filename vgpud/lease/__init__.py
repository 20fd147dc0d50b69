"""The lease of a tenant that libvgpu limits: its limits (pages.py), its use (usage.py), and the arbiter that
serves it (arbiter.py).
"""

from vgpud.lease.arbiter import ArbiterClient, Registered
from vgpud.lease.contexts import ContextCosts
from vgpud.lease.memory import LeaseMemory, LeaseSaves
from vgpud.lease.pages import (
    DeviceLimits,
    Limits,
    SharePolicy,
    close_lease,
    lease_home,
    list_leases,
    note_moved,
    read_limits,
    remove_graves,
    remove_lease,
    update_limits,
    write_lease,
)
from vgpud.lease.swap import ProcessSwap, SwapPhase, read_stays, read_swaps, within
from vgpud.lease.usage import (
    LeaseActivity,
    LeaseMeter,
    Meter,
    MeterPages,
    ProcessUse,
    UnknownCalls,
    Usage,
    parse_meters,
    read_activity,
    read_counted,
    read_meter_pages,
    read_meters,
    read_unknown_calls,
    read_usage,
)
from vgpud.lease.writers import Libraries, Writers
from vgpud.lease_layout import ANYONE_FOLDER, USAGE_MOUNT

__all__ = [
    "ANYONE_FOLDER",
    "USAGE_MOUNT",
    "ArbiterClient",
    "ContextCosts",
    "DeviceLimits",
    "LeaseActivity",
    "LeaseMemory",
    "LeaseMeter",
    "LeaseSaves",
    "Libraries",
    "Limits",
    "Meter",
    "MeterPages",
    "ProcessSwap",
    "ProcessUse",
    "Registered",
    "SharePolicy",
    "SwapPhase",
    "UnknownCalls",
    "Usage",
    "Writers",
    "close_lease",
    "lease_home",
    "list_leases",
    "note_moved",
    "parse_meters",
    "read_activity",
    "read_counted",
    "read_limits",
    "read_meter_pages",
    "read_meters",
    "read_stays",
    "read_swaps",
    "read_unknown_calls",
    "read_usage",
    "remove_graves",
    "remove_lease",
    "update_limits",
    "within",
    "write_lease",
]
