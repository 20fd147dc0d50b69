"""The CDI specs of this node: their common parts and their folder."""

from pathlib import Path

from vgpud.inject import cdi
from vgpud.inject.driver import DriverFiles
from vgpud.inject.hooks import HookProgram
from vgpud.model.tenancy import Allocation


class Specs:
    """`driver` may be replaced when the driver changes; existing specs must then be written again."""

    def __init__(
        self, folder: Path, hook: HookProgram | None = None, driver: DriverFiles | None = None
    ) -> None:
        self.folder = folder
        self.driver = driver or DriverFiles()
        self._hook = hook

    @property
    def hook(self) -> HookProgram | None:
        """The hook program; None if it is not installed. Limits then reach a container through its
        environment only.
        """
        return self._hook if self._hook is not None and self._hook.exists else None

    def write(self, allocation: Allocation) -> Path:
        """Raises VgpuError(CDI_FAILED)."""
        return cdi.write_spec(self.folder, allocation, self.driver, self.hook)

    def is_current(self, allocation: Allocation) -> bool:
        """Does the file have the content that `write` would write?"""
        try:
            text = cdi.spec_path(self.folder, allocation.id).read_text()
        except (OSError, UnicodeDecodeError):
            return False
        return text == cdi.spec_text(allocation, self.driver, self.hook)

    def remove(self, allocation_id: str) -> None:
        """Removes the spec if it exists. Raises VgpuError(CDI_FAILED) if it cannot be removed."""
        cdi.remove_spec(self.folder, allocation_id)

    def list(self) -> frozenset[str]:
        """The allocation ids that have a spec."""
        return cdi.list_specs(self.folder)
