"""Finds an allocation by the operator's name for it: its id, or a unique prefix of the id."""

import string
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vgpud.model.errors import ErrorCode, VgpuError

if TYPE_CHECKING:
    from vgpud.api.client import Client

ID_CHARACTERS = 12  # an allocation id is six random bytes in hexadecimal
FEWEST_CHARACTERS = 4  # minimum length of a prefix of an id: a shorter one is too easily a typing error
GIVE_MORE = f"give at least {FEWEST_CHARACTERS} characters of the id"
_SHOWN = 4


def allocation_id(client: "Client", named: str) -> str:
    """Returns the whole allocation id for `named`. If no id begins with `named`, it is returned
    unchanged, and vgpud refuses it.

    Raises VgpuError: NO_SUCH_ALLOCATION if the prefix is too short, BAD_REQUEST if it fits several
    allocations, and the errors of ListAllocations.
    """
    if is_short(named):
        raise VgpuError(ErrorCode.NO_SUCH_ALLOCATION, f"there is no allocation {named!r}", GIVE_MORE)
    if len(named) >= ID_CHARACTERS or not may_begin_id(named):
        return named
    return whole_id(named, (one.id for one in client.list_allocations().allocations), "allocations")


def is_short(named: str) -> bool:
    """Is `named` hexadecimal, but shorter than the prefix of an id may be?"""
    return 0 < len(named) < FEWEST_CHARACTERS and set(named) <= set(string.hexdigits)


def may_begin_id(named: str) -> bool:
    return len(named) >= FEWEST_CHARACTERS and set(named) <= set(string.hexdigits)


def whole_id(named: str, known: Iterable[str], what: str) -> str:
    """The only id that begins with `named`; `named` itself if there is none. Raises VgpuError(BAD_REQUEST) if
    there are several.
    """
    found = sorted(one for one in known if one.startswith(named.lower()))
    if len(found) > 1:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            f"{len(found)} {what} begin with {named!r}: {', '.join(found[:_SHOWN])}{more}",
            "give more characters of the id",
        )
    return found[0] if found else named
