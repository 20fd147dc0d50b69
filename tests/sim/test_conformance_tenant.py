"""Under libvgpu a program gets the same results from the driver as without it, even while one of its streams
is being captured into a graph.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from tests.gpu.cuda_conformance import H200, answers, differences
from tests.native.harness import GIB, LIBVGPU, TEST_BUILD
from tests.sim.test_conformance import KNOWN
from tests.simnode import SimNode
from vgpud.lease import DeviceLimits, write_lease

Make = Callable[..., SimNode]

#: known differences: call -> (tenant, real H200)
KNOWN_OF_TENANT = {
    # libvgpu charges managed memory when it is allocated, and not when its pages are used
    "managed, untouched: bytes": (8388608, 0),
}


def test_a_tenant_under_libvgpu_gets_the_same_answers_as_from_the_driver(
    sim_node: Make, tmp_path: Path
) -> None:
    node = sim_node("h200x1")
    uuid = node.dump()["devices"][0]["uuid"]
    lease = write_lease(tmp_path, "a1", [DeviceLimits(uuid, 120 * GIB)], os.getuid(), os.getgid())
    env = node.environment({"LD_PRELOAD": str(LIBVGPU), "VGPU_LEASE": str(lease)})
    here, card = answers(TEST_BUILD / "cuda_conformance", env), json.loads(H200.read_text())
    assert differences(here, card) == KNOWN | KNOWN_OF_TENANT
