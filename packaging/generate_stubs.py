"""Generates vgpud/api/gen/ with type stubs from the .proto files in vgpud/api/, by the installed
grpcio-tools.

Generated code checks the version of the protobuf runtime, so the code is generated where it will run and is
never committed. The kubelet's protocols in vgpud/api/kubelet/ become vgpud.api.gen.kubelet.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path


def generate(root: Path) -> Path:
    """Writes the generated modules and stubs below `root`. Raises subprocess.CalledProcessError and shows
    protoc's messages.
    """
    sources, out = root / "vgpud" / "api", root / "vgpud" / "api" / "gen"
    (out / "kubelet").mkdir(parents=True, exist_ok=True)
    arguments = [
        # maps vgpud/api to vgpud/api/gen, so that the generated modules import each other as vgpud.api.gen
        "-Ivgpud/api/gen=vgpud/api",
        "--python_out=.",
        "--grpc_python_out=.",
    ]
    if find_spec("mypy_protobuf") is not None:
        arguments += ["--mypy_out=quiet:.", "--mypy_grpc_out=quiet:."]
    protos = [f"vgpud/api/gen/{p.relative_to(sources)}" for p in sorted(sources.rglob("*.proto"))]
    environment = {"PATH": str(Path(sys.executable).parent) + ":/usr/bin:/bin"}
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", *arguments, *protos],
        # keeps standard input open: protoc's plugins read a pipe, which would get the number of a closed
        # standard input
        stdin=subprocess.DEVNULL,
        cwd=root,
        check=True,
        env=environment,
    )
    (out / "__init__.py").write_text('"""Generated from vgpud/api; see packaging/generate_stubs.py."""\n')
    (out / "kubelet" / "__init__.py").write_text('"""Generated: what vgpud and the kubelet say."""\n')
    return out


if __name__ == "__main__":
    generate(Path(__file__).resolve().parent.parent)
