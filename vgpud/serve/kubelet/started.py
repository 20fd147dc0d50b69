"""Tracks the containers in the kubelet's allocations by their init processes, which the hooks of the CDI
specs report.

The kubelet does not report that a container starts or ends. One allocation serves several containers in turn:
a pod's init container, the containers after it, and each restart of a container.
"""

from collections.abc import Callable

from vgpud.model.rows import Rows
from vgpud.model.tenancy import Lifetime
from vgpud.node.tenants.lifetimes import Lifetimes

_Init = tuple[int, int]  # an init process: pid and start time (proc(5), field 22)


class Started:
    """The init processes by the allocation's request id. They are kept in the ledger, because containers
    outlive vgpud: a row has the request id, the pid, the start time and the id of the boot.

    `ended` is called when a container has ended. Rows of another boot than `boot_id` are ignored.
    """

    def __init__(self, rows: Rows, boot_id: str, ended: Callable[[], None]) -> None:
        self._rows = rows
        self._boot_id = boot_id
        self._ended = ended
        self._inits: dict[str, frozenset[_Init]] = {}
        for request_id, pid, ticks, boot in rows:
            if boot == boot_id:
                self._note(request_id, (int(pid), int(ticks)))
        self._watched: dict[str, tuple[str, _Init]] = {}
        self._lifetimes = Lifetimes(self._end)

    def watch(self) -> None:
        """Watches the recorded processes after the start of vgpud. Each of them may have ended meanwhile."""
        for request_id, inits in self._inits.items():
            for init in inits:
                self._watch(request_id, init)

    def close(self) -> None:
        self._lifetimes.close()
        self._watched.clear()

    def began(self, request_id: str) -> bool:
        """True if a container of the allocation has started in this boot."""
        return request_id in self._inits

    def runs(self, request_id: str) -> bool:
        return bool(self._inits.get(request_id))

    async def add(self, request_id: str, init: Lifetime) -> None:
        """Records an init process durably. Raises VgpuError(LEDGER_FULL), LEDGER_READ_ONLY, LEDGER_CORRUPT or
        LEDGER_FAILED.
        """
        await self._rows.put((request_id, str(init.pid), str(init.start_ticks), self._boot_id))
        one = (init.pid, init.start_ticks)
        self._note(request_id, one)
        self._watch(request_id, one)

    async def forget(self, request_id: str) -> None:
        """Forgets the init processes of a released allocation. Raises VgpuError as `add` does."""
        for row in self._rows:
            if row[0] == request_id:
                await self._rows.drop(*row)
        self._inits.pop(request_id, None)

    def _note(self, request_id: str, init: _Init) -> None:
        self._inits[request_id] = self._inits.get(request_id, frozenset()) | {init}

    def _watch(self, request_id: str, init: _Init) -> None:
        key = f"{request_id} {init[0]} {init[1]}"
        self._watched[key] = (request_id, init)
        self._lifetimes.watch(key, Lifetime(*init))

    def _end(self, key: str) -> None:
        """Handles the end of a container. The row stays, because after a restart the process is
        found to have ended again.
        """
        request_id, init = self._watched.pop(key, ("", (0, 0)))
        if request_id in self._inits:
            self._inits[request_id] -= {init}
        self._ended()
