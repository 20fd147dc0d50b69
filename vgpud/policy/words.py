"""Sentences for validation errors: what is wrong, with its figures, and what to write instead."""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic_core import ErrorDetails

from vgpud.policy.locate import KeyPath, quote
from vgpud.policy.model import TABLES

_SHOWN_LENGTH = 40

# pydantic's error types, as listed at https://docs.pydantic.dev/latest/errors/validation_errors/
_WANTED = {
    "string_type": ("text", 'write it in quotes: "..."'),
    "int_type": ("a whole number", "write digits only, as in 4"),
    "float_type": ("a number", "write digits without quotes, as in 1.5"),
    "bool_type": ("true or false", "write true or false without quotes"),
    "tuple_type": ("an array", 'write it as in ["..."]'),
    "model_type": ("a table", "write its keys below its header"),
}


def explain(error: ErrorDetails) -> tuple[str, str]:
    """The sentence and the hint for one of pydantic's errors."""
    kind, path, value = error["type"], error["loc"], error["input"]
    context: Mapping[str, Any] = error.get("ctx", {})
    if kind == "vgpud":
        return str(context["sentence"]), str(context["hint"])
    if kind == "extra_forbidden":
        return "is not a key that vgpud knows", _hint_for_key(path)
    if kind == "missing":
        return "is missing", "it has no default: write it"
    if kind == "literal_error":
        return _not_a_choice(value, re.findall(r"'([^']*)'", str(context["expected"])))
    if kind in _WANTED:
        return _wrong_type(kind, path, value)
    unforeseen = f"{shown(value)}: {error['msg'].lower()}", "see docs/policy.md for the key"
    return _impossible(kind, value, context) or unforeseen


def shown(value: object) -> str:
    """A TOML value in a few words on one line, for a sentence."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = quote(value[:_SHOWN_LENGTH])
        return text if len(value) <= _SHOWN_LENGTH else f"{text}..."
    if isinstance(value, int) and value.bit_length() > 64:
        return "a number beyond 64 bits"
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return f"an array of {len(value)}"
    return str(value)


def _impossible(kind: str, value: object, context: Mapping[str, Any]) -> tuple[str, str] | None:
    match kind:
        case "greater_than_equal":
            return f"{shown(value)} is too small", f"the least is {context['ge']:g}"
        case "less_than_equal":
            return f"{shown(value)} is too large", f"the most is {context['le']:g}"
        case "finite_number":
            return f"{shown(value)} is not a finite number", "leave the key out for its default"
        case "string_too_short" | "too_short":
            return "is empty, so nothing could ever match it", "leave the key out to allow all"
        case "too_long":
            return f"has {context['actual_length']} entries", f"the most is {context['max_length']}"
    return None


def _wrong_type(kind: str, path: KeyPath, value: object) -> tuple[str, str]:
    wanted, hint = _WANTED[kind]
    if path in (("device",), ("kubelet", "resource")):
        wanted, hint = "an array of tables", f"write {_header(_table_name(path))}, with two brackets"
    elif kind == "model_type":
        hint = f"write {_header(_table_name(path))} and its keys below"
    return f"{shown(value)} is not {wanted}", hint


def _not_a_choice(value: object, choices: list[str]) -> tuple[str, str]:
    sentence = f"{shown(value)} is not one of {', '.join(choices)}"
    close = _closest(value, choices) if isinstance(value, str) else None
    return sentence, f'did you mean "{close}"' if close else "write one of these in quotes"


def _hint_for_key(path: KeyPath) -> str:
    key, table = str(path[-1]), _table_name(path[:-1])
    here = TABLES[table].model_fields
    elsewhere = [name for name, model in TABLES.items() if key in model.model_fields]
    root = table.partition(".")[0]
    related = [name for name in elsewhere if name.partition(".")[0] == root]
    close = _closest(key, here)
    if close and not related:
        return f"did you mean {close}"
    if elsewhere:
        return f"it belongs {' or '.join(_place(name) for name in related or elsewhere)}"
    for name, model in TABLES.items():
        close = _closest(key, model.model_fields)
        if close:
            return f"did you mean {close}, {_place(name)}"
    return f"known here: {', '.join(here)}" if here else "this table takes no keys"


def _closest(word: str, known: Iterable[str]) -> str | None:
    bare = word[:_SHOWN_LENGTH].lower().replace("-", "_")
    return next(iter(get_close_matches(bare, list(known), 1, 0.7)), None)


def _table_name(path: KeyPath) -> str:
    return ".".join(part for part in path if isinstance(part, str))


def _place(table: str) -> str:
    return f"in {_header(table)}" if table else "at the top of the file, before any table"


def _header(table: str) -> str:
    return f"[[{table}]]" if table in ("device", "kubelet.resource") else f"[{table}]"
