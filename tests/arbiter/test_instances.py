"""MIG instances as devices: tenants take turns within an instance, and instances do not affect each other."""

import json

from tests.arbiter.accounts import divide
from tests.arbiter.conftest import LONG, Card, counters
from tests.sim.test_mig import HEAD
from vgpud.lease import SharePolicy

HARD, NONE = SharePolicy.HARD, SharePolicy.NONE
TWO = """
n.nvmlDeviceSetMigMode(h, 1)
made = [slice(9)[2], slice(9)[2]]
uuids = [n.nvmlDeviceGetUUID(device) for device in made]
print(json.dumps(uuids))
"""


def test_shares_on_one_mig_instance_give_no_time_slices_on_another_instance(card: Card) -> None:
    uuids = json.loads(card.sim.python(HEAD + TWO))
    card.uuids = tuple(uuids)
    small, large = card.lease("a", HARD, 30), card.lease("b", HARD, 60)
    beside = card.lease("c", NONE, 100, first_device=1)
    for lease in (small, large, beside):
        card.spin(lease, LONG)
    divide(small, large, least=15, most=45)
    assert counters(beside)["turns"] <= 3
