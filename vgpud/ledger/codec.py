"""Encodes allocations and requests as columns of a table, from the types of the model.

An intent writes the request and the reasons of its placement, once. A commit writes only the outcome (state,
slices, edits and so on), which is a third of the text.
"""

import gc
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

from vgpud.ledger.shapes import Mismatch, Record, Shape, array_of, shape_of
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Allocation, Cause, Edits, Reason, Request, Slice, State, SuspendedProcess

_REQUEST = cast(Record, shape_of(Request))
_REASONS = array_of(shape_of(Reason))
_SLICES = array_of(shape_of(Slice))
_EDITS = shape_of(Edits)
_SUSPENDED = array_of(shape_of(SuspendedProcess))
# The check for circular references is off, because encoded values are trees.
_dump = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_dump_sorted = json.JSONEncoder(separators=(",", ":"), check_circular=False, sort_keys=True).encode
_parse = json.JSONDecoder().decode


class Outcome(NamedTuple):
    """The columns that a commit writes."""

    state: str
    slices: str  # slices as JSON
    edits: str  # edits as JSON
    failure: str
    suspended: str  # suspended processes as JSON
    cause: str
    paused: int


class AllocationRow(NamedTuple):
    """A row of the table of allocations, in the order of its columns."""

    id: str
    request_id: str
    request_digest: str
    owner_uid: int
    owner_gid: int
    created_unix_ns: int
    request: str  # request as JSON
    reasons: str  # reasons as JSON
    state: str
    revision: int
    slices: str  # slices as JSON
    edits: str  # edits as JSON
    failure: str
    suspended: str  # suspended processes as JSON
    cause: str
    paused: int


def encode_allocation(allocation: Allocation) -> AllocationRow:
    """Encodes an allocation as a row. Raises VgpuError(BUG) if a value does not have the type that the model
    declares.
    """
    request = _encode(_REQUEST, allocation.request)
    return AllocationRow(
        id=allocation.id,
        request_id=allocation.request.id,
        request_digest=_digest(request),
        owner_uid=allocation.request.owner.uid,
        owner_gid=allocation.request.owner.gid,
        created_unix_ns=allocation.created_unix_ns,
        request=_dump(request),
        reasons=_dump(_encode(_REASONS, allocation.reasons)),
        revision=allocation.revision,
        **encode_outcome(allocation)._asdict(),
    )


def encode_outcome(allocation: Allocation) -> Outcome:
    """Encodes the columns that a commit writes. Raises VgpuError(BUG) if a value does not have the type that
    the model declares.
    """
    return Outcome(
        allocation.state.value,
        _dump(_encode(_SLICES, allocation.slices)),
        _dump(_encode(_EDITS, allocation.edits)),
        allocation.failure,
        _dump(_encode(_SUSPENDED, allocation.suspended)),
        allocation.cause.value,
        int(allocation.paused),
    )


def decode_allocation(row: AllocationRow) -> Allocation:
    """Decodes an allocation from its row. Raises VgpuError(LEDGER_CORRUPT) with the row and the mistake."""
    try:
        return _decode(row)
    except (Mismatch, VgpuError, ValueError, RecursionError) as error:
        raise VgpuError(
            ErrorCode.LEDGER_CORRUPT,
            f"allocation {row.id!r} in the ledger cannot be read: {error}",
            "restore the state directory from a backup, or move the ledger away to start with an empty one",
        ) from None


def _decode(row: AllocationRow) -> Allocation:
    # All JSON columns are parsed by one call, because a call costs more than the parsing.
    texts = _parse(f"[{row.request},{row.reasons},{row.slices},{row.edits},{row.suspended}]")
    if len(texts) != 5:
        raise Mismatch("its JSON is not what vgpud writes")
    request = cast(Request, _REQUEST.decode(texts[0]))
    if (request.id, request.owner.uid, request.owner.gid) != (row.request_id, row.owner_uid, row.owner_gid):
        raise Mismatch("its request belongs to another row")
    return Allocation(
        id=row.id,
        request=request,
        state=State(row.state),
        slices=_SLICES.decode(texts[2]),
        reasons=_REASONS.decode(texts[1]),
        edits=_EDITS.decode(texts[3]),
        created_unix_ns=row.created_unix_ns,
        revision=row.revision,
        failure=row.failure,
        suspended=_SUSPENDED.decode(texts[4]),
        cause=Cause(row.cause),
        paused=row.paused == 1,
    )


def _digest(request: dict[str, Any]) -> str:
    """SHA-256, in hexadecimal, of the request without its lifetime and its workload's names. So a retry from
    another process has the same digest.
    """
    asked = {name: value for name, value in request.items() if name not in ("lifetime", "workload")}
    return hashlib.sha256(_dump_sorted(asked).encode("ascii")).hexdigest()


def _encode(shape: Shape, value: object) -> Any:  # noqa: ANN401
    try:
        return shape.encode(value)
    except Mismatch as error:
        raise VgpuError(
            ErrorCode.BUG,
            f"the ledger was given a wrong value: {error}",
            "report this with the journal of vgpud",
        ) from None


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the garbage collector while the ledger is read. Reading produces no garbage, and the collector
    would scan all read objects repeatedly.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
