"""Names of users for the status page."""

import asyncio

from vgpud.http.names import UserNames

UNKNOWN = 3_999_999


def test_a_user_has_the_name_of_its_account_and_a_stranger_none() -> None:
    async def ask() -> tuple[str, str]:
        names = UserNames()
        first = await names.of([0, UNKNOWN])
        again = await names.of([0])
        assert again is first, "it is not looked up anew"
        return first[0], first[UNKNOWN]

    assert asyncio.run(ask()) == ("root", "")
