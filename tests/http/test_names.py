"""User names on the status page."""

import asyncio
import pwd

import pytest

from vgpud.serve.http.doors import UserNames

UNKNOWN = 3_999_999


def test_a_uid_without_an_account_has_no_name() -> None:
    async def ask() -> tuple[str, str]:
        names = UserNames()
        first = await names.of([0, UNKNOWN])
        again = await names.of([0])
        assert again is first, "it is not looked up anew"
        return first[0], first[UNKNOWN]

    assert asyncio.run(ask()) == ("root", "")


def test_a_user_name_that_is_not_utf_8_is_shown_with_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's pwd module gives a surrogate for a byte that is not UTF-8, and a page cannot encode it."""
    account = pwd.struct_passwd(("andr\udce9", "x", 7, 7, "", "/", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: account)
    assert asyncio.run(UserNames().of([7]))[7].encode() == b"andr?"
