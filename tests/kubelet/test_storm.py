"""Pods during kills of vgpud and the kubelet: each running pod has its limits, and nothing is left."""

from pathlib import Path

from tests.e2e.conftest import node_maker
from tests.kubelet.conftest import run
from tests.kubelet.storm import stormy_node, weathered


def test_pods_keep_their_limits_while_vgpud_and_the_kubelet_are_killed(tmp_path: Path) -> None:
    async def story() -> None:
        outcome = await weathered(stormy_node(make), pods=24, kills=3, restarts=1)
        assert outcome.ran == 24

    with node_maker(tmp_path) as make:
        run(story())
