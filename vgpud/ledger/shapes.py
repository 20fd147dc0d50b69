"""Encoders and decoders (dataclass of the model <-> JSON), compiled once for each class.

There are two forms. A dataclass of plain values only (text, numbers, booleans, enums, None) is a row: a JSON
array of its fields in order. Any other dataclass is a record: a JSON object of its fields, without those that
have their default. In both forms, a new last field with a default needs no migration. Enums are written as
their values, tuples as arrays.

`Mismatch` is raised for JSON that does not fit the model: an unknown field, a missing field, a value of
another type. A start reads up to ten thousand allocations, so the checks are table look-ups. The types of all
values of a row are checked at once. Equal rows (the same mount, the same reason) are decoded once and shared,
which is safe because the dataclasses are frozen.
"""

import dataclasses
import types
import typing
from collections.abc import Callable
from enum import StrEnum
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, Protocol, cast

# a value read from JSON has any type until it is checked
Convert = Callable[[Any], Any]
_PLAIN = (str, int, bool)
_ROWS_SHARED = 4096


class Mismatch(Exception):
    """A value that does not match the type in the model. It contains a sentence."""


class Shape(Protocol):
    """The encoder and decoder of one type."""

    def encode(self, value: Any, /) -> Any: ...  # noqa: ANN401
    def decode(self, value: Any, /) -> Any: ...  # noqa: ANN401


@dataclasses.dataclass(frozen=True, slots=True)
class _Pair:
    """A shape that is made of two functions."""

    encode: Convert
    decode: Convert
    types: frozenset[type] = frozenset()  # the values' types in the model, if they are plain types


class Row:
    """Encodes a dataclass of plain values as an array."""

    def __init__(self, cls: type, columns: list[_Pair], required: int) -> None:
        self._cls = cls
        self._columns = columns
        self._required = required
        names = [item.name for item in dataclasses.fields(cls)]
        self._values: Callable[[Any], tuple[Any, ...]] = (
            attrgetter(*names) if len(names) > 1 else lambda value: (getattr(value, names[0]),)
        )
        self._sound: set[tuple[type, ...]] = set()  # combinations of types that have passed the check
        # the cache distinguishes types (typed=True): 1 equals True, but only one of the two is valid in a
        # field
        self._build = lru_cache(maxsize=_ROWS_SHARED, typed=True)(self._check_and_build)

    def encode(self, value: Any) -> tuple[Any, ...]:  # noqa: ANN401
        if type(value) is not self._cls:
            raise Mismatch(f"{value!r} is not a {self._cls.__name__}")
        row = self._values(value)
        kinds = tuple(map(type, row))
        if kinds not in self._sound:
            for column, item in zip(self._columns, row, strict=True):
                column.encode(item)
            self._sound.add(kinds)
        return row  # the value can stay a StrEnum, because the JSON encoder writes it as its value

    def decode(self, value: Any) -> Any:  # noqa: ANN401
        if type(value) is not list:
            raise Mismatch(f"{value!r} is not a {self._cls.__name__}")
        try:
            return self._build(*value)
        except TypeError:  # the row contains a list or an object, which cannot be a key of the cache
            raise Mismatch(f"{value!r} is not a {self._cls.__name__}") from None

    def _check_and_build(self, *row: Any) -> Any:  # noqa: ANN401
        if not self._required <= len(row) <= len(self._columns):
            raise Mismatch(f"{list(row)!r} is not a {self._cls.__name__}: it has {len(row)} values")
        return self._cls(*[column.decode(item) for column, item in zip(self._columns, row, strict=False)])


class Record:
    """Encodes a dataclass that has more than plain values as an object."""

    def __init__(self, cls: type, fields: dict[str, Shape]) -> None:
        self._cls = cls
        self._plain = {name: _plain_type(shape) for name, shape in fields.items()}
        self._fields = fields
        self._steps = [
            (item.name, _default(item), self._plain[item.name], fields[item.name].encode)
            for item in dataclasses.fields(cls)
        ]

    def encode(self, value: Any) -> dict[str, Any]:  # noqa: ANN401
        if type(value) is not self._cls:
            raise Mismatch(f"{value!r} is not a {self._cls.__name__}")
        out: dict[str, Any] = {}
        for name, default, plain, encode in self._steps:
            item = getattr(value, name)
            # the types are compared too, because 1 == True
            if item is default or (type(item) is type(default) and item == default):
                continue
            out[name] = item if type(item) is plain else encode(item)
        return out

    def decode(self, value: Any) -> Any:  # noqa: ANN401
        if type(value) is not dict:
            raise Mismatch(f"{value!r} is not a {self._cls.__name__}")
        plain, fields = self._plain, self._fields
        for name, item in value.items():
            if type(item) is plain.get(name, Mismatch):
                continue
            if name not in fields:
                raise Mismatch(f"{self._cls.__name__} has no field {name!r}")
            value[name] = fields[name].decode(item)
        try:
            return self._cls(**value)
        except TypeError as error:  # TypeError: a field without a default is missing
            raise Mismatch(f"{self._cls.__name__} is incomplete: {error}") from None


