"""Writes to a ledger until it is killed, and prints each acknowledged write.

`python -m tests.ledger.churn PATH FIRST WRITERS`: a line has a verb and an allocation's number.
"""

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

from tests.ledger.samples import active, allocation, event
from vgpud.ledger import Ledger, RowTable
from vgpud.model.tenancy import State


def say(verb: str, number: int) -> None:
    os.write(1, f"{verb} {number}\n".encode())  # unbuffered, so a kill loses no line


async def life(ledger: Ledger, number: int) -> None:
    """Makes the writes of one allocation. Every third allocation stays active, and every third stays in
    release.
    """
    await ledger.intent(allocation(number))
    say("intent", number)
    await ledger.rows[RowTable.ORIGINALS].put((f"GPU-{number}", "mode", "default"))
    say("original", number)
    done = await ledger.commit(active(allocation(number)), event(f"a{number}"))
    say("commit", number)
    if number % 3 == 0:
        return
    await ledger.intent(replace(done, state=State.RELEASING))
    say("release", number)
    if number % 3 == 1:
        await ledger.forget(done.id, event(done.id))
        say("forget", number)


async def writer(ledger: Ledger, first: int, step: int) -> None:
    number = first
    while True:
        await life(ledger, number)
        number += step


async def main(path: Path, first: int, writers: int) -> None:
    async with await Ledger.open(path) as ledger:
        await asyncio.gather(*[writer(ledger, first + n, writers) for n in range(writers)])


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
