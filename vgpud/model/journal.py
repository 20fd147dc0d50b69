"""The journal's MESSAGE_IDs: one for each kind of line that an operator may search for.

A MESSAGE_ID is a 128-bit number (sd_journal_print(3), `systemd-id128 new`) and never changes. The file
systemd/vgpud.catalog explains each.
"""

from enum import StrEnum


class Message(StrEnum):
    # vgpud serves: its start has reconciled the ledger with the node
    READY = "fe771ec827c3f0b2d86dd09a8735bdef"
    # vgpud has stopped; tenants keep running under their last limits
    STOPPED = "475c6adae2b410f420e27138cd4b9750"
    ALLOCATED = "259ec1f76f3e39f00569999642f2885c"  # an allocation was made
    REFUSED = "07c64e7d797163414ecb8437d4bd4786"  # a request for an allocation was refused
    RELEASED = "566dd2b808fd1518bddd9b73ee9ad007"  # an allocation was released
    RESIZED = "fe6e5c1650379b24eaa2e08fc220e731"  # the limits of an allocation were changed
    ALLOCATION_FAILED = "2ebe7d43621024c111ddfee1e8854007"  # an allocation lost its device or its helper
    DEVICE_FAULT_REPORTED = (
        "e853be2891c23b33c2e416ef68d88b1c"  # the driver reported an Xid error, a fatal error or a lost device
    )
    MPS_DAEMON_DIED = "739554963bf8d224fb3dab35c261f299"  # an MPS control daemon died, and its tenants too
    ARBITER = "378b22473d0146858dc278f0f19412e7"  # the arbiter does not answer, has ended, or runs again
    POLICY_RELOADED = "fe2d0d7f01eb621b47b4592cf1da0298"  # a new policy is in force
    POLICY_REJECTED = "438eb91e83cebe095e18ab3ca2f9172a"  # a policy was rejected; the old one stays in force
    AUDIT = "8189ff3eca057a1903155717121a3f33"  # a change that a caller requested, and its result
    MARKED = "5d0c8f3ae0b94d1f8a7d3f6bb1c2e749"  # an allocation got a mark (model/marks.py)
    DRAINED = "3a88b6de9f4328de646782685c05bdaf"  # a device was drained, or accepts allocations again
