"""The context of the node: one object, made by the daemon, with what the parts of vgpud/node share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from vgpud.hardware.suspender import Suspender
from vgpud.inject.specs import Specs
from vgpud.model.tally import Tally
from vgpud.model.tenancy import Mode
from vgpud.modes.base import Effector, Suspendable
from vgpud.modes.mig import MigMode
from vgpud.modes.mps import MpsMode
from vgpud.modes.preload import Preload
from vgpud.node.devices.drains import Drains
from vgpud.node.devices.engines import Engines
from vgpud.node.devices.execute import Executor, FaultHook
from vgpud.node.devices.inventory import Inventory
from vgpud.node.devices.mig_layouts import MigLayouts
from vgpud.node.devices.notices import Notices
from vgpud.node.devices.operations import Operations
from vgpud.node.devices.policies import Policies
from vgpud.node.devices.transitions import Transitions
from vgpud.node.store.allocations import AllocationStore
from vgpud.node.store.book import Book
from vgpud.node.tenants.accounts import Accounts
from vgpud.node.tenants.activities import Activities
from vgpud.node.tenants.changes import Background, Changes
from vgpud.node.tenants.host_table import HostTable, host_memory
from vgpud.node.tenants.kept import Kept
from vgpud.policy.model import Policy


@dataclass(frozen=True)
class NodeContext:
    """What the parts of vgpud/node share. Each part takes from the context what it needs.

    `preload`, `mig` and `mps` are the effectors of these modes; None if a test replaces them. The device
    nodes of the host are below `host_root`.
    """

    store: AllocationStore
    inventory: Inventory
    policies: Policies
    transitions: Transitions
    effectors: Mapping[Mode, Effector]
    specs: Specs
    fault: FaultHook
    suspender: Suspender
    engines: Engines
    drains: Drains
    host_root: Path = Path("/")
    preload: Preload | None = None
    mig: MigMode | None = None
    mps: MpsMode | None = None
    background: Background = field(default_factory=Background)

    @property
    def book(self) -> Book:
        return self.store.book

    @property
    def tally(self) -> Tally:
        return self.store.account.tally

    @property
    def suspendable(self) -> Suspendable | None:
        """The part of mode preload that evicts tenants' memory; None if a test replaces the mode by one
        without this part.
        """
        return self.effectors[Mode.PRELOAD].suspendable

    def policy(self) -> Policy:
        return self.policies.policy

    @cached_property
    def changes(self) -> Changes:
        return Changes(self.book)

    @cached_property
    def accounts(self) -> Accounts:
        return Accounts()

    @cached_property
    def notices(self) -> Notices:
        return Notices(self.store, self.inventory, self.background.spawn)

    @cached_property
    def operations(self) -> Operations:
        return Operations(self.book, self.inventory, self.mig, self.mps, self.drains, self.notices)

    @cached_property
    def executor(self) -> Executor:
        return Executor(
            self.store,
            self.inventory,
            self.transitions,
            self.effectors,
            self.mig,
            self.specs,
            self.engines,
            self.fault,
        )

    @cached_property
    def mig_layouts(self) -> MigLayouts | None:
        """The layouts of MIG devices; None if a test replaces the effector of mode mig."""
        if self.mig is None:
            return None
        return MigLayouts(
            self.mig, self.inventory, self.store, self.transitions, lambda: self.policies.current, self.fault
        )

    @cached_property
    def activities(self) -> Activities:
        return Activities(self.suspendable)

    @cached_property
    def kept(self) -> Kept:
        return Kept(self.book, self.inventory, self.suspendable, self.activities)

    @cached_property
    def host(self) -> HostTable:
        return HostTable(self.book, self.suspendable, lambda: host_memory(self.policy().pool))
