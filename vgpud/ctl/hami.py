"""`vgpuctl convert hami`: converts manifests for HAMi into manifests for vgpud.

Sources for HAMi's keys: its documents "Global Config" (docs/config.md) and "Task requests and annotations" of
version 2.x. Memory there is in MiB for each slice, cores in percent. A setting without a counterpart is
removed, usually with a note on standard error; docs/hami.md has the table.
"""

import copy
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vgpud.ctl.files import MAX_BYTES, decoded, read_text
from vgpud.ctl.terminal import Terminal
from vgpud.model.errors import ErrorCode, Exit, VgpuError
from vgpud.model.quantity import GIB, MIB, format_bytes

RUNTIME_CLASS = "vgpu"
_COUNT, _MEMORY, _PERCENT, _CORES = (
    f"nvidia.com/{word}" for word in ("gpu", "gpumem", "gpumem-percentage", "gpucores")
)
_PRIORITY = "nvidia.com/priority"
_RESOURCES = (_COUNT, _MEMORY, _PERCENT, _CORES, _PRIORITY)
_MODES = {"hami-core": "quota", "mig": "hardware", "mps": "compute"}
_SCHEDULER = "hami-scheduler"
_DROPPED_ANNOTATIONS = {
    "nvidia.com/nouse-gputype": "keep pods off a type of card with nodeSelector or affinity",
    "nvidia.com/nouse-gpuuuid": "close a card to new tenants with 'vgpuctl drain'",
    "nvidia.com/numa-bind": "vgpud picks near cards by itself",
    "hami.io/node-scheduler-policy": "nodes are chosen by the cluster's own scheduler",
    "hami.io/gpu-scheduler-policy": "set planner.strategy in vgpud's policy",
}
_HINT = "give manifests as 'kubectl apply -f' takes them"
_DROPPED_ENVIRONMENT = ("CUDA_DISABLE_CONTROL", "GPU_CORE_UTILIZATION_POLICY", "CUDA_TASK_PRIORITY")

Json = dict[str, Any]
Say = Callable[[str], None]


class Want(NamedTuple):
    """What one container requests from HAMi."""

    slices: int
    memory_bytes: int | None
    cores: int | None


def convert(arguments: Namespace, terminal: Terminal) -> int:
    """Prints the converted manifests; notes go to standard error. Raises VgpuError(BAD_REQUEST)."""
    import yaml

    documents = read_documents(arguments.file)
    for document in documents:
        convert_document(document, arguments.to, arguments.card_memory, terminal.say)
    try:
        text = yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True)
    except RecursionError:
        # RecursionError: the YAML writer uses more stack than the reader, so a document that was read may not
        # be writable
        raise _bad(f"the YAML of {arguments.file} has too many levels of lists and tables") from None
    print(text, end="")
    return Exit.OK.value


def read_documents(name: str) -> list[Any]:
    """The YAML documents of a file, or of standard input ("-"). Raises VgpuError(BAD_REQUEST)."""
    import yaml

    if name == "-":
        text = decoded("standard input", sys.stdin.buffer.read(MAX_BYTES + 1), _HINT)
    else:
        text = read_text(Path(name), _HINT)
    try:
        documents = list(yaml.safe_load_all(text))
    except RecursionError:
        raise _bad(f"the YAML of {name} has too many levels of lists and tables") from None
    except (yaml.YAMLError, ValueError) as error:
        # ValueError: the YAML contains an impossible date or number
        raise _bad(f"{name} is not YAML: {str(error).splitlines()[0]}") from None
    for number, document in enumerate(documents, start=1):
        if not isinstance(document, dict | None):
            raise _bad(f"document {number} of {name} is no manifest: it has no keys")
    return documents


def convert_document(document: Any, target: str, card_bytes: int | None, say: Say) -> None:  # noqa: ANN401
    """Converts one manifest in place, of any kind that contains pods; other manifests stay unchanged."""
    for item in document.get("items") or [] if isinstance(document, dict) else []:
        convert_document(item, target, card_bytes, say)
    for metadata, spec in _pods(document):
        _convert_pod(metadata, spec, target, card_bytes, say)


def _pods(document: Any) -> Iterator[tuple[Json, Json]]:  # noqa: ANN401
    """Yields metadata and spec of each pod or pod template in a manifest."""
    if not isinstance(document, dict):
        return
    spec = document.get("spec")
    if not isinstance(spec, dict):
        return
    if isinstance(spec.get("containers"), list):
        yield document.get("metadata") or {}, spec
    for key in ("template", "jobTemplate"):
        yield from _pods(spec.get(key))


def _convert_pod(metadata: Json, spec: Json, target: str, card_bytes: int | None, say: Say) -> None:
    name = metadata.get("name") or "a pod template"
    annotations = metadata.get("annotations") or {}
    containers = [*(spec.get("initContainers") or []), *spec["containers"]]
    wanting = [(c, want) for c in containers if (want := _take_want(c, card_bytes)) is not None]
    words = _take_annotations(annotations, name, say)
    if "annotations" in metadata and not annotations:
        del metadata["annotations"]
    if spec.get("schedulerName") == _SCHEDULER:
        del spec["schedulerName"]
    for container, want in wanting:
        place = f"{name}, container {container.get('name', '?')}"
        if target == "runtime":
            _ask_runtime(container, want, words)
        else:
            _ask_kubelet(container, want, words, place, say)
        _take_environment(container, place, say)
    if wanting and target == "runtime":
        spec["runtimeClassName"] = RUNTIME_CLASS
        say(f"{name}: the scheduler does not count what a runtime class hands out; see --to kubelet")


