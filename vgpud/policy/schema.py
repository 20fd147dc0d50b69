"""Generates the JSON schema of the policy, for editors and checkers.

After a change of the model run `python -m vgpud.policy.schema > configs/vgpud.schema.json`. A schema cannot
express conditions across keys and rules (a rule hidden by an earlier one, memory_min above memory_max);
`vgpuctl policy check` checks these.
"""

import json
import sys
from typing import Any

from vgpud.policy.model import Policy


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a main file. A drop-in may leave `version` out."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_plain(Policy.model_json_schema()),
        "title": "vgpud policy",
        "required": ["version"],
    }


def render() -> str:
    """The content of the schema file in configs/."""
    return json.dumps(schema(), indent=2) + "\n"


def _plain(node: dict[str, Any]) -> dict[str, Any]:
    """Removes pydantic's titles and "or null" from the schema: TOML has no null, and an optional key is left
    out.
    """
    kept: dict[str, Any] = {
        key: _plain_value(value)
        for key, value in node.items()
        if not (key == "title" and isinstance(value, str)) and not (key == "default" and value is None)
    }
    options = [option for option in kept.get("anyOf", []) if option != {"type": "null"}]
    if len(options) == 1:
        del kept["anyOf"]
        return {**options[0], **kept}
    return {**kept, "anyOf": options} if options else kept


def _plain_value(value: object) -> object:
    if isinstance(value, list):
        return [_plain_value(element) for element in value]
    return _plain(value) if isinstance(value, dict) else value


if __name__ == "__main__":
    sys.stdout.write(render())
