"""The lease of a preload tenant: its pages (pages.py), and the arbiter that serves it (arbiter.py)."""

from vgpud.lease.arbiter import ArbiterClient
from vgpud.lease.contexts import ContextCosts
from vgpud.lease.memory import LeaseMemory
from vgpud.lease.pages import (
    DeviceLimits,
    LeaseActivity,
    LeaseMeter,
    Limits,
    Meter,
    MeterPages,
    ProcessUse,
    SharePolicy,
    Usage,
    close_lease,
    list_leases,
    parse_meters,
    read_activity,
    read_limits,
    read_meter_pages,
    read_meters,
    read_usage,
    remove_lease,
    update_limits,
    write_lease,
)
from vgpud.lease.swap import ProcessSwap, SwapPhase, read_swaps

__all__ = [
    "ArbiterClient",
    "ContextCosts",
    "DeviceLimits",
    "LeaseActivity",
    "LeaseMemory",
    "LeaseMeter",
    "Limits",
    "Meter",
    "MeterPages",
    "ProcessSwap",
    "ProcessUse",
    "SharePolicy",
    "SwapPhase",
    "Usage",
    "close_lease",
    "list_leases",
    "parse_meters",
    "read_activity",
    "read_limits",
    "read_meter_pages",
    "read_meters",
    "read_swaps",
    "read_usage",
    "remove_lease",
    "update_limits",
    "write_lease",
]
