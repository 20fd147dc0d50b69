"""Parses the opaque parameters that a claim or a device class has for this driver, in addition to devices and
capacity.

    apiVersion: vgpud.io/v1
    kind: VgpuConfig
    memory: 7GiB     # of a shared card: not more than was allocated
    cores: 30        # percent of it
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import Percent, parse_bytes

API_VERSION = "vgpud.io/v1"
KIND = "VgpuConfig"
_KEYS = ("apiVersion", "kind", "memory", "cores")


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a request; None for those that are not given."""

    memory_bytes: int | None = None
    share: Percent | None = None


NOTHING = Parameters()


def parameters_for(config: Iterable[Mapping[str, Any]], request: str, driver: str) -> Parameters:
    """The parameters for a request, from `status.allocation.devices.config`. Those of the claim override
    those of its class.

    Raises VgpuError (BAD_REQUEST, BAD_QUANTITY, BAD_PERCENT) for parameters that this driver does not
    support.
    """
    found = NOTHING
    entries = [entry for entry in config if (entry.get("opaque") or {}).get("driver") == driver]
    for source in ("FromClass", "FromClaim"):
        for entry in entries:
            names = entry.get("requests") or ()
            mine = not names or request in names or request.partition("/")[0] in names
            if mine and entry.get("source", "FromClaim") == source:
                said = parse(entry["opaque"].get("parameters"))
                found = replace(
                    found,
                    memory_bytes=found.memory_bytes if said.memory_bytes is None else said.memory_bytes,
                    share=found.share if said.share is None else said.share,
                )
    return found


def parse(body: object) -> Parameters:
    """Parses one object of parameters. Raises VgpuError."""
    if not isinstance(body, Mapping):
        raise _bad("the parameters are not an object", f"write apiVersion: {API_VERSION} and kind: {KIND}")
    if (body.get("apiVersion"), body.get("kind")) != (API_VERSION, KIND):
        given = f"{str(body.get('apiVersion'))[:40]} {str(body.get('kind'))[:40]}"
        raise _bad(f"parameters of {given} are not known", f"write apiVersion: {API_VERSION}, kind: {KIND}")
    unknown = next((key for key in body if key not in _KEYS), None)
    if unknown is not None:
        raise _bad(f"{str(unknown)[:40]!r} is not a parameter of a {KIND}", "use memory and cores")
    return Parameters(_memory(body.get("memory")), _cores(body.get("cores")))


def _memory(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise _bad(f"memory is {str(value)[:40]}, not text with a unit", 'write it as in "7GiB"')
    return parse_bytes(value)


def _cores(value: object) -> Percent | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad(f"cores is {str(value)[:40]!r}, not a number", "write the percentage as in 30")
    return Percent.from_float(float(value))


def _bad(sentence: str, hint: str) -> VgpuError:
    return VgpuError(ErrorCode.BAD_REQUEST, sentence, hint)
