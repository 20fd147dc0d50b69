"""A JSON Schema of CDI specs, written from the specification 0.5.0 (SPEC.md). Unknown fields are errors."""

from typing import Any

_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_PATH = {"type": "string", "pattern": "^/"}
_NUMBER = {"type": "integer", "minimum": 0}
_NAME = {"type": "string", "pattern": "^[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?$"}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": required,
        "properties": properties,
        "additionalProperties": False,
    }


_EDITS = {
    **_object(
        [],
        env={"type": "array", "items": {"type": "string", "pattern": "^[^=]+="}, "minItems": 1},
        deviceNodes={
            "type": "array",
            "minItems": 1,
            "items": _object(
                ["path"],
                path=_PATH,
                hostPath=_PATH,
                type={"enum": ["b", "c", "u", "p"]},
                major=_NUMBER,
                minor=_NUMBER,
                fileMode=_NUMBER,
                permissions={"type": "string", "pattern": "^r?w?m?$"},
                uid=_NUMBER,
                gid=_NUMBER,
            ),
        },
        mounts={
            "type": "array",
            "minItems": 1,
            "items": _object(
                ["hostPath", "containerPath"],
                hostPath=_PATH,
                containerPath=_PATH,
                type=_TEXT,
                options=_TEXTS,
            ),
        },
        hooks={
            "type": "array",
            "minItems": 1,
            "items": _object(
                ["hookName", "path"],
                hookName={
                    "enum": [
                        "prestart",
                        "createRuntime",
                        "createContainer",
                        "startContainer",
                        "poststart",
                        "poststop",
                    ]
                },
                path=_PATH,
                args=_TEXTS,
                env={"type": "array", "items": {"type": "string", "pattern": "^[^=]+="}},
                timeout=_NUMBER,
            ),
        },
    ),
    "minProperties": 1,
}

SCHEMA: dict[str, Any] = _object(
    ["cdiVersion", "kind", "devices"],
    cdiVersion={"enum": ["0.3.0", "0.4.0", "0.5.0"]},
    kind={"type": "string", "pattern": "^[A-Za-z][A-Za-z0-9_.-]*/[A-Za-z][A-Za-z0-9_-]*$"},
    devices={
        "type": "array",
        "minItems": 1,
        "items": _object(["name", "containerEdits"], name=_NAME, containerEdits=_EDITS),
    },
    containerEdits=_EDITS,
)
