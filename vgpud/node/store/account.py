"""Counts decisions and repeated requests, and makes the fields of their log lines."""

import time
from collections import Counter

from vgpud.model.errors import VgpuError
from vgpud.model.tally import Tally
from vgpud.model.tenancy import Allocation, Request, State


class Account:
    def __init__(self) -> None:
        self.tally = Tally(reload_unix_seconds=time.time())
        # How often each request was repeated, by (uid, request id); only requests in progress or allocated.
        self._repeats: Counter[tuple[int, str]] = Counter()

    def repeated(self, request: Request) -> None:
        self._repeats[request.owner.uid, request.id] += 1

    def forget_repeats(self, request: Request) -> None:
        """Forgets the number of repeats of a request that was refused, failed or released."""
        self._repeats.pop((request.owner.uid, request.id), None)

    def allocated(self, allocation: Allocation) -> None:
        seconds = max(0.0, (time.time_ns() - allocation.created_unix_ns) / 1e9)
        self.tally.made[allocation.slices[0].mode.value] += 1
        self.tally.took(seconds)

    def refused(self, refusal: VgpuError) -> None:
        self.tally.refused[refusal.code.name] += 1

    def ending(self, allocation: Allocation) -> dict[str, object]:
        """The fields of the log line of a release: what was held, for how long, and the repeats of its
        request.
        """
        held_seconds = max(0.0, (time.time_ns() - allocation.created_unix_ns) / 1e9)
        repeats = self._repeats[allocation.request.owner.uid, allocation.request.id]
        return {
            **held(allocation),
            "held_seconds": round(held_seconds, 1),
            **({"repeats": repeats} if repeats else {}),
        }

    def released(self, allocation: Allocation) -> None:
        self.forget_repeats(allocation.request)
        self.tally.released += 1

    def reloaded(self) -> None:
        self.tally.reload_succeeded = True
        self.tally.reload_unix_seconds = time.time()


def asked(request: Request) -> dict[str, object]:
    wanted = {
        "request": request.id,
        "memory_asked_bytes": request.memory_bytes,
        "share_asked": None if request.share is None else str(request.share),
        "isolation": request.isolation,
        "profile": request.mig_profile or None,
        "count": request.count if request.count > 1 else None,
        "label": request.label or None,
    }
    return {key: value for key, value in wanted.items() if value is not None}


def held(allocation: Allocation) -> dict[str, object]:
    modes = Counter(part.mode.value for part in allocation.slices)
    workload = allocation.request.workload
    names = {"pod": workload.pod_path, "claim": workload.claim_path}
    return {
        "allocation": allocation.id,
        "mode": ",".join(modes),
        "gpu_uuid": ",".join(part.device_uuid for part in allocation.slices),
        "memory_bytes": sum(part.memory_bytes for part in allocation.slices),
        **{key: name for key, name in names.items() if name},
        **({"starts": "suspended"} if allocation.state is State.SUSPENDED else {}),
    }
