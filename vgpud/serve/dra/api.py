"""Calls the Kubernetes API server by the official Python client, which is imported only here and only when
needed.

Objects are exchanged as plain data, so that any version of the client with support for custom objects works,
even if it lacks resource.k8s.io.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.serve.dra.slices import GROUP, VERSION, Json
from vgpud.threads import DaemonThreads

_TIMEOUT_SECONDS = 10.0
# time after which the API server ends a watch; the connection is given up if the server is silent for longer
_WATCH_SECONDS = 300
_SLICES, _CLAIMS = "resourceslices", "resourceclaims"


@dataclass(unsafe_hash=True)
class Refusal(VgpuError):
    """An error reply of the API server, with its HTTP status."""

    status: int = 0


class Api(Protocol):
    """The calls to the API server that vgpud needs. All raise VgpuError: UNREACHABLE, a Refusal
    (CLUSTER_REFUSED), UNSUPPORTED without the Python client, BAD_SETTING for a bad kubeconfig.
    """

    async def minor(self) -> int:
        """The minor number of the API server's version 1.x; 0 if it is not known."""
        ...

    async def claim(self, namespace: str, name: str) -> Json: ...

    async def replace_claim_status(self, body: Json) -> Json:
        """Writes the status of a claim that was read, and returns the claim as the server has it."""
        ...

    async def node(self, name: str) -> Json: ...

    async def slices(self, driver: str, node: str) -> tuple[list[Json], str]:
        """Lists a node's slices of a driver. Returns them, and the list's resourceVersion."""
        ...

    async def watch_slices(self, driver: str, node: str, version: str) -> None:
        """Returns after the first change of these slices since the list with that resourceVersion, or after
        some minutes without a change.
        """
        ...

    async def create_slice(self, body: Json, dry_run: bool = False) -> Json:
        """Creates a ResourceSlice and returns it as the server has it. With `dry_run`, nothing is stored."""
        ...

    async def replace_slice(self, body: Json) -> Json: ...

    async def delete_slice(self, name: str) -> None: ...


def is_gone(error: VgpuError) -> bool:
    return isinstance(error, Refusal) and error.status == 404


