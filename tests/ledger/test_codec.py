"""The JSON of the model in ledger rows: written values are read back unchanged, and nothing else is
accepted.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
from hypothesis import given

from tests.ledger.samples import active, allocation, allocations
from vgpud.ledger.codec import AllocationRow, decode_allocation, encode_allocation
from vgpud.ledger.shapes import shape_of
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import (
    Allocation,
    Isolation,
    Lifetime,
    Mount,
    Owner,
    Request,
    Slice,
    State,
    SuspendedProcess,
    Way,
)


@given(allocations)
def test_an_allocation_written_to_a_ledger_row_is_read_back(sample: Allocation) -> None:
    again = decode_allocation(encode_allocation(sample))
    assert again == sample
    assert type(again.request.isolation) is type(sample.request.isolation)
    assert all(type(r.taken) is bool for r in again.reasons)


def test_a_row_holds_every_field_of_an_allocation() -> None:
    """A field without a place in the row would be lost at a restart."""
    # these columns repeat fields, for SQL queries
    columns = {"request_id", "request_digest", "owner_uid", "owner_gid"}
    assert {f.name for f in fields(Allocation)} == set(AllocationRow._fields) - columns


def test_a_row_of_version_1_is_read() -> None:
    """A row as version 1 wrote it. Users have ledgers in this form, so it must not change without a
    migration.
    """
    row = encode_allocation(replace(active(allocation(3)), reasons=allocation(3).reasons[3:5]))
    uuid = "GPU-00000003-1111-2222-3333-444444444444"
    assert row.request == (
        '{"id":"r3","owner":[1000,1000],"memory_bytes":4294967296,"share":[2550],"isolation":"quota",'
        '"label":"job 3","lifetime":[103,7,""]}'
    )
    assert row.slices == (
        f'[{{"device_uuid":"{uuid}","mode":"preload","memory_bytes":4294967296,"share":[2550]}}]'
    )
    assert row.reasons == (
        f'[["{uuid}",true,"preload","3GiB free of 80GiB"],'
        '["GPU-00000004-1111-2222-3333-444444444444",false,"preload","4GiB free of 80GiB"]]'
    )
    assert row.edits == (
        '{"env":[["LD_PRELOAD","/usr/lib/vgpud/libvgpu.so"],["VGPU_LEASE","/run/vgpu"]],'
        '"host_env":[["VGPU_LEASE","/run/vgpud/leases/a3"]],'
        '"mounts":[["/usr/lib/vgpud","/usr/lib/vgpud",true],["/run/vgpud/leases/a3","/run/vgpu",false]],'
        '"device_nodes":[["/dev/nvidia0",195,0,"rw"],["/dev/nvidiactl",null,null,"rw"]]}'
    )


def test_a_row_without_trailing_fields_takes_their_defaults() -> None:
    """A new field at the end of a dataclass needs no migration, because older rows take its default."""
    assert shape_of(Mount).decode(["/a", "/b"]) == Mount("/a", "/b", read_only=True)


def test_suspended_processes_recorded_by_earlier_versions_are_read() -> None:
    """Earlier versions recorded neither how a process was suspended nor on which device it was saved."""
    row = encode_allocation(allocation(1, State.SUSPENDED, suspended=(SuspendedProcess(7, 11, 13),)))
    assert row.suspended == '[[7,11,13,"checkpoint",0,""]]'
    for old, way, stays in (("[[7,11,13]]", Way.CHECKPOINT, 0), ('[[7,11,13,"swap",5]]', Way.SWAP, 5)):
        (read,) = decode_allocation(row._replace(suspended=old)).suspended
        assert read == SuspendedProcess(7, 11, 13, way, stays, saved_on="")
    moved = replace(read, saved_on="GPU-1,GPU-2")
    kept = encode_allocation(allocation(1, State.SUSPENDED, suspended=(moved,)))
    assert decode_allocation(kept).suspended == (moved,)


BAD: dict[str, Callable[[AllocationRow], AllocationRow]] = {
    "unknown field": lambda r: r._replace(request=r.request.replace('"label"', '"lable"')),
    "missing field": lambda r: r._replace(slices=r.slices.replace('"mode":"preload",', "")),
    "wrong type": lambda r: r._replace(slices=r.slices.replace("4294967296", '"4GiB"')),
    "number for a truth value": lambda r: r._replace(reasons=r.reasons.replace("true", "1")),
    "truth value for a number": lambda r: r._replace(request=r.request.replace('[103,7,""]', "[true,7]")),
    "fraction": lambda r: r._replace(slices=r.slices.replace("4294967296", "4294967296.0")),
    "unknown mode": lambda r: r._replace(slices=r.slices.replace("preload", "postload")),
    "share out of range": lambda r: r._replace(request=r.request.replace("[2550]", "[25500]")),
    "row too long": lambda r: r._replace(request=r.request.replace('[103,7,""]', '[103,7,"",1]')),
    "row too short": lambda r: r._replace(reasons='[["GPU-0"]]'),
    "list in a row": lambda r: r._replace(reasons='[[["GPU-0"],true,null,""]]'),
    "object for an array": lambda r: r._replace(reasons="{}"),
    "array for an object": lambda r: r._replace(edits="[]"),
    "triple for a pair": lambda r: r._replace(edits='{"env":[["a","b","c"]]}'),
    "null": lambda r: r._replace(slices="null"),
    "not JSON": lambda r: r._replace(edits="{"),
    "empty": lambda r: r._replace(slices=""),
    "two values": lambda r: r._replace(slices="[],[]"),
    "another row's request": lambda r: r._replace(request_id="r4"),
    "another owner": lambda r: r._replace(owner_uid=0),
}


@pytest.mark.parametrize("damage", BAD.values(), ids=BAD.keys())
def test_a_row_in_another_form_is_reported_as_corrupt(
    damage: Callable[[AllocationRow], AllocationRow],
) -> None:
    row = encode_allocation(active(allocation(3)))
    # this call also puts the row into the decoder's cache, which must not accept a damaged row
    decode_allocation(row)
    damaged = damage(row)
    assert damaged != row
    with pytest.raises(VgpuError, match="allocation 'a3' in the ledger cannot be read") as caught:
        decode_allocation(damaged)
    assert caught.value.code is ErrorCode.LEDGER_CORRUPT


def wrong(model: Any, **values: Any) -> Any:
    """Returns a copy of the model with values that type-checked code could not produce."""
    return replace(model, **values)


@pytest.mark.parametrize(
    "changes",
    [
        {"slices": [1]},
        {"slices": ("GPU-0",)},
        {"edits": None},
        {"request": wrong(allocation(1).request, memory_bytes=1.5)},
        {"request": wrong(allocation(1).request, memory_bytes=True)},
        {"request": wrong(allocation(1).request, owner=wrong(Owner(0, 0), uid="root"))},
        {"request": wrong(allocation(1).request, isolation="quota")},
        {"edits": wrong(active(allocation(1)).edits, env=(("A", 1),))},
    ],
)
def test_a_value_of_a_wrong_type_is_not_written_to_the_ledger(changes: dict[str, Any]) -> None:
    with pytest.raises(VgpuError) as caught:
        encode_allocation(allocation(1, **changes))
    assert caught.value.code is ErrorCode.BUG


def test_a_dataclass_with_a_field_type_that_cannot_be_written_is_refused_at_once() -> None:
    @dataclass
    class Odd:
        value: float

    with pytest.raises(TypeError):
        shape_of(Odd)


def test_the_digest_covers_the_request_and_its_owner_but_not_its_lifetime() -> None:
    def digest(asked: Request) -> str:
        return encode_allocation(replace(allocation(1), request=asked)).request_digest

    request = allocation(1).request
    assert digest(request) == digest(replace(request, lifetime=Lifetime(999, 999)))
    others: list[Request] = [
        replace(request, owner=Owner(1, 1000)),
        replace(request, memory_bytes=None),
        replace(request, isolation=Isolation.COMPUTE),
        replace(request, count=2),
    ]
    assert len({digest(request), *map(digest, others)}) == 5


def test_every_state_of_an_allocation_is_written_and_read_back() -> None:
    for state in State:
        assert decode_allocation(encode_allocation(allocation(1, state))).state is state
    bare = allocation(1, slices=(Slice("GPU-1", allocation(1).slices[0].mode, 1),), reasons=())
    assert decode_allocation(encode_allocation(bare)) == bare
