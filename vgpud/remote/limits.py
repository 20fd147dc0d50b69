"""Limits for the clients of the door: rates, and numbers of concurrent uses in all and for each key. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address, ip_network


def network_of(address: str) -> str:
    """Returns the network by which a client is counted: its IPv4 address, or the /64 of its IPv6 address,
    because a host can use every address of its /64 (RFC 4291). `address` is as accept(2) returns it.
    """
    found = ip_address(address.partition("%")[0])
    if not isinstance(found, IPv6Address):
        return str(found)
    if found.ipv4_mapped is not None:  # an IPv4 client of an IPv6 socket
        return str(found.ipv4_mapped)
    return str(ip_network((int(found), 64), strict=False))


@dataclass(slots=True)
class Rate:
    """A token bucket of size `burst`. Times are in seconds of one clock."""

    per_second: float
    burst: float
    _left: float = field(init=False)
    _at: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._left = self.burst

    def take(self, amount: float, now: float) -> bool:
        """Takes the amount if the bucket has it. Returns whether it was taken."""
        if self.owe(0.0, now) > 0.0 or self._left < amount:
            return False
        self._left -= amount
        return True

    def owe(self, amount: float, now: float) -> float:
        """Takes the amount in any case. Returns how many seconds the caller has to wait."""
        if self._at is not None:
            self._left = min(self.burst, self._left + (now - self._at) * self.per_second)
        self._at = now
        self._left -= amount
        return max(0.0, -self._left / self.per_second)


@dataclass(slots=True)
class Rates:
    """A rate for each key. The `most_keys` keys that were used last are remembered."""

    per_second: float
    burst: float
    most_keys: int
    _known: OrderedDict[str, Rate] = field(init=False, default_factory=OrderedDict)

    def take(self, key: str, now: float) -> bool:
        """Takes one from the key's bucket if it is not empty. Returns whether it was taken."""
        rate = self._known.pop(key, None) or Rate(self.per_second, self.burst)
        self._known[key] = rate
        if len(self._known) > self.most_keys:
            self._known.popitem(last=False)
        return rate.take(1, now)


@dataclass(slots=True)
class Places:
    """Limits the places in use to `most` in all and `most_each` for each key. The last `kept` places are
    reserved for keys that hold less than a sixteenth of `most_each`, or less than two, so that a few keys
    together cannot take all places.
    """

    most: int
    most_each: int
    kept: int = 0
    _held: Counter[str] = field(init=False, default_factory=Counter)

    @contextmanager
    def place(self, key: str) -> Iterator[bool]:
        """Yields True with a place, which is given back at the end of the block; False if none is free."""
        held, left = self._held[key], self.most - self._held.total()
        if held >= max(2, self.most_each // 16):
            left -= self.kept
        if left <= 0 or held >= self.most_each:
            yield False
            return
        self._held[key] += 1
        try:
            yield True
        finally:
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]

    @property
    def taken(self) -> int:
        return self._held.total()
