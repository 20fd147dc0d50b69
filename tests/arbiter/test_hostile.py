"""Honest tenants beside hostile registered tenants, which send and write arbitrary data."""

import os
import random
import socket
import threading
from contextlib import closing, suppress
from pathlib import Path

from tests.arbiter.accounts import divide, is_bypassed_seldom
from tests.arbiter.conftest import LONG, Card
from tests.fuzz.test_arbiter import Tenant, message, rude
from vgpud import lease_layout as layout
from vgpud.lease import SharePolicy, read_meters

CONSERVING = SharePolicy.WORK_CONSERVING
WANT = 4


def harass(lease: Path, dice: random.Random, stop: threading.Event) -> None:
    """Sends and writes random data. Connects again whenever the arbiter closes the connection."""
    while not stop.is_set():
        with suppress(OSError), closing(Tenant(lease, dice.randrange(layout.MAX_SLOTS))) as tenant:
            for _ in range(dice.randrange(400)):
                if stop.wait(0.001):
                    break
                misbehave(tenant, dice)


def misbehave(tenant: Tenant, dice: random.Random) -> None:
    """Sends messages with random numbers of time slices, descriptors, and packets of random sizes. Writes
    random bytes into the usage page, and enlarges it.
    """
    tenant.listen()
    tenant.say(message(WANT, tenant.slot) if dice.randrange(2) else rude(dice, tenant.slot))
    tenant.scribble(dice)
    kind = dice.randrange(200)
    if kind == 0:
        socket.send_fds(tenant.line, [message(WANT, tenant.slot)], [tenant.usage] * 50)
    elif kind == 1:
        tenant.say(dice.randbytes(dice.choice([1, 87, 89, 60_000])))
    elif kind == 2:
        os.ftruncate(tenant.usage, dice.choice([0, 1, layout.USAGE_SIZE - 1, 1 << 20]))


def test_hostile_tenants_do_not_change_the_shares_of_other_tenants(card: Card) -> None:
    assert card.arbiter is not None
    stop = threading.Event()
    open_files = Path(f"/proc/{card.arbiter.pid}/fd")
    good = [card.lease(name, CONSERVING, 40) for name in ("good0", "good1")]
    bad = [card.lease(name, CONSERVING, 5) for name in ("bad0", "bad1")]
    threads = [
        threading.Thread(target=harass, args=(lease, random.Random(i), stop)) for i, lease in enumerate(bad)
    ]
    before = len(list(open_files.iterdir()))
    for thread in threads:
        thread.start()
    try:
        for lease in good:
            card.spin(lease, LONG)
        divide(*good, least=33, most=67)
        # the arbiter keeps no descriptor that a tenant passes to it
        assert len(list(open_files.iterdir())) < before + 60
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    for lease in good:
        (meter,) = read_meters(lease, 1)
        # the arbiter's own figure is shown, and not one that a tenant wrote
        assert meter.compute.used_ns < 3600e9
    is_bypassed_seldom(*good)
    assert card.client.ready()
