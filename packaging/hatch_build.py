"""Build hook of the wheel: generates the gRPC modules with the grpcio-tools of the build environment."""

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StubsBuildHook(BuildHookInterface[Any]):
    """Runs before hatch collects the files of a wheel or of an editable install."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        sys.path.insert(0, str(root / "packaging"))
        from generate_stubs import generate

        generate(root)
