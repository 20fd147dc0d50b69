"""Writes the CDI specs of this node. It holds their folder and the parts that all specs share."""

from pathlib import Path

from vgpud.inject import cdi
from vgpud.inject.driver import DriverFiles
from vgpud.inject.hooks import HookProgram
from vgpud.model.tenancy import Allocation


class Specs:
    """The CDI specs of the node. If the driver changes, `driver` is replaced, and existing specs must be
    written again.
    """

    def __init__(
        self, folder: Path, hook: HookProgram | None = None, driver: DriverFiles | None = None
    ) -> None:
        self.folder = folder
        self.driver = driver or DriverFiles()
        self._hook = hook

    @property
    def hook(self) -> HookProgram | None:
        """The hook program; None if it is not installed. Without it, limits reach a container only through
        its environment.
        """
        return self._hook if self._hook is not None and self._hook.exists else None

    def write(self, allocation: Allocation) -> Path:
        """Writes the allocation's spec and returns its path. Raises VgpuError(CDI_FAILED)."""
        return cdi.write_spec(self.folder, allocation, self.driver, self.hook)

    def is_current(self, allocation: Allocation) -> bool:
        """Does the allocation's spec file have the content that `write` would give it?"""
        try:
            text = cdi.spec_path(self.folder, allocation.id).read_text()
        except (OSError, UnicodeDecodeError):
            return False
        return text == cdi.spec_text(allocation, self.driver, self.hook)

    def remove(self, allocation_id: str) -> None:
        """Removes the spec of an allocation if it exists. Raises VgpuError(CDI_FAILED) if the file cannot be
        removed.
        """
        cdi.remove_spec(self.folder, allocation_id)

    def list(self) -> frozenset[str]:
        """The ids of the allocations that have a spec."""
        return cdi.list_specs(self.folder)
