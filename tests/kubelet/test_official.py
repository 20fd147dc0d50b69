"""The official Python client against the double of the API server, over HTTP."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conditions import needs, unmet
from tests.kubelet import official
from tests.kubelet.cluster import Cluster, HttpCluster
from tests.kubelet.test_slices import NODE, places, policy_of
from tests.planner.cards import h200_node
from tests.simnode import ROOT
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.serve.dra import slices
from vgpud.serve.dra.api import ApiServer
from vgpud.serve.dra.cards import cards_of


@needs("python-index")
def test_slices_are_published_by_the_official_kubernetes_client(tmp_path: Path) -> None:
    path = official.client()
    if path is None:
        unmet("python-index", official.why)
    cluster = Cluster()
    cluster.claims["ns", "a"] = {
        "metadata": {"namespace": "ns", "name": "a", "uid": "u-1"},
        "status": {"allocation": {"devices": {"results": []}}},
    }
    served = HttpCluster(cluster)
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(served.kubeconfig)
    cards = cards_of(h200_node(1).devices, policy_of("mig"), places, ())
    specs = slices.specs(NODE, cards, slices.Cluster(), cores=True)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.kubelet.official_script", kubeconfig, json.dumps(specs)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{path}:{ROOT}"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    finally:
        served.close()
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["minor"], said["left"], said["claim"]) == (36, "node-1-gpu.vgpud.io-000", "u-1")
    assert said["status"] == {"allocation": {"devices": {"results": []}}, "devices": []}
    assert said["missing"][:2] == [804, 404]
    assert said["conflict"][:2] == [804, 409]
    assert said["again"][:2] == [804, 409]
    assert said["invalid"][:2] == [804, 422]
    assert "colour" in said["invalid"][2]
    assert said["no kubeconfig"][0] == 106
    assert said["away"][0] == 801
    assert not said["watched too early"], "the watch ends at the deletion of the slices"
    assert not cluster.slices_by_name


def test_a_missing_kubernetes_client_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(VgpuError) as refused:
        asyncio.run(ApiServer(tmp_path / "x").minor())
    assert refused.value.code is ErrorCode.UNSUPPORTED
    assert "vgpud[dra]" in refused.value.hint
