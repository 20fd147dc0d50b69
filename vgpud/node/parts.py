"""The keeper's collaborators."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vgpud.hardware.suspender import Suspender
from vgpud.inject.specs import Specs
from vgpud.model.tenancy import Mode
from vgpud.modes.base import Effector
from vgpud.node.devices.drains import Drains
from vgpud.node.devices.engines import Engines
from vgpud.node.devices.execute import FaultHook
from vgpud.node.devices.inventory import Inventory
from vgpud.node.devices.transitions import Transitions
from vgpud.node.store.allocations import AllocationStore
from vgpud.node.store.book import Book
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
    drains: Drains = field(default_factory=Drains)
    host_root: Path = Path("/")

    @property
    def book(self) -> Book:
        return self.store.book
