"""The shipped JSON schema equals the model's, accepts every example and refuses what the loader refuses."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpud.model.errors import VgpuError
from vgpud.policy.load import check
from vgpud.policy.model import TABLES
from vgpud.policy.schema import render, schema

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).parent / "data"
EXAMPLES = [ROOT / "configs/vgpud.toml", *sorted((ROOT / "configs/examples").glob("*.toml"))]
VALIDATOR = jsonschema.Draft202012Validator(schema())


def plain(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


def test_the_shipped_schema_of_the_policy_is_current() -> None:
    shipped = (ROOT / "configs/vgpud.schema.json").read_text()
    assert shipped == render(), "run: python -m vgpud.policy.schema > configs/vgpud.schema.json"


def test_the_schema_of_the_policy_is_valid_json_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_policies_pass_schema_and_loader(path: Path) -> None:
    check(path)
    VALIDATOR.validate(plain(path))


@pytest.mark.parametrize("path", sorted((DATA / "bad").glob("*.toml")), ids=lambda path: path.stem)
def test_bad_policy_files_fail_schema_and_loader(path: Path) -> None:
    with pytest.raises(VgpuError):
        check(path)
    assert not VALIDATOR.is_valid(plain(path))


@pytest.mark.parametrize("path", sorted((DATA / "conflict").glob("*.toml")), ids=lambda path: path.stem)
def test_conditions_across_rules_are_checked_by_the_loader_and_not_by_the_schema(path: Path) -> None:
    """The loader finds these mistakes, and the schema cannot express them. If the schema ever finds one, move
    the file to bad/.
    """
    with pytest.raises(VgpuError):
        check(path)
    VALIDATOR.validate(plain(path))


def properties(node: dict[str, Any], definitions: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, value in node.get("properties", {}).items():
        target = value.get("items", value).get("$ref")
        yield name, value
        if target:
            inner = definitions[target.rpartition("/")[2]]
            yield from ((f"{name}.{key}", child) for key, child in properties(inner, definitions))


def test_the_schema_describes_every_policy_key_and_allows_no_others() -> None:
    whole = schema()
    found = dict(properties(whole, whole["$defs"]))
    described = {name for name, value in found.items() if value.get("description")}
    in_model = {
        f"{table}.{key}".removeprefix(".") for table, model in TABLES.items() for key in model.model_fields
    }
    assert described == in_model
    assert all(table["additionalProperties"] is False for table in [whole, *whole["$defs"].values()])
    assert "null" not in json.dumps(whole)


QUANTITY = st.from_regex(r"[ ]?[0-9]{1,4}(\.[0-9]{1,3})?[ ]?[KMGTkm]?i?[B]?", fullmatch=True)


@given(QUANTITY | st.integers() | st.booleans() | st.floats(allow_nan=False))
def test_the_schema_accepts_every_quantity_that_the_loader_accepts(value: Any) -> None:
    text = f'version = 1\ndevice = [{{ match.memory_min = "{value}" }}]'
    if not isinstance(value, str):
        text = text.replace('"', "").replace("False", "false").replace("True", "true")
    data = tomllib.loads(text)
    try:
        TABLES[""].model_validate(data)
    except ValueError:
        return
    VALIDATOR.validate(data)
