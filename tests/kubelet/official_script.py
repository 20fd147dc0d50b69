"""Sends vgpud's requests to the API server over real HTTP. Runs with the official client on PYTHONPATH."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from vgpud.model.errors import VgpuError
from vgpud.serve.dra.api import ApiServer, Refusal
from vgpud.serve.dra.publisher import Publisher


async def refused(work: Any) -> list[Any]:
    try:
        await work
    except VgpuError as error:
        return [error.code.number, error.status if isinstance(error, Refusal) else 0, str(error)]
    return []


async def story(kubeconfig: Path, specs: list[Any]) -> dict[str, Any]:
    api = ApiServer(kubeconfig)
    publisher = Publisher(api, "node-1", lambda: None)
    said: dict[str, Any] = {"minor": await api.minor()}
    await publisher.publish(lambda able: tuple(specs))
    await publisher.publish(lambda able: tuple(specs[:1]))
    ((left,), _) = await api.slices("gpu.vgpud.io", "node-1")
    said["left"] = left["metadata"]["name"]
    claim = await api.claim("ns", "a")
    said["claim"] = claim["metadata"]["uid"]
    written = {**claim, "status": {**claim["status"], "devices": []}}
    said["status"] = (await api.replace_claim_status(written))["status"]
    said["missing"] = await refused(api.claim("ns", "b"))
    stale = {**left, "metadata": {**left["metadata"], "resourceVersion": "0"}}
    said["conflict"] = await refused(api.replace_slice(stale))
    said["invalid"] = await refused(api.replace_slice({**left, "spec": {**left["spec"], "colour": "red"}}))
    said["again"] = await refused(api.create_slice(left))
    said["no kubeconfig"] = await refused(ApiServer(kubeconfig.parent / "none").minor())
    away = kubeconfig.parent / "away"
    away.write_text(kubeconfig.read_text().replace("127.0.0.1:", "127.0.0.1:1/"))
    said["away"] = await refused(ApiServer(away).minor())
    _, version = await api.slices("gpu.vgpud.io", "node-1")
    watch = asyncio.ensure_future(api.watch_slices("gpu.vgpud.io", "node-1", version))
    said["watched too early"] = (await asyncio.wait((watch,), timeout=0.2))[0] != set()
    await publisher.withdraw()
    await asyncio.wait_for(watch, 60)
    return said


if __name__ == "__main__":
    print(json.dumps(asyncio.run(story(Path(sys.argv[1]), json.loads(sys.argv[2])))))
