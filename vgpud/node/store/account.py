"""Writes one log line for each decision on a request, and counts decisions and repeated requests."""

import time
from collections import Counter

import structlog

from vgpud.model.errors import VgpuError
from vgpud.model.journal import Message
from vgpud.model.log_event import LogEvent
from vgpud.model.tally import Tally
from vgpud.model.tenancy import Allocation, Request, State
from vgpud.model.view import ReloadReport

log = structlog.get_logger("vgpud.decision")


class Account:
    def __init__(self) -> None:
        self.tally = Tally(reload_unix_seconds=time.time())
        # Number of repeats by (uid, request id), for requests in progress or allocated.
        self._repeats: Counter[tuple[int, str]] = Counter()

    def repeated(self, request: Request) -> None:
        self._repeats[request.owner.uid, request.id] += 1

    def forget_repeats(self, request: Request) -> None:
        """Forgets the number of repeats of a request that was refused or failed."""
        self._repeats.pop((request.owner.uid, request.id), None)

    def allocated(self, allocation: Allocation) -> None:
        seconds = max(0.0, (time.time_ns() - allocation.created_unix_ns) / 1e9)
        self.tally.made[allocation.slices[0].mode.value] += 1
        self.tally.took(seconds)
        log.info(
            LogEvent.ALLOCATED,
            message_id=Message.ALLOCATED,
            uid=allocation.request.owner.uid,
            **asked(allocation.request),
            **held(allocation),
            seconds=round(seconds, 4),
        )

    def refused(self, request: Request, refusal: VgpuError) -> None:
        self.tally.refused[refusal.code.name] += 1
        log.info(
            LogEvent.REFUSED,
            message_id=Message.REFUSED,
            uid=request.owner.uid,
            **asked(request),
            reason=refusal.code.name,
            error=refusal.code.number,
            why=refusal.sentence,
        )

    def released(self, allocation: Allocation) -> None:
        """Logs a release, with the number of repeats of its request while the allocation was held."""
        repeats = self._repeats.pop((allocation.request.owner.uid, allocation.request.id), 0)
        self.tally.released += 1
        held_seconds = max(0.0, (time.time_ns() - allocation.created_unix_ns) / 1e9)
        log.info(
            LogEvent.RELEASED,
            message_id=Message.RELEASED,
            **held(allocation),
            uid=allocation.request.owner.uid,
            held_seconds=round(held_seconds, 1),
            **({"repeats": repeats} if repeats else {}),
        )

    def resized(self, allocation: Allocation, sentence: str) -> None:
        self.tally.resized += 1
        log.info(
            LogEvent.RESIZED,
            message_id=Message.RESIZED,
            **held(allocation),
            uid=allocation.request.owner.uid,
            why=sentence,
        )

    def failed(self, allocation: Allocation, sentence: str) -> None:
        self.tally.failed += 1
        log.warning(
            LogEvent.ALLOCATION_FAILED,
            message_id=Message.ALLOCATION_FAILED,
            **held(allocation),
            uid=allocation.request.owner.uid,
            why=sentence,
        )

    def reloaded(self, report: ReloadReport) -> None:
        self.tally.reload_succeeded = True
        self.tally.reload_unix_seconds = time.time()
        log.info(
            LogEvent.POLICY_RELOADED,
            message_id=Message.POLICY_RELOADED,
            digest=report.digest,
            changed=report.changed,
            done=report.done,
            waiting=report.waiting,
        )

    def reload_failed(self, failure: VgpuError) -> None:
        self.tally.reload_succeeded = False
        log.error(
            LogEvent.POLICY_REJECTED,
            message_id=Message.POLICY_REJECTED,
            why=str(failure),
            details=failure.details,
        )


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
