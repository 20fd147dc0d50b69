"""The folders of tenants of mode mps."""

import asyncio
from pathlib import Path

from tests.conditions import needs
from tests.fusefile import locked_in_the_kernel
from vgpud.modes.mps.folders import remove_tenant


@needs("root", "fuse")
def test_a_container_that_locks_its_folder_in_the_kernel_delays_no_release(tmp_path: Path) -> None:
    """Root in a container may list the folder that is mounted into it, and so lock it in the kernel."""
    folder = tmp_path / "t" / "a1"
    folder.mkdir(parents=True)
    (folder / "limits").write_text("50 1024 0 0\n")
    with locked_in_the_kernel(folder, tmp_path / "mount"):
        asyncio.run(remove_tenant(folder))
        assert not folder.exists()
