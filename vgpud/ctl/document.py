"""Messages as plain values for JSON and YAML. Scripts may rely on this form.

Keys are the contract's field names in camelCase. Numbers stay numbers, memory is in bytes, an unset field is
null, and times are RFC 3339 in UTC under "...Time": a 64-bit count of nanoseconds does not survive a JSON
reader that knows only doubles.
"""

from datetime import UTC, datetime
from typing import Any

from google.protobuf.message import Message

UNIX_NS = "unix_ns"


def plain(message: Message) -> dict[str, Any]:
    """All fields of `message`, in the order of the proto file."""
    return dict(_field(message, name) for name in message.DESCRIPTOR.fields_by_name)


def _field(message: Message, name: str) -> tuple[str, Any]:
    field = message.DESCRIPTOR.fields_by_name[name]
    value = getattr(message, name)
    if name.endswith(UNIX_NS):
        stem = field.json_name.removesuffix("UnixNs").removesuffix("unixNs")
        return (f"{stem}Time" if stem else "time"), rfc3339(value)
    nested = field.message_type
    if nested is not None and nested.GetOptions().map_entry:
        return field.json_name, {str(key): value[key] for key in sorted(value)}
    if field.is_repeated:
        return field.json_name, [plain(item) if nested is not None else item for item in value]
    if field.has_presence and not message.HasField(name):
        return field.json_name, None
    return field.json_name, value if nested is None else plain(value)


def rfc3339(unix_ns: int) -> str | None:
    """A time stamp in RFC 3339 with nanoseconds; None for 0, which means that the time is not known."""
    if unix_ns <= 0:
        return None
    seconds, nanoseconds = divmod(unix_ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{nanoseconds:09d}Z"
