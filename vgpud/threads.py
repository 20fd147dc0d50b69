"""Threads for calls that a tenant or a remote service can delay. The end of vgpud does not wait for them."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class DaemonThreads(Executor):
    """An executor that starts a thread for each job. (A ThreadPoolExecutor waits for a hanging thread when
    vgpud stops.)
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, work: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> Future[T]:
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()

        def run() -> None:
            try:
                answer.set_result(work(*args, **named))
            except Exception as error:  # the caller that waits for the answer logs the error
                answer.set_exception(error)

        threading.Thread(target=run, name=self._name, daemon=True).start()
        return answer