def _take_want(container: Json, card_bytes: int | None) -> Want | None:
    """Removes HAMi's resources from the container and returns them; None if there is no other than the
    priority. Limits override requests, as for all extended resources.
    """
    resources = container.get("resources") or {}
    found: dict[str, int] = {}
    for part in ("requests", "limits"):
        table = resources.get(part) or {}
        found |= {key: _number(key, table.pop(key)) for key in _RESOURCES if key in table}
        if part in resources and not table:
            del resources[part]
    if "resources" in container and not resources:
        del container["resources"]
    if not found.keys() - {_PRIORITY}:
        return None
    memory = found[_MEMORY] * MIB if found.get(_MEMORY) else None
    percent = found.get(_PERCENT, 0)
    if memory is None and 0 < percent < 100:
        if card_bytes is None:
            raise VgpuError(
                ErrorCode.BAD_REQUEST,
                f"{_PERCENT}: {percent} is a part of a card whose size is not known",
                "give it with --card-memory, as in --card-memory 80GiB",
            )
        memory = card_bytes * percent // 100 // MIB * MIB
    cores = found.get(_CORES) or None
    return Want(found.get(_COUNT) or 1, memory, cores)


def _number(key: str, value: object) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not (text.isascii() and text.isdigit()):
        raise _bad(f"{key} is {text!r}, which is no whole number")
    return int(text)


def _take_annotations(annotations: Json, name: str, say: Say) -> dict[str, str]:
    """HAMi's annotations as settings of vgpud, by key. Removes them from `annotations`."""
    words = {}
    if "nvidia.com/use-gputype" in annotations:
        types = [part.strip() for part in str(annotations.pop("nvidia.com/use-gputype")).split(",")]
        words["DEVICE_NAME"] = f"*{types[0]}*"
        if len(types) > 1:
            say(f"{name}: of the types {', '.join(types)} only {types[0]} is kept; one pattern is taken")
    if "nvidia.com/use-gpuuuid" in annotations:
        words["DEVICE"] = str(annotations.pop("nvidia.com/use-gpuuuid")).replace(" ", "")
    if "nvidia.com/vgpu-mode" in annotations:
        mode = str(annotations.pop("nvidia.com/vgpu-mode"))
        if mode not in _MODES:
            raise _bad(f"nvidia.com/vgpu-mode is {mode!r}, none of {', '.join(_MODES)}")
        words["ISOLATION"] = _MODES[mode]
    for key, instead in _DROPPED_ANNOTATIONS.items():
        if annotations.pop(key, None) is not None:
            say(f"{name}: {key} is left out: {instead}")
    return words


def _take_environment(container: Json, place: str, say: Say) -> None:
    entries = container.get("env") or []
    for entry in [e for e in entries if e.get("name") in _DROPPED_ENVIRONMENT]:
        entries.remove(entry)
        say(f"{place}: {entry['name']} is left out: vgpud heeds no such variable")
    if "env" in container and not entries:
        del container["env"]


def _ask_runtime(container: Json, want: Want, words: dict[str, str]) -> None:
    """Writes the request as environment variables of the container, which vgpu-runtime reads. So each
    container of a pod can have its own request.
    """
    asked = dict(words)
    if want.memory_bytes is None and want.cores is None and "ISOLATION" not in asked:
        # a HAMi request without limits means all of the card's memory and compute
        asked["ISOLATION"] = "device"
    if want.memory_bytes is not None:
        asked["MEMORY"] = format_bytes(want.memory_bytes)
    if want.cores is not None:
        asked["CORES"] = str(want.cores)
    if want.slices > 1:
        asked["COUNT"] = str(want.slices)
    env = copy.deepcopy(container.get("env") or [])
    env += [{"name": f"VGPU_{key}", "value": value} for key, value in asked.items()]
    container["env"] = env


def _ask_kubelet(container: Json, want: Want, words: dict[str, str], place: str, say: Say) -> None:
    """Writes HAMi's request as one extended resource of vgpud (docs/kubernetes.md): memory in GiB, or whole
    cards if it names no memory.
    """
    if want.cores is not None:
        say(f"{place}: {want.cores} cores are left out: an extended resource has one amount only; see DRA")
    for key in words:
        say(f"{place}: the choice of {key.lower().replace('_', ' ')} is left out; use labels of nodes")
    if want.memory_bytes is None:
        name, amount = "vgpud.io/gpu", want.slices
    else:
        name, amount = "vgpud.io/memory-gib", -(-want.memory_bytes // GIB) * want.slices
        if want.memory_bytes % GIB:
            say(f"{place}: {format_bytes(want.memory_bytes)} is rounded up to whole GiB")
        if want.slices > 1:
            say(f'{place}: {want.slices} slices come from as many cards only with across = "even"')
    limits = container.setdefault("resources", {}).setdefault("limits", {})
    limits[name] = amount


def _bad(sentence: str) -> VgpuError:
    return VgpuError(ErrorCode.BAD_REQUEST, sentence, _HINT)
