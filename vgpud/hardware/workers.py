"""Worker threads for NVML calls, so that a hanging driver does not hang the daemon.

A C call cannot be interrupted, so each job runs in a worker thread while the caller waits. If a call in the
job passes its deadline, the caller gets an error, the worker is abandoned, and the next job gets another
worker. An abandoned worker whose call returns later ends before its next NVML call. Idle workers end when
their Workers object is garbage-collected, so a thread must not refer to that object.
"""

import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from vgpud.model.errors import ErrorCode, VgpuError

T = TypeVar("T")

MAX_STUCK = 16  # maximum of abandoned threads in calls that hang; at this number further calls are refused
MAX_IDLE = 4
_current = threading.local()


class Abandoned(BaseException):
    """Raised inside an abandoned worker, so that the rest of the job does not run."""


class _Job:
    __slots__ = ("done", "error", "result", "work")

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work
        self.done = threading.Event()
        self.result: object = None
        self.error: BaseException | None = None


class _Worker:
    def __init__(self, came_back: Callable[["_Worker"], None]) -> None:
        self.call_name = ""
        self.call_began = 0.0
        self.abandoned = False
        self._came_back = came_back
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        threading.Thread(target=self._loop, name="nvml-worker", daemon=True).start()

    def submit(self, job: _Job) -> None:
        self.call_name, self.call_began = "", time.monotonic()
        self._jobs.put(job)

    def stop(self) -> None:
        self._jobs.put(None)

    def abandon(self, job: _Job) -> bool:
        """Marks the worker as abandoned. Returns False if the job has finished in the meantime."""
        with self._lock:
            self.abandoned = not job.done.is_set()
            return self.abandoned

    def _loop(self) -> None:
        _current.worker = self
        while (job := self._jobs.get()) is not None:
            try:
                job.result = job.work()
            except BaseException as error:
                # the caller, which waits in `Workers.run`, raises the error
                job.error = error
            with self._lock:
                if not self.abandoned:
                    job.done.set()
            # the reference to a finished job is dropped, or its objects would stay in memory until the next
            # job
            del job
            if self.abandoned:
                self._came_back(self)
                return


def beat(call_name: str) -> None:
    """Records that an NVML call begins in this worker thread; does nothing in other threads."""
    worker: _Worker | None = getattr(_current, "worker", None)
    if worker is None:
        return
    if worker.abandoned:
        raise Abandoned
    worker.call_name, worker.call_began = call_name, time.monotonic()


class Workers:
    """Runs jobs with a deadline for each NVML call in them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._stuck = stuck = dict[_Worker, str]()
        weakref.finalize(self, _stop, self._idle)

        def came_back(worker: _Worker) -> None:
            with lock:
                stuck.pop(worker, None)

        self._came_back = came_back

    def run(self, subject: str, deadline_seconds: float, work: Callable[[], T]) -> T:
        """Runs `work` in a worker and returns or raises its result. `subject` is the device or object that
        the work is about.

        Raises VgpuError(NVML_TIMEOUT) if one call takes longer than `deadline_seconds`. The error is raised
        at once while an earlier call about the same subject hangs, or while MAX_STUCK calls hang.
        """
        worker = self._take(subject)
        job = _Job(work)
        worker.submit(job)
        while not job.done.wait(max(0.0, worker.call_began + deadline_seconds - time.monotonic())):
            late = time.monotonic() - worker.call_began >= deadline_seconds
            if late and self._abandon(worker, job, subject):
                raise _timeout(subject, worker, deadline_seconds)
        self._give(worker)
        if job.error is not None:
            raise job.error
        return job.result  # type: ignore[return-value]  # it is what `work` returned

    def _take(self, subject: str) -> _Worker:
        with self._lock:
            for worker, about in self._stuck.items():
                if about == subject:
                    raise _still_waiting(subject, worker)
            if len(self._stuck) >= MAX_STUCK:
                raise VgpuError(
                    ErrorCode.NVML_TIMEOUT,
                    f"{len(self._stuck)} nvml calls hang, so no further calls are tried",
                    "reboot the node; the kernel log has the reason in lines with NVRM or Xid",
                )
            return self._idle.pop() if self._idle else _Worker(self._came_back)

    def _give(self, worker: _Worker) -> None:
        with self._lock:
            if len(self._idle) < MAX_IDLE:
                self._idle.append(worker)
                return
        worker.stop()

    def _abandon(self, worker: _Worker, job: _Job, subject: str) -> bool:
        with self._lock:
            if not worker.abandon(job):
                return False
            self._stuck[worker] = subject
            return True


def _stop(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.stop()


_HINT = "reset the device or reboot the node; the kernel log has the reason in lines with NVRM or Xid"


def _timeout(subject: str, worker: _Worker, deadline_seconds: float) -> VgpuError:
    return VgpuError(
        ErrorCode.NVML_TIMEOUT,
        f"nvml did not answer {worker.call_name or 'a call'} about {subject} within {deadline_seconds:g} s",
        _HINT,
    )


def _still_waiting(subject: str, worker: _Worker) -> VgpuError:
    seconds = time.monotonic() - worker.call_began
    return VgpuError(
        ErrorCode.NVML_TIMEOUT,
        f"nvml has not answered {worker.call_name or 'a call'} about {subject} for {seconds:.0f} s",
        _HINT,
    )
