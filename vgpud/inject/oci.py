"""Edits an OCI config.json (Open Container Initiative, runtime-spec 1.0.2 and 1.1). The input and output of
its functions are JSON objects.
"""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from vgpud.inject.driver import DriverFiles
from vgpud.inject.hooks import PRELOAD, HookProgram
from vgpud.inject.wish import PREPARED
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import DeviceNode, Edits, Mount

# maximum of values in config.json: Kubernetes sets seven variables per service, so 7000 for 1000 services
_MAX_VALUES = 20_000
_MAX_DEPTH = 64  # maximum nesting of config.json: the specification needs 7
# Mode of device nodes in containers. Access is controlled by the cgroup's device rules and by the driver, as
# for NVIDIA's own nodes.
_OPEN_TO_ALL = 0o666


def parsed(body: bytes) -> dict[str, Any]:
    """Parses config.json. Raises VgpuError(BAD_REQUEST) if it is no JSON object, or has more values than a
    container needs.

    The parser blocks other threads for a time that grows with the number of values, so the values are counted
    first.
    """
    values = sum(body.count(mark) for mark in (b",", b"[", b"{"))
    if values > _MAX_VALUES:
        raise _bad(f"config.json has some {values} values, at most {_MAX_VALUES} are allowed")
    try:
        config = json.loads(body)
    except (ValueError, RecursionError):
        # the text is no JSON, has a number with thousands of digits, or is nested too deeply
        config = None
    if not isinstance(config, dict):
        raise _bad("config.json is not a JSON object")
    return config


def check_shape(config: Mapping[str, Any]) -> None:
    """Checks the types of the parts of config.json which `edited` changes.

    Raises VgpuError(BAD_REQUEST). After this check, neither `edited` nor encoding the result as JSON fails.
    """
    if _deeper(config, _MAX_DEPTH):
        raise _bad(f"config.json is nested deeper than {_MAX_DEPTH}")
    try:
        _Config.model_validate(config)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"][:6])
        raise _bad(
            f"{where} of config.json is not what the specification says: {first['msg'].lower()}"
        ) from None


def _deeper(value: object, most: int) -> bool:
    """Is `value` nested deeper than `most`? It is searched level by level, because recursion on the caller's
    data could exhaust the stack.
    """
    level = [value]
    for _ in range(most):
        level = [
            below
            for one in level
            for below in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
            if isinstance(below, dict | list)
        ]
        if not level:
            return False
    return True


class _Part(BaseModel):
    """A part of config.json, with the fields that vgpud reads or changes. Other fields are kept as
    they are.
    """

    model_config = ConfigDict(strict=True, extra="ignore")


class _Process(_Part):
    env: list[str] | None = None
    user: dict[str, Any] | None = None


class _Resources(_Part):
    devices: list[dict[str, Any]] | None = None


class _Linux(_Part):
    devices: list[dict[str, Any]] | None = None
    resources: _Resources | None = None


class _Config(_Part):
    process: _Process | None = None
    linux: _Linux | None = None
    mounts: list[dict[str, Any]] | None = None
    hooks: dict[str, list[dict[str, Any]] | None] | None = None
    annotations: dict[str, Any] | None = None


def _bad(sentence: str) -> VgpuError:
    return VgpuError(ErrorCode.BAD_REQUEST, sentence, "give the runtime a valid bundle")


def edited(
    config: Mapping[str, Any], allocation_id: str, edits: Edits, driver: DriverFiles, hook: HookProgram
) -> dict[str, Any]:
    """The container's config.json, changed for an allocation. Its hooks bind the allocation to the
    container's init process and release it when the container ends.
    """
    after = dict(config)
    process = after["process"] = dict(after.get("process") or {})
    environment = {key: value for key, value in edits.env if key != PRELOAD}
    process["env"] = _with_environment(process.get("env") or [], environment)
    linux = after["linux"] = dict(after.get("linux") or {})
    nodes = [node for node in edits.device_nodes if node.major is not None and node.minor is not None]
    linux["devices"] = _with_nodes(linux.get("devices") or [], nodes)
    resources = linux["resources"] = dict(linux.get("resources") or {})
    resources["devices"] = [*(resources.get("devices") or []), *(_rule(node) for node in nodes)]
    after["mounts"] = _with_mounts(after.get("mounts") or [], driver.mounts + edits.mounts)
    after["hooks"] = _with_hooks(after.get("hooks") or {}, allocation_id, edits, driver, hook)
    after["annotations"] = {**(after.get("annotations") or {}), PREPARED: allocation_id}
    return after


def refused(config: Mapping[str, Any], text: str, hook: HookProgram) -> dict[str, Any]:
    """A config.json that makes the container runtime fail with the error `text`. The text is passed to a hook
    as an argument, because Podman does not show the output of hooks.
    """
    after = dict(config)
    hooks = dict(after.get("hooks") or {})
    hooks["createRuntime"] = [hook.oci("refuse", text), *(hooks.get("createRuntime") or [])]
    after["hooks"] = hooks
    return after


def _with_environment(before: list[str], ours: Mapping[str, str]) -> list[str]:
    kept = [entry for entry in before if entry.partition("=")[0] not in ours]
    return [*kept, *(f"{key}={value}" for key, value in ours.items())]


def _with_nodes(before: list[dict[str, Any]], nodes: list[DeviceNode]) -> list[dict[str, Any]]:
    paths = {node.path for node in nodes}
    kept = [entry for entry in before if entry.get("path") not in paths]
    return [*kept, *(_node(node) for node in nodes)]


def _node(node: DeviceNode) -> dict[str, Any]:
    return {
        "path": node.path,
        "type": "c",
        "major": node.major,
        "minor": node.minor,
        "fileMode": _OPEN_TO_ALL,
        "uid": 0,
        "gid": 0,
    }


def _rule(node: DeviceNode) -> dict[str, Any]:
    return {
        "allow": True,
        "type": "c",
        "major": node.major,
        "minor": node.minor,
        "access": node.permissions,
    }


def _with_mounts(before: list[dict[str, Any]], mounts: tuple[Mount, ...]) -> list[dict[str, Any]]:
    """Adds vgpud's mounts to those of config.json. vgpud's mounts come last, so that no tmpfs on /run hides
    them. They replace other mounts at the same path.
    """
    places = {mount.container_path for mount in mounts}
    kept = [entry for entry in before if entry.get("destination") not in places]
    return [*kept, *(_mount(mount) for mount in sorted(mounts, key=lambda m: m.container_path.count("/")))]


def _mount(mount: Mount) -> dict[str, Any]:
    return {
        "destination": mount.container_path,
        "type": "bind",
        "source": mount.host_path,
        "options": ["ro" if mount.read_only else "rw", "nosuid", "nodev", "rbind"],
    }


def _with_hooks(
    before: Mapping[str, Any], allocation_id: str, edits: Edits, driver: DriverFiles, hook: HookProgram
) -> dict[str, Any]:
    after = {stage: list(entries or []) for stage, entries in before.items()}
    for given in driver.hooks:
        entry = {key: value for key, value in given.items() if key != "hookName"}
        after.setdefault(given["hookName"], []).append(entry)
    for stage, word in (("createRuntime", "bind"), ("poststop", "end")):
        after.setdefault(stage, []).append(hook.oci(word, allocation_id))
    for entry in hook.in_container(edits, driver):
        after.setdefault("createContainer", []).append(entry)
    return after