class ApiServer:
    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        self._client: Any = None

    async def minor(self) -> int:
        code = await self._call(lambda k: k.VersionApi(self._client).get_code)
        digits = re.match(r"[0-9]{1,9}", str(getattr(code, "minor", "")))
        return int(digits[0]) if digits else 0

    async def claim(self, namespace: str, name: str) -> Json:
        return await self._objects("get_namespaced_custom_object", namespace, _CLAIMS, name)

    async def replace_claim_status(self, body: Json) -> Json:
        about = body["metadata"]
        return await self._objects(
            "replace_namespaced_custom_object_status", about["namespace"], _CLAIMS, about["name"], body
        )

    async def node(self, name: str) -> Json:
        found = await self._call(lambda k: k.CoreV1Api(self._client).read_node, name)
        about = getattr(found, "metadata", None)
        named = {key: getattr(about, key, None) for key in ("name", "uid")}
        if not all(isinstance(text, str) for text in named.values()):
            raise _not_understood("a node without name and uid")
        return named

    async def slices(self, driver: str, node: str) -> tuple[list[Json], str]:
        listed = await self._objects(
            "list_cluster_custom_object", _SLICES, field_selector=_selector(driver, node)
        )
        items = listed.get("items")
        if not isinstance(items, list) or not all(map(_is_slice, items)):
            raise _not_understood("a list that is not of ResourceSlices")
        return items, str(listed.get("metadata", {}).get("resourceVersion", ""))

    async def watch_slices(self, driver: str, node: str, version: str) -> None:
        def pick(k: Any) -> Any:  # noqa: ANN401
            return partial(_first_event, k.CustomObjectsApi(self._client).list_cluster_custom_object)

        options: Json = {"field_selector": _selector(driver, node), "resource_version": version}
        options |= {"timeout_seconds": _WATCH_SECONDS, "_request_timeout": _WATCH_SECONDS + _TIMEOUT_SECONDS}
        await self._call(pick, GROUP, VERSION, _SLICES, **options)

    async def create_slice(self, body: Json, dry_run: bool = False) -> Json:
        options = {"dry_run": "All"} if dry_run else {}
        answer = await self._objects("create_cluster_custom_object", _SLICES, body, **options)
        return _slice(answer, stored=not dry_run)

    async def replace_slice(self, body: Json) -> Json:
        name = body["metadata"]["name"]
        return _slice(await self._objects("replace_cluster_custom_object", _SLICES, name, body))

    async def delete_slice(self, name: str) -> None:
        await self._objects("delete_cluster_custom_object", _SLICES, name)

    async def _objects(self, method: str, *arguments: Any, **options: Any) -> Json:  # noqa: ANN401
        answer: Json = await self._call(
            lambda k: getattr(k.CustomObjectsApi(self._client), method), GROUP, VERSION, *arguments, **options
        )
        if not isinstance(answer, dict) or not isinstance(answer.get("metadata", {}), dict):
            raise _not_understood("a value that is not an object")
        return answer

    async def _call(self, pick: Callable[[Any], Any], *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        # a separate daemon thread, because the end of vgpud must not wait for the server
        return await asyncio.get_running_loop().run_in_executor(
            DaemonThreads("vgpud-cluster"), self._call_now, pick, arguments, options
        )

    def _call_now(self, pick: Callable[[Any], Any], arguments: tuple[Any, ...], options: Json) -> Any:  # noqa: ANN401
        kubernetes = self._connect()
        try:
            return pick(kubernetes)(*arguments, **{"_request_timeout": _TIMEOUT_SECONDS, **options})
        except kubernetes.ApiException as error:
            if error.status == 401:
                # the next call reads the kubeconfig again, because its token or certificate may have changed
                self._client = None
            raise _refused(error.status or 0, str(error.reason), str(error.body or "")) from None
        except Exception as error:  # urllib3, ssl and socket raise errors that the client does not wrap
            words = str(error).splitlines() or [type(error).__name__]
            raise VgpuError(
                ErrorCode.UNREACHABLE,
                f"no answer from the API server: {words[0][:200]}",
                "check the server's address and certificate in the kubeconfig",
            ) from None

    def _connect(self) -> Any:  # noqa: ANN401
        try:
            from kubernetes import client, config
        except ImportError:
            raise VgpuError(
                ErrorCode.UNSUPPORTED,
                "dra is enabled and the Python package kubernetes is not installed",
                "install vgpud[dra], or set dra.enabled = false",
            ) from None
        if self._client is None:
            try:
                self._client = config.new_client_from_config(config_file=str(self._kubeconfig))
            except Exception as error:
                # reading the configuration raises errors of yaml, of files, and the client's ConfigException
                raise VgpuError(
                    ErrorCode.BAD_SETTING,
                    f"{self._kubeconfig} is not a usable kubeconfig: {str(error)[:200]}",
                    "set VGPUD_KUBECONFIG to that of vgpud's service account",
                ) from None
        return client


def _selector(driver: str, node: str) -> str:
    return f"spec.driver={driver},spec.nodeName={node}"


def _first_event(listing: Callable[..., Any], *arguments: str, **options: Any) -> None:  # noqa: ANN401
    """Waits for the first event of a watch, or for the watch's end."""
    from kubernetes import watch

    next(watch.Watch().stream(listing, *arguments, **options), None)


def _is_slice(value: object, stored: bool = True) -> bool:
    """Does the object have the fields that the publisher reads? Other fields are only compared. An object
    that is not stored has no resourceVersion.
    """
    match value:
        case {
            "metadata": {"name": str()} as metadata,
            "spec": {"pool": {"generation": int()}} as spec,
        }:
            if stored and not isinstance(metadata.get("resourceVersion"), str):
                return False
            parts = (spec.get("devices") or [], spec.get("sharedCounters") or [])
            return all(
                isinstance(part, list) and all(isinstance(one, dict) for one in part) for part in parts
            )
    return False


def _slice(answer: Json, stored: bool = True) -> Json:
    if not _is_slice(answer, stored):
        raise _not_understood("an object that is not a ResourceSlice")
    return answer


def _not_understood(what: str) -> VgpuError:
    return VgpuError(
        ErrorCode.UNREACHABLE,
        f"the API server answers with {what}",
        "see whether the kubeconfig names an API server",
    )


def _refused(status: int, reason: str, body: str) -> Refusal:
    hints = {
        401: "renew the token in vgpud's kubeconfig",
        403: "apply configs/kubernetes/rbac.yaml, and use a token of the service account named as the node",
        404: "resource.k8s.io/v1 is there from Kubernetes 1.34 on",
        409: "vgpud tries again",
    }
    said = " ".join(f"{reason} {body}".split())[:400]
    sentence = f"the API server answers {status}: {said}"
    return Refusal(
        ErrorCode.CLUSTER_REFUSED, sentence, hints.get(status, "see the API server's log"), status=status
    )
