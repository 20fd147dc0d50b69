"""The keeper's collaborators."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vgpud.hardware.suspender import Suspender
from vgpud.inject.specs import Specs
from vgpud.model.tenancy import Mode
from vgpud.modes.base import Effector
from vgpud.modes.mig import MigMode
from vgpud.modes.mps import MpsMode
from vgpud.modes.preload import Preload
from vgpud.node.devices.drains import Drains
from vgpud.node.devices.engines import Engines
from vgpud.node.devices.execute import Executor, FaultHook
from vgpud.node.devices.inventory import Inventory
from vgpud.node.devices.mig_layouts import LayoutParts, MigLayouts
from vgpud.node.devices.transitions import Transitions
from vgpud.node.policies import Policies
from vgpud.node.store.allocations import AllocationStore
from vgpud.node.store.book import Book
from vgpud.node.tenants.activities import Activities
from vgpud.node.tenants.changes import Changes
from vgpud.node.tenants.checkpoints import TenantServices
from vgpud.node.tenants.host_table import HostTable, host_memory
from vgpud.node.tenants.kept import Kept
from vgpud.policy.load import LoadedPolicy


@dataclass(frozen=True)
class Parts:
    """The collaborators with which the keeper is made. `load_policy` reads the policy files again."""

    store: AllocationStore
    inventory: Inventory
    transitions: Transitions
    effectors: Mapping[Mode, Effector]
    specs: Specs
    load_policy: Callable[[], LoadedPolicy]
    fault: FaultHook
    suspender: Suspender
    engines: Engines
    drains: Drains
    host_root: Path = Path("/")

    @property
    def book(self) -> Book:
        return self.store.book

    @property
    def preload(self) -> Preload | None:
        """The effector of mode preload; None if a test replaces it."""
        effector = self.effectors[Mode.PRELOAD]
        return effector if isinstance(effector, Preload) else None

    @property
    def mig(self) -> MigMode | None:
        effector = self.effectors[Mode.MIG]
        return effector if isinstance(effector, MigMode) else None

    @property
    def mps(self) -> MpsMode | None:
        effector = self.effectors[Mode.MPS]
        return effector if isinstance(effector, MpsMode) else None

    @cached_property
    def executor(self) -> Executor:
        return Executor(
            self.store,
            self.inventory,
            self.transitions,
            self.effectors,
            self.specs,
            self.engines,
            self.fault,
        )

    def mig_layouts(self, policies: Policies) -> MigLayouts | None:
        """The layouts of MIG devices; None if a test replaces the effector of mode mig."""
        mig = self.mig
        if mig is None:
            return None
        inventory, transitions = self.inventory, self.transitions
        return MigLayouts(
            LayoutParts(mig, inventory, self.store, transitions, lambda: policies.current, self.fault)
        )

    def tenant_services(self, policies: Policies, changes: Changes) -> TenantServices:
        activities = Activities(self.preload)
        return TenantServices(
            store=self.store,
            inventory=self.inventory,
            effectors=self.effectors,
            preload=self.preload,
            changes=changes,
            transitions=self.transitions,
            suspender=self.suspender,
            host=HostTable(self.book, self.preload, lambda: host_memory(policies.policy.pool)),
            fault=self.fault,
            activities=activities,
            kept=Kept(self.book, self.inventory, self.preload, activities),
            unevictable=lambda: policies.policy.pool.unevictable,
            host_root=self.host_root,
        )
