"""A node's configuration directories under a temporary root."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from vgpud.policy.layers import PolicyPaths
from vgpud.policy.load import LoadedPolicy, load


@dataclass(frozen=True)
class Etc:
    """Writes and loads policy files. `etc`, `run` and `lib` stand for the three directories of policies."""

    root: Path

    @property
    def paths(self) -> PolicyPaths:
        return PolicyPaths(
            main=self.root / "etc/vgpud.toml",
            vendor_dir=self.root / "lib/conf.d",
            run_dir=self.root / "run/conf.d",
            admin_dir=self.root / "etc/conf.d",
        )

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def load(self) -> LoadedPolicy:
        return load(self.paths)

    def names(self, loaded: LoadedPolicy) -> list[str]:
        return [str(path.relative_to(self.root)) for path in loaded.files]

    def origin(self, loaded: LoadedPolicy, key: str) -> str:
        return str(loaded.origins[key]).removeprefix(f"{self.root}/")


@pytest.fixture
def etc(tmp_path: Path) -> Etc:
    return Etc(tmp_path)
