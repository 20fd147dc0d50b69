"""A change that the book refuses leaves the book unchanged."""

from dataclasses import replace

import pytest

from tests.node.world import device, request
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import Allocation, Mode, Slice, State
from vgpud.node.store.book import Book


def test_a_suspended_tenant_of_a_whole_card_cannot_return_to_a_card_with_tenants() -> None:
    book = Book()
    here, there = device(0).uuid, device(1).uuid
    both = tuple(Slice(uuid, Mode.EXCLUSIVE, 80 * GIB) for uuid in (there, here))
    away = Allocation("a", request("a"), State.SUSPENDED, both)
    book.add(away)
    book.add(Allocation("b", request("b"), State.ACTIVE, (Slice(here, Mode.PRELOAD, GIB),)))
    with pytest.raises(VgpuError) as refused:
        book.replace(replace(away, state=State.ACTIVE))
    assert refused.value.code is ErrorCode.BUG
    assert book.get("a") is away
    assert book.by_request(request("a")) is away
    assert set(book.use) == {here}
    assert book.use_of(there).count == 0
    assert {one.id for one in book.allocations_on(here)} == {"a", "b"}
