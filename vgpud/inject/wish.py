"""Reads the request for a GPU in a container's config.json, from its annotations or its environment.

The keys are those of vgpuctl's options: annotation "vgpud.io/memory", variable VGPU_MEMORY, and so on. An
annotation comes from the caller of the runtime. A variable may come from the image; config.json does not show
its origin. If there are annotations, only the annotations count. Without annotations, the variables count if
the policy allows them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import Percent, parse_bytes
from vgpud.model.tenancy import Isolation, Owner, Request, Selector

PREFIX = "vgpud.io/"
PREPARED = f"{PREFIX}prepared"  # annotation that vgpud adds to each config.json that it has edited
#: The known keys. True means that the key alone makes a request; other keys only refine one.
KEYS = {
    "memory": True,
    "cores": True,
    "count": True,
    "isolation": True,
    "profile": True,
    "device": True,
    "device-name": True,
    "label": False,
}
# Keys of config.json that vgpud reads or edits, with the keys inside them.
_KEYS_READ: Mapping[str, frozenset[str]] = {
    "annotations": frozenset(),
    "process": frozenset({"env", "user"}),
    "linux": frozenset({"devices", "resources", "uidMappings", "gidMappings"}),
    "mounts": frozenset(),
    "hooks": frozenset({"createRuntime", "poststop"}),
}
_NOTHING = {"count": "0"}  # an explicit request for no device, for a container beside one that requests a GPU
_MAX_COUNT = 64
# Maximum length of a key that is compared with the known keys, because the time of the comparison grows with
# the length.
_MAX_KEY_CHARACTERS = 32
# maximum of characters of the caller's id that become part of the request id, which has at most 128
# characters
_MAX_ID_CHARACTERS = 100
_MAX_TEXT_CHARACTERS = 256
# Annotations that mark a pod's pause container (containerd, CRI-O). The pause container has the pod's
# annotations too, but needs no GPU.
_SANDBOX = ("io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType")
_POD_NAMES = (
    (
        "io.kubernetes.cri.sandbox-namespace",
        "io.kubernetes.cri.sandbox-name",
        "io.kubernetes.cri.container-name",
    ),
    ("io.kubernetes.pod.namespace", "io.kubernetes.pod.name", "io.kubernetes.container.name"),
)
# Annotation with the value "libpod" if Podman runs the pod. Podman marks its containers as CRI-O does.
_ENGINE = "io.container.manager"
# Variables with a memory limit in whole MiB, which the hook apply-cuda-memory-limits of NVIDIA's container
# toolkit reads from a container.
_TOOLKIT_MEMORY = ("NVIDIA_GPU_MEMORY_LIMIT", "NVIDIA_GPU_MEMORY_REQUEST")
# variable set by an allocation's edits: the container has the allocation's CDI device, which was requested by
# name
_HELD = "VGPU_ALLOCATION"


@dataclass(frozen=True)
class Wish:
    """The request that a container makes. `request` turns it into a request to the node."""

    memory_bytes: int | None = None
    share: Percent | None = None
    count: int = 1
    isolation: Isolation | None = None
    mig_profile: str = ""
    selector: Selector = field(default_factory=Selector)
    label: str = ""

    def request(self, request_id: str, owner: Owner, **more: Any) -> Request:  # noqa: ANN401
        return Request(
            id=request_id[:_MAX_ID_CHARACTERS],
            owner=owner,
            memory_bytes=self.memory_bytes,
            share=self.share,
            count=self.count,
            isolation=self.isolation,
            mig_profile=self.mig_profile,
            selector=self.selector,
            label=self.label,
            **more,
        )


def wish_of(config: Mapping[str, Any], environment: bool = False) -> Wish | None:
    """The request in config.json, or None. With `environment`, the policy allows variables to make a request.

    Raises VgpuError: BAD_QUANTITY, BAD_PERCENT, BAD_REQUEST.
    """
    annotations = _table(config, "annotations")
    variables = environment_of(config)
    if "sandbox" in (annotations.get(name) for name in _SANDBOX):
        return None
    words = _annotated(annotations)
    if not words and environment and not _holds(config, variables):
        words = _asked_by(variables)
    if not any(KEYS[key] for key in words) or words == _NOTHING:
        return None
    return Wish(
        memory_bytes=parse_bytes(words["memory"]) if "memory" in words else None,
        share=Percent.parse(words["cores"]) if "cores" in words else None,
        count=_count(words.get("count", "1")),
        isolation=_isolation(words.get("isolation")),
        mig_profile=_text("profile", words.get("profile", "")),
        selector=_selector(words.get("device", ""), words.get("device-name", "")),
        label=_text("label", words.get("label", "")),
    )


def check_keys(config: Mapping[str, Any]) -> None:
    """Raises VgpuError(BAD_REQUEST) for a key that differs only by case from one that vgpud reads.

    runc reads such a key (Go's encoding/json compares keys without case), and vgpud would miss a request in
    it.
    """
    for place, keys in ((config, _KEYS_READ), *((config.get(key), keys) for key, keys in _KEYS_READ.items())):
        for key in place if isinstance(place, dict) else ():
            if key not in keys and (meant := key.casefold()) in (known.casefold() for known in keys):
                raise _bad(
                    f"config.json has the key {key!r}, which container runtimes read as {meant!r}",
                    "spell it as the OCI runtime specification does",
                )


def check_pod_asks(config: Mapping[str, Any], environment: bool = False) -> None:
    """Raises VgpuError(BAD_REQUEST) for a container of a Kubernetes pod without a request. Allowed are the
    explicit request for no device (count 0), and the CDI device of an allocation.

    The pod's runtime class selects vgpu-runtime, so a missing request means that the engine did not pass the
    annotations on. The container would run without a GPU and without an error.
    """
    annotations, variables = _table(config, "annotations"), environment_of(config)
    in_pod = "container" in (annotations.get(name) for name in _SANDBOX)
    if not in_pod or annotations.get(_ENGINE) == "libpod" or _holds(config, variables):
        return
    words = _annotated(annotations) or (_asked_by(variables) if environment else {})
    if words != _NOTHING:
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            "a container of a pod came to vgpu-runtime and asks for no GPU slice",
            f'let the engine pass annotations on (containerd: pod_annotations = ["{PREFIX}*"]), or set '
            "must_ask = false in [runtime] of the policy",
        )


def pod_of(state: Mapping[str, Any]) -> str:
    """The pod as "namespace/pod/container", from annotations of a container's state; "" without such names.

    The names are containerd's (pkg/cri/annotations) and CRI-O's (pkg/annotations).
    """
    annotations = _table(state, "annotations")
    for names in _POD_NAMES:
        words = [word for name in names if isinstance(word := annotations.get(name), str) and word]
        if len(words) == len(names) and all(map(_is_short_text, words)):
            return "/".join(words)
    return ""


def _is_short_text(word: str) -> bool:
    return len(word) <= _MAX_TEXT_CHARACTERS and word.isprintable()


def owner_of(config: Mapping[str, Any]) -> Owner:
    """The host's user and group that own the container's process: the ids inside, mapped by the container's
    user namespace.
    """
    user = _table(_table(config, "process"), "user")
    linux = _table(config, "linux")
    uid, gid = (_number(user.get(key, 0), f"process.user.{key}") for key in ("uid", "gid"))
    return Owner(_mapped(uid, linux.get("uidMappings")), _mapped(gid, linux.get("gidMappings")))


def environment_of(config: Mapping[str, Any]) -> dict[str, str]:
    entries = _table(config, "process").get("env") or []
    if not isinstance(entries, list):
        raise _bad("process.env of config.json is not a list", "give the runtime a valid config.json")
    pairs = (str(entry).partition("=") for entry in entries)
    return {name: value for name, _, value in pairs}


def ignored_by(config: Mapping[str, Any], environment: bool = False) -> tuple[str, ...]:
    """The variables that would make or cancel a request, but that `wish_of` ignores when it is called with
    the same arguments.
    """
    variables = environment_of(config)
    words = _asked_by(variables)
    toolkit = "" if variables.get(_variable("memory"), "").strip() else _toolkit_memory(variables)
    asked = tuple(toolkit if key == "memory" and toolkit else _variable(key) for key in words)
    if _annotated(_table(config, "annotations")):
        return (*asked, _HELD) if variables.get(_HELD) else asked
    return () if environment or _holds(config, variables) else asked


def _holds(config: Mapping[str, Any], variables: Mapping[str, str]) -> bool:
    """Does the container already have the CDI device of an allocation? VGPU_ALLOCATION alone proves nothing,
    because it may come from the image. An image cannot add device nodes or mount an allocation's lease.
    """
    held = variables.get(_HELD)
    nodes = _texts(_table(config, "linux").get("devices"), "path")
    sources = _texts(config.get("mounts"), "source")
    return bool(held) and (
        any(path.startswith("/dev/nvidia") for path in nodes)
        or any(source.endswith(f"/{held}") for source in sources)
    )


def _annotated(annotations: Mapping[str, Any]) -> dict[str, str]:
    """The values of the annotations by key; empty values count as unset. Refuses misspelt keys, because a
    container would run without the limit.
    """
    words = {}
    for name, value in annotations.items():
        if not name.casefold().startswith(PREFIX) or name == PREPARED:
            continue
        key = name[len(PREFIX) :]
        if key not in KEYS or not name.startswith(PREFIX):
            near = get_close_matches(key[:_MAX_KEY_CHARACTERS].lower(), KEYS, n=1)
            known = f"did you mean {PREFIX}{near[0]}" if near else f"{PREFIX} goes with {', '.join(KEYS)}"
            raise _bad(f"unknown annotation {name[:_MAX_TEXT_CHARACTERS]!r}", known)
        if not isinstance(value, str):
            raise _bad(f"annotation {name} is not a text", "the OCI runtime specification has texts only")
        words[key] = value.strip()
    return {key: value for key, value in words.items() if value}


def _asked_by(variables: Mapping[str, str]) -> dict[str, str]:
    words = {key: variables.get(_variable(key), "").strip() for key in KEYS}
    toolkit = _toolkit_memory(variables)
    if toolkit and not words["memory"]:
        words["memory"] = f"{variables[toolkit].strip()}MiB"
    return {key: value for key, value in words.items() if value}


def _toolkit_memory(variables: Mapping[str, str]) -> str:
    """The variable by which NVIDIA's container toolkit limits the memory; empty if there is none."""
    return next((name for name in _TOOLKIT_MEMORY if variables.get(name, "").strip()), "")


def _variable(key: str) -> str:
    return f"VGPU_{key.upper().replace('-', '_')}"


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= _MAX_COUNT):
        raise _bad(f"count {text[:32]!r} is not a number of devices from 1 to {_MAX_COUNT}", "as in count 2")
    return int(text)


