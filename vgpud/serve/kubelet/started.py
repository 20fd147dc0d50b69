"""Tracks the containers in the kubelet's allocations by their init processes, which the hooks of the CDI
specs report.

The kubelet does not report that a container starts or ends. One allocation serves several containers in turn:
a pod's init container, the containers after it, and each restart of a container.
"""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

from vgpud import proc
from vgpud.model.errors import VgpuError
from vgpud.model.rows import Row, Rows
from vgpud.model.tenancy import Lifetime
from vgpud.node.tenants.lifetimes import Lifetimes

# The folder of a pod's control group, which the kubelet makes before the pod's containers and removes after
# them: "pod" and the pod's uid, also as a slice of systemd (kubernetes/kubernetes,
# pkg/kubelet/cm/pod_container_manager_linux.go).
_POD_GROUP = re.compile(r"(?:.+-)?pod[0-9a-f_-]{8,}(?:\.slice)?")


class Started:
    """The init processes by the allocation's request id. They are kept in the ledger, because containers
    outlive vgpud: a row has the request id, the pid, the start time, the id of the boot and the control
    group.

    `ended` is called when a container has ended. Rows of another boot than `boot_id` are ignored.
    """

    def __init__(self, rows: Rows, boot_id: str, ended: Callable[[], None]) -> None:
        self._rows = rows
        self._boot_id = boot_id
        self._ended = ended
        # the init processes that have not ended; empty if all have
        self._inits: dict[str, frozenset[Lifetime]] = {}
        for request_id, init in self._recorded():
            self._note(request_id, init)
        self._watched: dict[str, tuple[str, Lifetime]] = {}
        self._lifetimes = Lifetimes(self._end)

    def _recorded(self) -> Iterator[tuple[str, Lifetime]]:
        for request_id, pid, ticks, boot, cgroup in self._rows:
            if boot == self._boot_id:
                yield request_id, Lifetime(int(pid), int(ticks), cgroup)

    def watch(self) -> None:
        """Watches the recorded processes after the start of vgpud. Each of them may have ended meanwhile."""
        for request_id, inits in self._inits.items():
            for init in inits:
                self._watch(request_id, init)

    def close(self) -> None:
        self._lifetimes.close()
        self._watched.clear()

    def began(self, request_id: str) -> bool:
        """True if a container of the allocation was created in this boot."""
        return request_id in self._inits

    def lives(self, request_id: str) -> bool:
        """True if an init process of the allocation lives. Its container runs, or is about to start."""
        return bool(self._inits.get(request_id))

    def runs(self, request_id: str) -> bool:
        """True if the program of a container runs. An init that has not called exec does not count: a runtime
        that was killed leaves it waiting for ever.
        """
        return any(proc.ran_exec(init.pid, init.start_ticks) for init in self._inits.get(request_id, ()))

    def pod_is_gone(self, request_id: str) -> bool:
        """True if the kubelet has removed the pod's control group, so that the pod has ended for good. False
        if the control group is unknown.
        """
        pods = [_pod_group(init.cgroup) for name, init in self._recorded() if name == request_id]
        return bool(pods) and not any(pod is None or pod.exists() for pod in pods)

    async def add(self, request_id: str, init: Lifetime) -> None:
        """Records an init process durably, and then deletes the allocation's spent rows (`_is_spent`). Raises
        VgpuError: LEDGER_FULL, LEDGER_READ_ONLY, LEDGER_CORRUPT, LEDGER_FAILED.
        """
        new = (request_id, str(init.pid), str(init.start_ticks), self._boot_id, init.cgroup)
        # The rows are listed before the new row is put, so that two containers that begin together do not
        # delete each other's rows.
        before = [row for row in self._rows if row[0] == request_id and row[:4] != new[:4]]
        await self._rows.put(new)
        self._note(request_id, init)
        self._watch(request_id, init)
        with suppress(VgpuError):  # the next container's start tries again
            for row in before:
                if self._is_spent(row, init):
                    await self._rows.drop(*row[:4])

    def _is_spent(self, row: Row, newer: Lifetime) -> bool:
        """True if the row is of another boot, or its container has ended and its control group is gone or is
        that of `newer`. A group that still stands may have a memory limit, which the release of the
        allocation removes.
        """
        _, pid, ticks, boot, cgroup = row
        if boot != self._boot_id:
            return True
        path = cgroup.partition(" ")[2]
        stands = bool(path) and path != newer.cgroup.partition(" ")[2] and Path(path).exists()
        return not stands and not proc.is_alive(int(pid), int(ticks))

    async def forget(self, request_id: str) -> None:
        """Forgets the init processes of a released allocation. Raises VgpuError as `add` does."""
        for row in self._rows:
            if row[0] == request_id:
                await self._rows.drop(*row[:4])
        self._inits.pop(request_id, None)

    async def keep(self, request_ids: Collection[str]) -> None:
        """Forgets the init processes of all other allocations. Raises VgpuError as `add` does."""
        for request_id in {row[0] for row in self._rows} - set(request_ids):
            await self.forget(request_id)

    def _note(self, request_id: str, init: Lifetime) -> None:
        self._inits[request_id] = self._inits.get(request_id, frozenset()) | {init}

    def _watch(self, request_id: str, init: Lifetime) -> None:
        key = f"{request_id} {init.pid} {init.start_ticks}"
        self._watched[key] = (request_id, init)
        self._lifetimes.watch(key, init)

    def _end(self, key: str) -> None:
        """Handles the end of a container. The row stays until another container of the allocation begins: it
        says that a container has begun, and after a restart the process is found to have ended again.
        """
        request_id, init = self._watched.pop(key, ("", Lifetime()))
        if request_id in self._inits:
            self._inits[request_id] -= {init}
        self._ended()


def _pod_group(cgroup: str) -> Path | None:
    """The folder of the pod's control group above that of a container; None if there is none."""
    path = Path(cgroup.partition(" ")[2])
    return next((above for above in path.parents if _POD_GROUP.fullmatch(above.name)), None)