@cache
def shape_of(cls: type) -> Row | Record:
    """The shape for a dataclass of the model. Raises TypeError for a field that it cannot write."""
    hints = typing.get_type_hints(cls)
    fields = {item.name: _shape(hints[item.name]) for item in dataclasses.fields(cls)}
    columns = [shape for shape in fields.values() if isinstance(shape, _Pair) and shape.types]
    if len(columns) < len(fields):
        return Record(cls, fields)
    return Row(cls, columns, sum(_default(item) is dataclasses.MISSING for item in dataclasses.fields(cls)))


def _shape(hint: Any) -> Shape:  # noqa: ANN401
    if hint in _PLAIN:
        return _Pair(_only(hint), _only(hint), frozenset({hint}))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _Pair(_only(hint), _member(hint), frozenset({hint}))
    if dataclasses.is_dataclass(hint):
        return shape_of(cast(type, hint))
    arguments = typing.get_args(hint)
    if isinstance(hint, types.UnionType) and len(arguments) == 2 and arguments[1] is types.NoneType:
        return _optional(_shape(arguments[0]))
    if typing.get_origin(hint) is tuple and arguments[1:] == (Ellipsis,):
        return array_of(_shape(arguments[0]))
    if typing.get_origin(hint) is tuple:
        return _tuple(arguments)
    raise TypeError(f"the ledger cannot write {hint!r}")


def _only(kind: type) -> Convert:
    def check(value: Any) -> Any:  # noqa: ANN401
        if type(value) is not kind:
            raise Mismatch(f"{value!r} is not of type {kind.__name__}")
        return value

    return check


def _member(kind: type[StrEnum]) -> Convert:
    members = {member.value: member for member in kind}

    def decode(value: Any) -> StrEnum:  # noqa: ANN401
        if type(value) is not str or value not in members:
            raise Mismatch(f"{value!r} is not a {kind.__name__}")
        return members[value]

    return decode


def _optional(shape: Shape) -> _Pair:
    encode, decode = shape.encode, shape.decode
    plain = shape.types | {types.NoneType} if isinstance(shape, _Pair) and shape.types else frozenset()
    return _Pair(
        lambda value: None if value is None else encode(value),
        lambda value: None if value is None else decode(value),
        plain,
    )


def array_of(shape: Shape) -> Shape:
    """The shape for a tuple of any length."""
    encode_item, decode_item = shape.encode, shape.decode

    def encode(value: Any) -> list[Any]:  # noqa: ANN401
        if type(value) is not tuple:
            raise Mismatch(f"{value!r} is not a tuple")
        return [encode_item(item) for item in value]

    def decode(value: Any) -> tuple[Any, ...]:  # noqa: ANN401
        if type(value) is not list:
            raise Mismatch(f"{value!r} is not an array")
        return tuple([decode_item(item) for item in value])

    return _Pair(encode, decode)


def _tuple(kinds: tuple[type, ...]) -> _Pair:
    """The shape for a tuple of fixed length of plain values, such as a name and its value."""
    if not set(kinds) <= set(_PLAIN):
        raise TypeError(f"the ledger cannot write a tuple of {kinds!r}")

    def encode(value: Any) -> Any:  # noqa: ANN401
        if type(value) is not tuple or tuple(map(type, value)) != kinds:
            raise Mismatch(f"{value!r} is not a tuple of {_names(kinds)}")
        return value

    def decode(value: Any) -> tuple[Any, ...]:  # noqa: ANN401
        if type(value) is not list or tuple(map(type, value)) != kinds:
            raise Mismatch(f"{value!r} is not an array of {_names(kinds)}")
        return tuple(value)

    return _Pair(encode, decode)


def _names(kinds: tuple[type, ...]) -> str:
    return " and ".join(kind.__name__ for kind in kinds)


def _plain_type(shape: Shape) -> type | None:
    """The type of a shape's values if they are written to JSON unchanged; None for any other shape."""
    if isinstance(shape, _Pair) and len(shape.types) == 1:
        (only,) = shape.types
        return only if only in _PLAIN else None
    return None


def _default(item: "dataclasses.Field[Any]") -> Any:  # noqa: ANN401
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default
