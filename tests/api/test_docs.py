"""docs/api.md has every call and every error."""

from pathlib import Path

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.errors import ErrorCode

MANUAL = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()


def test_every_error_is_in_the_manual() -> None:
    rows = {f"| {c.number} | {c.name} | {c.status} | {c.exit_code.value} |" for c in ErrorCode}
    assert rows - set(MANUAL.splitlines()) == set()


def test_every_call_of_the_api_is_in_the_manual() -> None:
    calls = {f"`{method.name}`" for method in pb.DESCRIPTOR.services_by_name["Vgpud"].methods}
    assert {call for call in calls if call not in MANUAL} == set()
