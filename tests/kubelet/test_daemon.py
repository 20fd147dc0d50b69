"""A whole vgpud on a simulated node, with a double of the kubelet."""

import asyncio
import json
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.demo.node import DemoNode
from tests.e2e.conftest import NodeMaker, end_helpers, node_maker
from tests.e2e.support import eventually, simulate, states
from tests.kubelet.conftest import run
from tests.kubelet.double import AdmissionError, fixed_plugins, kubelet

POLICY = """version = 1
[[device]]
match = { index = 0 }
mode = "mig"
[[device]]
mode = "preload"

[kubelet]
check_seconds = 0.5
release_seconds = 1
[[kubelet.resource]]
name = "nvidia.com/mig-{profile}"
kind = "mig"
profiles = ["1g.18gb", "3g.71gb"]
[[kubelet.resource]]
name = "vgpud.io/memory-gib"
kind = "memory"
[[kubelet.resource]]
name = "vgpud.io/half"
kind = "part"
parts = 2
"""
UNITS = "vgpud.io/memory-gib"


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[NodeMaker]:
    with node_maker(tmp_path) as make:
        yield make


def folders(root: Path) -> dict[str, str]:
    return {"VGPUD_KUBELET_DIR": str(root), "VGPUD_DEVICE_PLUGINS_DIR": str(fixed_plugins(root))}


def started(make_node: NodeMaker) -> DemoNode:
    node = make_node("h200x8", POLICY)
    node.environment |= folders(node.folder / "k")
    node.start()
    return node


def spec_of(node: DemoNode, name: str) -> dict[str, Any]:
    path = node.folder / "cdi" / f"vgpud.io-vgpu_{name.partition('=')[2]}.json"
    spec: dict[str, Any] = json.loads(path.read_text())
    return spec


async def held_on(node: DemoNode) -> list[Any]:
    listed = await asyncio.to_thread(node.ctl_json, "ls")
    return list(listed["items"])


async def leaves_nothing(node: DemoNode) -> None:
    await asyncio.to_thread(eventually, lambda: not states(node), "nothing is held")
    assert list((node.folder / "cdi").glob("*.json")) == []
    assert list((node.run_dir / "leases").iterdir()) == []


def test_pods_with_mig_instances_or_memory_units_keep_their_devices_across_restarts_of_vgpud(
    make_node: NodeMaker,
) -> None:
    node = started(make_node)

    async def story() -> None:
        async with kubelet(node.folder / "k") as k:
            await k.healthy("nvidia.com/mig-1g.18gb", 7)
            await k.healthy("nvidia.com/mig-3g.71gb", 2)
            all_units = await k.healthy(UNITS, 7 * 139)
            small = await k.admit("a/small", "nvidia.com/mig-1g.18gb", 1)
            await k.healthy("nvidia.com/mig-3g.71gb", 1)
            with pytest.raises(AdmissionError, match=r"instances 1g\.18gb of one card"):
                await k.admit("a/two", "nvidia.com/mig-1g.18gb", 2)
            held = await k.admit("a/memory", UNITS, 7)
            env = spec_of(node, held.cdi_devices[0].name)["devices"][0]["containerEdits"]["env"]
            assert any(entry.startswith("CUDA_VISIBLE_DEVICES=GPU-") for entry in env)
            mounts = spec_of(node, held.cdi_devices[0].name)["devices"][0]["containerEdits"]["mounts"]
            usage = next(m["hostPath"] for m in mounts if m["containerPath"].endswith("/usage"))
            assert Path(usage).stat().st_mode & 0o777 == 0o666, "a pod's user is not known"
            await k.healthy("vgpud.io/half", 13)
            mig = json.dumps(spec_of(node, small.cdi_devices[0].name))
            assert "CUDA_VISIBLE_DEVICES=MIG-" in mig

            await asyncio.to_thread(node.kill)
            await k.wait(lambda: all(endpoint.ended for endpoint in k.endpoints.values()))
            await k.restart()
            await asyncio.to_thread(node.start)
            assert await k.healthy(UNITS, len(all_units)) >= k.in_use(UNITS)
            await k.healthy("nvidia.com/mig-1g.18gb", 7)
            assert json.dumps(spec_of(node, small.cdi_devices[0].name)) == mig
            assert len(await held_on(node)) == 2
            # after the reboot the kubelet starts its pods again with the same device ids
            await asyncio.to_thread(reboot, node)
            await k.restart()
            await asyncio.to_thread(node.start)
            await k.healthy("nvidia.com/mig-1g.18gb", 7)
            assert "CUDA_VISIBLE_DEVICES=MIG-" in json.dumps(spec_of(node, small.cdi_devices[0].name))
            mounts = spec_of(node, held.cdi_devices[0].name)["devices"][0]["containerEdits"]["mounts"]
            assert all(Path(m["hostPath"]).exists() for m in mounts)
            assert {item["state"] for item in await held_on(node)} == {"active"}
            k.end("a/small")
            k.end("a/memory")
            await leaves_nothing(node)

    run(story())
    assert node.stop() == 0


