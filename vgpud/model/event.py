"""Events for watchers. Events are numbered and in order, so that a watcher can continue after the last event
that it received.
"""

from dataclasses import dataclass
from enum import StrEnum


class EventKind(StrEnum):
    ALLOCATION_ACTIVE = "allocation_active"
    ALLOCATION_NAMED = "allocation_named"  # the allocation's pod or claim became known
    ALLOCATION_RESIZED = "allocation_resized"
    ALLOCATION_PAUSED = "allocation_paused"
    ALLOCATION_UNPAUSED = "allocation_unpaused"
    ALLOCATION_SUSPENDED = "allocation_suspended"
    ALLOCATION_RESUMED = "allocation_resumed"
    ALLOCATION_MOVED = "allocation_moved"
    ALLOCATION_RELEASED = "allocation_released"
    ALLOCATION_FAILED = "allocation_failed"
    ALLOCATION_BYPASSED = "allocation_bypassed"
    ALLOCATION_TAMPERED = "allocation_tampered"
    ALLOCATION_STOPPED = "allocation_stopped"  # vgpud ended the allocation's processes
    ALLOCATION_UNKNOWN_CALLS = "allocation_unknown_calls"
    ALLOCATION_GATED = "allocation_gated"
    ALLOCATION_CLEARED = "allocation_cleared"  # the allocation is no longer marked as bypassed or gated
    DEVICE_CHANGED = "device_changed"
    DEVICE_LOST = "device_lost"
    POLICY_RELOADED = "policy_reloaded"
    ARBITER_CHANGED = "arbiter_changed"  # the arbiter does not answer, has ended, or runs again
    VGPUD_STARTED = "vgpud_started"


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `subject` is an allocation id, a device UUID, the policy's digest, or the name of a program
    of vgpud. `user` is the uid of the user against whose quota the allocation counts; root for other
    subjects.
    """

    revision: int
    kind: EventKind
    subject: str
    sentence: str
    unix_ns: int
    user: int = 0
