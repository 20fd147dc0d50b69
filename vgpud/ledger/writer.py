"""The thread that writes the ledger."""

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from vgpud.ledger.batch import Committer, Durability, Job, Operation
from vgpud.model.errors import ErrorCode, VgpuError

_BATCH = 256
# Old events are deleted once per this number of revisions, so that the cost is spread over many commits.
_PRUNE_EVERY = 500


class Writer:
    """Runs operations from one event loop in a thread. While one batch is synced, further operations collect
    in the next batch.
    """

    def __init__(self, committer: Committer, loop: asyncio.AbstractEventLoop) -> None:
        self._committer = committer
        self._loop = loop
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closed = False
        # The thread is a daemon thread, so that a process which ends without close() does not wait for it.
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation, durability: Durability) -> "asyncio.Future[Any]":
        """Submits an operation, from the event loop's thread. The operation is executed even if the future is
        cancelled.
        """
        future = self._loop.create_future()
        if self._closed:
            future.set_exception(
                VgpuError(ErrorCode.STOPPING, "the ledger is closed", "wait until vgpud is up again")
            )
        else:
            self._jobs.put(Job(operation, durability, future))
        return future

    async def close(self) -> None:
        """Writes all submitted operations, then closes the connection."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        unpruned = _PRUNE_EVERY
        last = self._committer.tables.revision
        while batch := self._gather():
            try:
                self._committer.run(batch)
            except Exception as error:
                # an unexpected error does not end the thread: the next batch may succeed
                self._committer.fail(batch, error)
            self._hand_over(batch)
            unpruned += self._committer.tables.revision - last
            last = self._committer.tables.revision
            if unpruned >= _PRUNE_EVERY:
                with suppress(sqlite3.Error):
                    self._committer.prune()
                unpruned = 0
        self._committer.close()

    def _gather(self) -> list[Job]:
        """Waits for a job. Returns it with those that wait behind it, up to _BATCH; empty after close()."""
        job = self._jobs.get()
        batch: list[Job] = []
        while job is not None:
            batch.append(job)
            if len(batch) == _BATCH:
                return batch
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return batch
        if batch:
            self._jobs.put(None)  # wakes the next call of this method, which then returns an empty batch
        return batch

    def _hand_over(self, batch: Sequence[Job]) -> None:
        try:
            self._loop.call_soon_threadsafe(_deliver, batch)
        except RuntimeError:
            return  # the event loop is closed, so no caller waits for a result


def _deliver(batch: Sequence[Job]) -> None:
    for job in batch:
        job.deliver()
