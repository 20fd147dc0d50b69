"""The lease of a preload tenant: its pages (pages.py), and the arbiter that serves it (arbiter.py)."""

from vgpud.lease.arbiter import ArbiterClient
from vgpud.lease.contexts import ContextCosts
from vgpud.lease.pages import (
    DeviceLimits,
    LeaseActivity,
    LeaseMeter,
    Limits,
    Meter,
    ProcessUse,
    SharePolicy,
    Usage,
    close_lease,
    list_leases,
    read_activity,
    read_limits,
    read_meters,
    read_usage,
    remove_lease,
    update_limits,
    write_lease,
)

__all__ = [
    "ArbiterClient",
    "ContextCosts",
    "DeviceLimits",
    "LeaseActivity",
    "LeaseMeter",
    "Limits",
    "Meter",
    "ProcessUse",
    "SharePolicy",
    "Usage",
    "close_lease",
    "list_leases",
    "read_activity",
    "read_limits",
    "read_meters",
    "read_usage",
    "remove_lease",
    "update_limits",
    "write_lease",
]
