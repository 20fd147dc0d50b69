"""Mutates inputs of a corpus for fuzz targets in Python. Targets in C use native/driver.c."""

import random
from collections.abc import Sequence

ODD = (
    b"\0",
    b"\xff",
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b":",
    b",",
    b"\n",
    b"-1",
)


def mutated(pool: Sequence[bytes], dice: random.Random) -> bytes:
    """An input of the pool with up to eight changes: flipped bits, random bytes, special words, pieces cut or
    inserted.
    """
    data = bytearray(dice.choice(pool))
    for _ in range(dice.randint(1, 8)):
        at = dice.randint(0, len(data))
        match dice.randrange(5):
            case 0 if at < len(data):
                data[at] ^= 1 << dice.randrange(8)
            case 1:
                data[at:at] = dice.randbytes(dice.randint(1, 4))
            case 2:
                del data[at : at + dice.randint(1, 16)]
            case 3:
                data[at:at] = dice.choice(ODD)
            case _:
                other = dice.choice(pool)
                start = dice.randint(0, len(other))
                data[at:at] = other[start : start + dice.randint(0, 64)]
    return bytes(data[:65536])
