"""MIG instances as devices: turns within an instance, and none between instances."""

import json

from tests.arbiter.conftest import Card, counters, percent
from tests.sim.test_mig import HEAD
from vgpud.lease import SharePolicy

HARD, NONE = SharePolicy.HARD, SharePolicy.NONE
TWO = """
n.nvmlDeviceSetMigMode(h, 1)
made = [slice(9)[2], slice(9)[2]]
uuids = [n.nvmlDeviceGetUUID(device) for device in made]
card = n.nvmlDeviceGetNumGpuCores(h) // 128
print(json.dumps([uuids, n.nvmlDeviceGetAttributes_v2(made[0]).multiprocessorCount / card]))
"""


def test_shares_hold_within_an_instance_and_do_not_reach_into_the_next(card: Card) -> None:
    uuids, part = json.loads(card.sim.python(HEAD + TWO))
    card.uuids = tuple(uuids)
    small, large = card.lease("a", HARD, 30), card.lease("b", HARD, 60)
    beside = card.lease("c", NONE, 100, first_device=1)
    processes = [card.spin(lease, 2.0) for lease in (small, large, beside)]
    got = [percent(process) / part for process in processes]
    assert 12 < got[0] < 35, got
    assert 1.5 * got[0] < got[1] < 66, got
    assert got[2] > 75, got
    assert counters(small)["turns"] > 5 < counters(large)["turns"]
    assert counters(beside)["waited_ns"] < 1e8
