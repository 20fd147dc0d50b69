"""Makes an image in the layout of an OCI registry from a root file system, for engines that run only
images.
"""

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

_KIND = "application/vnd.oci.image"


def make_image(rootfs: Path, name: str, archive: Path) -> Path:
    """Writes an archive with one image of one layer, as `ctr images import` and `docker load` read it."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(rootfs, arcname=".")
    with tarfile.open(archive, "w") as out:
        tree = _blob(out, layer.getvalue())
        config = _blob(
            out,
            _json(
                architecture="amd64",
                os="linux",
                config={"Cmd": ["/usr/bin/sleep", "600"], "Env": ["PATH=/usr/bin"]},
                rootfs={"type": "layers", "diff_ids": [tree["digest"]]},
            ),
        )
        manifest = _blob(
            out,
            _json(
                schemaVersion=2,
                mediaType=f"{_KIND}.manifest.v1+json",
                config={"mediaType": f"{_KIND}.config.v1+json", **config},
                layers=[{"mediaType": f"{_KIND}.layer.v1.tar", **tree}],
            ),
        )
        names = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
        listed = {"mediaType": f"{_KIND}.manifest.v1+json", **manifest, "annotations": names}
        _add(out, "index.json", _json(schemaVersion=2, manifests=[listed]))
        _add(out, "oci-layout", _json(imageLayoutVersion="1.0.0"))
        # the `docker load` of engines without containerd's image store reads this file
        blob = f"blobs/sha256/{tree['digest'].removeprefix('sha256:')}"
        setup = f"blobs/sha256/{config['digest'].removeprefix('sha256:')}"
        _add(
            out,
            "manifest.json",
            json.dumps([{"Config": setup, "RepoTags": [name], "Layers": [blob]}]).encode(),
        )
    return archive


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def _blob(out: tarfile.TarFile, data: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    _add(out, f"blobs/sha256/{digest}", data)
    return {"digest": f"sha256:{digest}", "size": len(data)}


def _add(out: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    out.addfile(entry, io.BytesIO(data))
