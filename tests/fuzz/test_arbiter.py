"""The arbiter, built with sanitizers, and hostile tenants that are registered with it."""

import fcntl
import os
import random
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.lease.conftest import eventually
from tests.native.harness import GIB, GID, TEST_BUILD, UID, UUIDS, connect_to_arbiter
from vgpud import lease_layout as layout
from vgpud.lease import ArbiterClient, DeviceLimits, SharePolicy, update_limits, write_lease

REGISTER, WELCOME, WANT, DONE, ENDING = 1, 2, 4, 5, 8
ROUNDS = 1500


class Tenant:
    """One process of a lease as the arbiter sees it: a locked slot and a connection."""

    def __init__(self, lease: Path, slot: int) -> None:
        self.usage = os.open(lease / layout.USAGE_FILE, os.O_RDWR)
        at = layout.USAGE_SLOTS + slot * layout.SLOT_SIZE
        fcntl.lockf(self.usage, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
        self.slot = slot
        self.line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        eventually(lambda: self.registers(lease))
        self.line.setblocking(False)

    def registers(self, lease: Path) -> bool:
        """Returns whether the registration succeeds. The arbiter refuses it if checking the locks takes too
        long; libvgpu then tries again. On a slow file system, the arbiter binds the lease's socket later.
        """
        self.line.close()
        self.line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connect_to_arbiter(self.line, lease)
        except FileNotFoundError:
            return False
        self.line.settimeout(300)
        self.line.send(message(REGISTER, self.slot))
        (kind,) = struct.unpack_from("<I", self.line.recv(4096))
        return bool(kind == WELCOME)

    def say(self, words: bytes) -> None:
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            self.line.send(words)

    def listen(self) -> None:
        with suppress(BlockingIOError, ConnectionResetError):
            while self.line.recv(4096):
                continue

    def scribble(self, dice: random.Random) -> None:
        noise = dice.choice([b"\xff" * 64, b"\0" * 64, dice.randbytes(64)])
        os.pwrite(self.usage, noise, dice.randrange(layout.USAGE_SIZE))

    def close(self) -> None:
        self.line.close()
        os.close(self.usage)


def message(kind: int, slot: int, turn: bytes = b"") -> bytes:
    return (struct.pack("<IIIIq", kind, layout.VERSION, slot, 0, 0) + turn).ljust(layout.MESSAGE_SIZE, b"\0")


def rude(dice: random.Random, slot: int) -> bytes:
    """A message about a time slice with random numbers in its fields, or sometimes an invalid message."""
    word = [0, 1, 2, 3, 1000, 20_000_000, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1]
    numbers = [dice.choice(word) for _ in range(3)]
    flags, devices = dice.choice([0, 1, 4, 31, 0xFFFFFFFF]), dice.choice([0, 1, 2, 3, 0x8000, 0xFFFFFFFF])
    turn = struct.pack("<QQQIIQ", *numbers, flags, devices, dice.choice(word))
    whole = message(dice.choice([WANT, WANT, DONE, ENDING]), slot, turn)
    return whole if dice.random() < 0.98 else dice.randbytes(dice.choice([1, 87, 88, 89]))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "leases").mkdir()
    command = [str(TEST_BUILD / "arbiter-sanitized"), "--run-dir", str(tmp_path), "--foreground"]
    with (tmp_path / "said").open("wb") as said:
        arbiter = subprocess.Popen(command, stderr=said)
    try:
        eventually(ArbiterClient(tmp_path / "arbiter" / "control.sock").ready)
        yield tmp_path
        assert arbiter.poll() is None, (tmp_path / "said").read_text()
        assert "Sanitizer" not in (tmp_path / "said").read_text()
    finally:
        arbiter.terminate()
        arbiter.wait()


def limits(dice: random.Random) -> list[DeviceLimits]:
    return [
        DeviceLimits(uuid, GIB, dice.choice([1, 2500, 10000]), dice.choice(list(SharePolicy)), 0)
        for uuid in UUIDS
    ]


@pytest.mark.parametrize("seed", range(3))
def test_hostile_tenants_harm_no_other_tenant_of_the_arbiter(folder: Path, seed: int) -> None:
    """Three tenants on the same devices send random data. A fourth tenant is served as if it were alone."""
    dice = random.Random(seed)
    client = ArbiterClient(folder / "arbiter" / "control.sock")
    leases = [write_lease(folder / "leases", f"rude{i}", limits(dice), uid=UID, gid=GID) for i in range(3)]
    for lease in leases:
        client.add(lease.name)
    tenants = [Tenant(lease, dice.randrange(layout.MAX_SLOTS)) for lease in leases]
    for round_number in range(ROUNDS):
        tenant = dice.choice(tenants)
        tenant.say(rude(dice, tenant.slot))
        if round_number % 7 == 0:
            tenant.scribble(dice)
            tenant.listen()
        if round_number % 97 == 0:
            which = dice.randrange(len(leases))
            update_limits(leases[which], limits(dice))
            tenants[which].close()
            tenants[which] = Tenant(leases[which], dice.randrange(layout.MAX_SLOTS))
    good = write_lease(folder / "leases", "good", [DeviceLimits(UUIDS[0], GIB)], uid=UID, gid=GID)
    client.add("good")
    polite = Tenant(good, 0)
    assert client.list("good") == (os.getpid(),)
    for tenant in (polite, *tenants):
        tenant.close()