def _isolation(word: str | None) -> Isolation | None:
    if word is None:
        return None
    try:
        return Isolation(word)
    except ValueError:
        words = ", ".join(isolation.value for isolation in Isolation)
        raise _bad(f"isolation {word[:32]!r} is not known", f"use one of {words}, or leave it out") from None


def _selector(devices: str, name_glob: str) -> Selector:
    """The device selector of a text: digits are an index, other text is a UUID, as for vgpuctl."""
    names = [name for name in (_text("device", part.strip()) for part in devices.split(",")) if name]
    if len(names) > _MAX_COUNT:
        raise _bad(f"{len(names)} devices are named, at most {_MAX_COUNT} are allowed", "name fewer")
    indices = tuple(int(name) for name in names if _is_index(name))
    uuids = tuple(name for name in names if not _is_index(name))
    return Selector(uuids=uuids, indices=indices, name_glob=_text("device-name", name_glob))


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10


def _text(key: str, value: str) -> str:
    if len(value) > _MAX_TEXT_CHARACTERS or not value.isprintable():
        raise _bad(
            f"{key} has {len(value)} characters, or some that cannot be printed",
            f"use up to {_MAX_TEXT_CHARACTERS} printable ones",
        )
    return value


def _table(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = parent.get(key) or {}
    if not isinstance(found, dict):
        raise _bad(f"{key} of config.json is not an object", "give the runtime a valid config.json")
    return found


def _texts(items: Any, key: str) -> list[str]:  # noqa: ANN401 - JSON
    """The texts under `key` in a list of JSON objects; empty if the JSON has another form."""
    entries = items if isinstance(items, list) else []
    return [str(entry.get(key)) for entry in entries if isinstance(entry, dict)]


def _mapped(number: int, mappings: Any) -> int:  # noqa: ANN401 - JSON
    """The host's id for an id in the container (runtime specification, "User namespace mappings"). An id
    without a mapping stays unchanged.
    """
    try:
        for mapping in mappings or ():
            first = _number(mapping["containerID"], "a mapping's containerID")
            host = _number(mapping["hostID"], "a mapping's hostID")
            size = _number(mapping["size"], "a mapping's size", "a number of ids", 2**32)
            if first <= number < first + size:
                return _number(host + number - first, f"the host's id for id {number}")
    except (KeyError, TypeError):
        raise _bad(
            "the id mappings of config.json are not valid", "give the runtime a valid config.json"
        ) from None
    return number


def _number(value: object, field_name: str, kind: str = "an id", end: int = 2**32 - 1) -> int:
    if type(value) is not int or not 0 <= value < end:
        raise _bad(
            f"{field_name} of config.json is {repr(value)[:64]}, not {kind}",
            "give the runtime a valid config.json",
        )
    return value


def _bad(sentence: str, hint: str) -> VgpuError:
    return VgpuError(ErrorCode.BAD_REQUEST, sentence, hint)
