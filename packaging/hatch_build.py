"""Build hook: the gRPC stubs are made by the grpcio-tools of the environment that builds."""

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StubsBuildHook(BuildHookInterface[Any]):
    """Runs before files are collected, for wheels and for editable installs."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        sys.path.insert(0, str(root / "packaging"))
        from generate_stubs import generate

        generate(root)
