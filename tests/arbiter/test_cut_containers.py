"""Engine `cut` for a tenant in namespaces of its own, as in a container."""

import pytest

from tests.arbiter.accounts import is_held_to
from tests.arbiter.conftest import LONG, Card, counters
from tests.arbiter.test_cut import table
from tests.conditions import needs
from tests.e2e.support import eventually
from vgpud.lease import SharePolicy

PIDS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
USERS = ("unshare", "--user", "--map-root-user")


@needs("namespaces", "user-namespaces")
@pytest.mark.parametrize("around", [PIDS, USERS, (*USERS, *PIDS[1:])], ids=["pids", "users", "both"])
def test_an_arbiter_outside_of_a_tenants_namespaces_preempts_the_tenant(
    cut_card: Card, around: tuple[str, ...]
) -> None:
    lease = cut_card.lease("a", SharePolicy.HARD, 25)
    cut_card.spin(lease, LONG, around=around)
    eventually(lambda: table(lease)[0] == 1, "it is off")
    is_held_to(lease, 25)
    assert counters(lease)["bypasses"] == 0
