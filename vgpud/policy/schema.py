"""The JSON schema of the policy, for editors and checkers.

Run as `python -m vgpud.policy.schema > configs/vgpud.schema.json` after a change of the model.
What spans rules (a rule hidden by an earlier one, memory_min above memory_max) no schema can say:
`vgpuctl policy check` does.
"""

import json
import sys
from typing import Any

from vgpud.policy.model import Policy


def schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12, of a main file; a drop-in may leave `version` out."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_plain(Policy.model_json_schema()),
        "title": "vgpud policy",
        "required": ["version"],
    }


def render() -> str:
    """The file as it is shipped."""
    return json.dumps(schema(), indent=2) + "\n"


def _plain(node: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null, an optional key is left out: "or null" and pydantic's titles are only noise."""
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