def test_the_hook_in_the_cdi_spec_of_a_pod_binds_its_container(make_node: NodeMaker) -> None:
    node = started(make_node)

    def bind(spec: dict[str, Any], init: int) -> subprocess.CompletedProcess[str]:
        hooks = spec["devices"][0]["containerEdits"]["hooks"]
        (hook,) = [one for one in hooks if one["hookName"] == "createRuntime"]
        names = ("sandbox-namespace", "sandbox-name", "container-name")
        annotations = {f"io.kubernetes.cri.{n}": w for n, w in zip(names, ("a", "b", "main"), strict=True)}
        state = json.dumps({"pid": init, "bundle": "/b", "annotations": annotations})
        return subprocess.run(
            [hook["path"], *hook["args"][1:]], input=state, capture_output=True, text=True, check=False
        )

    async def story() -> None:
        async with kubelet(node.folder / "k") as k:
            await k.healthy(UNITS, 7 * 139)
            held = await k.admit("a/b", UNITS, 7, container="init", init=True)
            spec = spec_of(node, held.cdi_devices[0].name)
            with subprocess.Popen(["sleep", "600"]) as init:
                done = await asyncio.to_thread(bind, spec, init.pid)
                assert done.returncode == 0, done.stderr
                # the pod was deleted by force, and its container keeps running for longer than
                # release_seconds
                k.end("a/b")
                await asyncio.sleep(3)
                assert len(await held_on(node)) == 1
                init.kill()
            await leaves_nothing(node)
            with subprocess.Popen(["sleep", "600"]) as init:
                done = await asyncio.to_thread(bind, spec, init.pid)
                assert done.returncode == 1 and "E301" in done.stderr, (
                    "no container of what is released starts"
                )
                init.kill()

    run(story())
    assert node.stop() == 0


def test_pods_get_mig_compute_instances(make_node: NodeMaker) -> None:
    """The policy names a profile of compute instances, which becomes a resource: three instances of one slice
    in each of two GPU instances.
    """
    parts = POLICY.replace('["1g.18gb", "3g.71gb"]', '["1c.3g.71gb"]')
    node = make_node("h200x8", parts)
    node.environment |= folders(node.folder / "k")
    node.start()

    async def story() -> None:
        async with kubelet(node.folder / "k") as k:
            await k.healthy("nvidia.com/mig-1c.3g.71gb", 6)
            held = [await k.admit(f"a/{name}", "nvidia.com/mig-1c.3g.71gb", 1) for name in ("one", "two")]
            items = await held_on(node)
            assert len({item["slices"][0]["mig"]["gpuInstanceId"] for item in items}) == 1
            texts = [json.dumps(spec_of(node, one.cdi_devices[0].name)) for one in held]
            assert all(text.count("nvidia-caps/") == 2 for text in texts)
            await k.healthy("nvidia.com/mig-1c.3g.71gb", 6)

    run(story())
    assert node.stop() == 0


def reboot(node: DemoNode) -> None:
    """Ends all processes, empties /run, removes MIG instances and changes the kernel's boot id. /var
    stays.
    """
    node.kill()
    end_helpers(node)
    simulate(node, "reboot")
    shutil.rmtree(node.run_dir)
    shutil.rmtree(node.folder / "cdi")
    with closing(sqlite3.connect(node.folder / "state" / "ledger.db")) as ledger, ledger:
        assert ledger.execute("UPDATE meta SET value = 'x' WHERE key = 'boot_id'").rowcount == 1
    started = node.folder / "state" / "containers.json"
    if started.exists():
        started.write_text(json.dumps(json.loads(started.read_text()) | {"boot_id": "x"}))


@pytest.mark.parametrize("point", ["allocate.attach-0", "allocate.commit"])
def test_a_kill_of_vgpud_during_an_allocate_call_leaves_a_consistent_state(
    make_node: NodeMaker, point: str
) -> None:
    node = make_node("h200x8", POLICY)
    node.environment |= folders(node.folder / "k")
    node.start(fault_point=point)

    async def story() -> None:
        async with kubelet(node.folder / "k") as k:
            await k.healthy(UNITS, 7 * 139)
            with pytest.raises(AdmissionError):
                await k.admit("a/cut", UNITS, 3)
            assert node.daemon is not None
            node.daemon.wait(300)
            await asyncio.to_thread(node.start)
            await k.healthy(UNITS, 7 * 139)
            again = await k.admit("a/cut", UNITS, 3)
            assert again.cdi_devices
            assert len(await held_on(node)) == 1
            k.end("a/cut")
            await leaves_nothing(node)

    run(story())
