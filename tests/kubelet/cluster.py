"""The API server and the scheduler of Kubernetes, as far as one node's DRA driver sees them.

ResourceSlices are checked against the published definition of resource.k8s.io/v1 (types.go and its
validation): every field is known, and every limit is kept. The scheduler allocates like the upstream one: it
never overdraws partition counters, and rounds shared capacity up as the request policy says.
"""

import asyncio
import itertools
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

from vgpud.model.errors import ErrorCode
from vgpud.serve.dra.api import Refusal
from vgpud.serve.dra.quantity import parse

DRIVER = "gpu.vgpud.io"
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
QUALIFIED = re.compile(r"([a-z0-9][a-z0-9.-]{0,62}/)?[A-Za-z_][A-Za-z0-9_]{0,31}")
SEMVER = re.compile(r"(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)")
EFFECTS = ("None", "NoSchedule", "NoExecute")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTPE]i|[mkMGTPE])?")


class Invalid(Exception):
    pass


def known(value: dict[str, Any], *fields: str) -> None:
    extra = value.keys() - set(fields)
    if extra:
        raise Invalid(f"unknown fields {sorted(extra)}")


def check(condition: object, sentence: str) -> None:
    if not condition:
        raise Invalid(sentence)


def check_slice(body: dict[str, Any], minor: int) -> None:
    known(body, "apiVersion", "kind", "metadata", "spec")
    check(body["apiVersion"] == "resource.k8s.io/v1" and body["kind"] == "ResourceSlice", "kind")
    check(SUBDOMAIN.fullmatch(body["metadata"]["name"]), "name of the slice")
    spec = body["spec"]
    known(spec, "driver", "pool", "nodeName", "devices", "sharedCounters")
    check(SUBDOMAIN.fullmatch(spec["driver"]) and len(spec["driver"]) <= 63, "driver")
    known(spec["pool"], "name", "generation", "resourceSliceCount")
    check(spec["pool"]["resourceSliceCount"] > 0 and spec["pool"]["generation"] >= 0, "pool")
    devices, sets = spec.get("devices") or [], spec.get("sharedCounters") or []
    if minor >= 35:
        check(not (devices and sets), "only one of `sharedCounters` or `devices` is allowed")
    check(len(sets) <= 8, "counter sets")
    check(len({one["name"] for one in sets}) == len(sets), "names of counter sets")
    for one in sets:
        known(one, "name", "counters")
        check(LABEL.fullmatch(one["name"]), f"counter set {one['name']}")
        check_counters(one["counters"])
    if minor < 35:
        total = sum(len(one["counters"]) for one in sets)
        check(total <= 32, f"the total number of shared counters must not exceed 32: {total}")
    advanced = any(device.get("consumesCounters") or device.get("taints") for device in devices)
    check(len(devices) <= (64 if advanced else 128), f"{len(devices)} devices")
    check(len({device["name"] for device in devices}) == len(devices), "names of devices")
    for device in devices:
        check_device(device)
        if minor < 35:
            names = {one["name"] for one in sets}
            used = {one["counterSet"] for one in device.get("consumesCounters") or ()}
            check(used <= names, "counters of another slice")


def copied(body: dict[str, Any]) -> dict[str, Any]:
    """A copy by way of JSON, as the API server makes it, and faster than deepcopy."""
    made: dict[str, Any] = json.loads(json.dumps(body))
    return made


def check_counters(counters: dict[str, Any]) -> None:
    check(0 < len(counters) <= 32, f"{len(counters)} counters")
    for name, counter in counters.items():
        known(counter, "value")
        check(LABEL.fullmatch(name) and QUANTITY.fullmatch(counter["value"]), f"counter {name}")


def check_device(device: dict[str, Any]) -> None:
    known(device, "name", "attributes", "capacity", "consumesCounters", "allowMultipleAllocations", "taints")
    check(len(device.get("taints") or ()) <= 4, "taints of a device")
    for taint in device.get("taints") or ():
        known(taint, "key", "value", "effect", "timeAdded")
        check(QUALIFIED.fullmatch(taint["key"]) and taint["effect"] in EFFECTS, f"taint {taint}")
    check(LABEL.fullmatch(device["name"]), f"name of device {device['name']}")
    attributes, capacity = device.get("attributes") or {}, device.get("capacity") or {}
    check(len(attributes) + len(capacity) <= 32, "attributes and capacities")
    for name, value in attributes.items():
        check(QUALIFIED.fullmatch(name), f"attribute {name}")
        check(len(value) == 1, f"attribute {name} has {len(value)} values")
        known(value, "int", "bool", "string", "version")
        for kind, content in value.items():
            if kind in ("string", "version"):
                check(len(content) <= 64, f"attribute {name} is long")
            check(kind != "version" or SEMVER.fullmatch(content), f"version {content}")
    for name, one in capacity.items():
        check(QUALIFIED.fullmatch(name) and QUANTITY.fullmatch(one["value"]), f"capacity {name}")
        known(one, "value", "requestPolicy")
        if "requestPolicy" in one:
            check(device.get("allowMultipleAllocations") is True, "a policy without several allocations")
            check_policy(one["requestPolicy"], parse(one["value"]))
    consumed = device.get("consumesCounters") or []
    check(len(consumed) <= 2, "counter sets of a device")
    for one in consumed:
        known(one, "counterSet", "counters")
        check_counters(one["counters"])


def check_policy(policy: dict[str, Any], value: int) -> None:
    known(policy, "default", "validValues", "validRange")
    check(not ("validValues" in policy and "validRange" in policy), "two kinds of valid values")
    default = parse(policy["default"])
    if "validValues" in policy:
        values = [parse(text) for text in policy["validValues"]]
        check(len(values) <= 10 and values == sorted(values) and default in values, "valid values")
        check(values[-1] <= value, "a valid value above the capacity")
    if "validRange" in policy:
        known(policy["validRange"], "min", "max", "step")
        low, high, step = (parse(policy["validRange"][key]) for key in ("min", "max", "step"))
        check(0 <= low <= default <= high <= value, "range")
        check((high - low) % step == 0 and (default - low) % step == 0, "step")
        check(low + step <= value, "a step above the capacity")


def check_statuses(status: dict[str, Any]) -> None:
    """Asserts that each entry belongs to an allocated device and has the fields that a condition needs
    (validation.go).
    """
    key = ("driver", "pool", "device", "shareID")
    given = [tuple(one.get(k) for k in key) for one in status["allocation"]["devices"]["results"]]
    told = [tuple(one.get(k) for k in key) for one in status.get("devices") or ()]
    check(len(set(told)) == len(told) and set(told) <= set(given), f"{told} are not of {given}")
    for one in status.get("devices") or ():
        known(one, *key, "conditions", "data")
        for condition in one["conditions"]:
            known(condition, "type", "status", "reason", "message", "lastTransitionTime")
            check(condition["status"] in ("True", "False", "Unknown"), "status of a condition")
            check(re.fullmatch(r"[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?", condition["reason"]), "reason")
            check(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", condition["lastTransitionTime"]), "time")


class Cluster:
    """A cluster with Kubernetes 1.`minor`. `off` names the disabled feature gates, whose fields are dropped
    silently, as the API server does.
    """

    def __init__(self, minor: int = 36) -> None:
        self.minor_version = minor
        self.off: set[str] = set()
        self.slices_by_name: dict[str, dict[str, Any]] = {}
        self.claims: dict[tuple[str, str], dict[str, Any]] = {}
        self.requests: list[str] = []
        self.fail = 0  # if not 0, every call fails with this HTTP status
        self.refuses_watches = False
        self.version = 0  # the resourceVersion of the last change of a slice
        self._uids = itertools.count(1)

    # --- calls of a driver

    def _called(self, what: str) -> None:
        self.requests.append(what)
        if self.fail:
            raise refusal(self.fail, "told to")

    async def minor(self) -> int:
        self._called("version")
        return self.minor_version

    async def node(self, name: str) -> dict[str, Any]:
        self._called(f"node {name}")
        return {"name": name, "uid": f"uid-of-{name}"}

    async def claim(self, namespace: str, name: str) -> dict[str, Any]:
        self._called(f"claim {namespace}/{name}")
        if (namespace, name) not in self.claims:
            raise refusal(404, "no such claim")
        return copied(self.claims[namespace, name])

    async def replace_claim_status(self, body: dict[str, Any]) -> dict[str, Any]:
        about = body["metadata"]
        self._called(f"status {about['namespace']}/{about['name']}")
        there = self.claims.get((about["namespace"], about["name"]))
        if there is None:
            raise refusal(404, "no such claim")
        try:
            check_statuses(body["status"])
        except Invalid as error:
            raise refusal(422, str(error)) from None
        there["status"] = copied(body["status"])
        if "DRAResourceClaimDeviceStatus" in self.off:
            there["status"].pop("devices", None)
        return copied(there)

    async def slices(self, driver: str, node: str) -> tuple[list[dict[str, Any]], str]:
        self._called("list")
        mine = (s for s in self.slices_by_name.values() if s["spec"]["driver"] == driver)
        return [copied(s) for s in mine if s["spec"]["nodeName"] == node], str(self.version)

    async def watch_slices(self, driver: str, node: str, version: str) -> None:
        if self.refuses_watches:
            raise refusal(403, "watch is not allowed")
        while self.version == int(version):
            await asyncio.sleep(0.01)

    async def create_slice(self, body: dict[str, Any], dry_run: bool = False) -> dict[str, Any]:
        self._called("ask" if dry_run else "create")
        if body["metadata"]["name"] in self.slices_by_name:
            raise refusal(409, "already exists")
        if not dry_run:
            return self._store(body)
        kept = self._kept(body)
        del kept["metadata"]["resourceVersion"]  # only stored objects have a resourceVersion
        return kept

    async def replace_slice(self, body: dict[str, Any]) -> dict[str, Any]:
        self._called("replace")
        old = self.slices_by_name.get(body["metadata"]["name"])
        if old is None:
            raise refusal(404, "no such slice")
        if old["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
            raise refusal(409, "the object has been modified")
        return self._store(body)

    async def delete_slice(self, name: str) -> None:
        self._called("delete")
        self.version += 1
        if self.slices_by_name.pop(name, None) is None:
            raise refusal(404, "no such slice")

    def wipe(self) -> None:
        """Deletes the slices of all drivers of the node, as a kubelet does at its start."""
        self.version += 1
        self.slices_by_name.clear()

    def _store(self, body: dict[str, Any]) -> dict[str, Any]:
        kept = self._kept(body)
        self.slices_by_name[kept["metadata"]["name"]] = kept
        return copied(kept)

    def _kept(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            check_slice(body, self.minor_version)
        except Invalid as error:
            raise refusal(422, str(error)) from None
        kept = copied(body)
        for device in kept["spec"].get("devices") or []:
            if "DRAPartitionableDevices" in self.off:
                device.pop("consumesCounters", None)
            if "DRAConsumableCapacity" in self.off:
                device.pop("allowMultipleAllocations", None)
                for one in (device.get("capacity") or {}).values():
                    one.pop("requestPolicy", None)
            if "DRADeviceTaints" in self.off:
                device.pop("taints", None)
            for taint in device.get("taints") or ():
                taint.setdefault("timeAdded", "2026-11-22T00:00:00Z")
        if "DRAPartitionableDevices" in self.off:
            kept["spec"].pop("sharedCounters", None)
        self.version += 1
        kept["metadata"]["resourceVersion"] = str(self.version)
        return kept

    # --- the scheduler

    def pool(self) -> tuple[list[dict[str, Any]], dict[str, dict[str, int]]]:
        """Devices and counter sets of the newest complete generation of the pool, in the scheduler's order.
        The scheduler reads ResourceSlices in the order of their names, and ignores a pool in which two
        devices have the same name.
        """
        specs = [self.slices_by_name[name]["spec"] for name in sorted(self.slices_by_name)]
        newest = max((spec["pool"]["generation"] for spec in specs), default=0)
        specs = [spec for spec in specs if spec["pool"]["generation"] == newest]
        if not specs or len(specs) != specs[0]["pool"]["resourceSliceCount"]:
            return [], {}
        devices = [device for spec in specs for device in spec.get("devices") or ()]
        if len({device["name"] for device in devices}) < len(devices):
            return [], {}
        sets = {
            one["name"]: {name: parse(c["value"]) for name, c in one["counters"].items()}
            for spec in specs
            for one in spec.get("sharedCounters") or ()
        }
        return devices, sets

    def results(self) -> list[dict[str, Any]]:
        return [
            result
            for claim in self.claims.values()
            for result in claim["status"]["allocation"]["devices"]["results"]
        ]

    def fits(self, device: dict[str, Any], asked: dict[str, str]) -> dict[str, str] | None:
        """The capacity that a request for the device would consume; None if the request does not fit."""
        devices, sets = self.pool()
        taken = self.results()
        own = [result for result in taken if result["device"] == device["name"]]
        several = device.get("allowMultipleAllocations", False)
        if own and not several:
            return None
        by_name = {one["name"]: one for one in devices}
        if not own:
            for need in device.get("consumesCounters") or ():
                left = dict(sets[need["counterSet"]])
                for name in {result["device"] for result in taken} & by_name.keys():
                    for used in by_name[name].get("consumesCounters") or ():
                        if used["counterSet"] == need["counterSet"]:
                            for key, counter in used["counters"].items():
                                left[key] -= parse(counter["value"])
                if any(left.get(key, 0) < parse(c["value"]) for key, c in need["counters"].items()):
                    return None
        consumed = {}
        for name, one in device["capacity"].items():
            amount = consume(one, asked.get(name), several)
            if amount is None:
                return None
            used_up = sum(parse(result.get("consumedCapacity", {}).get(name, "0")) for result in own)
            if amount + used_up > parse(one["value"]):
                return None
            consumed[name] = str(amount)
        return consumed if several else {}

    def allocate(
        self,
        name: str,
        kind: str,
        capacity: dict[str, str] | None = None,
        count: int = 1,
        config: list[dict[str, Any]] | None = None,
        request: str = "gpu",
        among: Any = lambda device: True,
        pod: str = "",
    ) -> dict[str, Any] | None:
        """Allocates a claim in namespace "ns" for devices of a type. Takes the first devices that fit, in the
        order of the list. Returns None if the node has no room.
        """
        results: list[dict[str, Any]] = []
        uid = f"{next(self._uids):08d}-0000-4000-8000-000000000000"
        claim: dict[str, Any] = {
            "metadata": {"namespace": "ns", "name": name, "uid": uid},
            "status": {"allocation": {"devices": {"results": results, "config": config or []}}},
        }
        if pod:
            claim["status"]["reservedFor"] = [{"resource": "pods", "name": pod, "uid": f"uid-of-{pod}"}]
        for device in self.pool()[0]:
            if device["attributes"]["type"]["string"] != kind or len(results) == count or not among(device):
                continue
            if any(taint["effect"] != "None" for taint in device.get("taints") or ()):
                continue
            consumed = self.fits(device, capacity or {})
            if consumed is not None:
                result = {"request": request, "driver": DRIVER, "pool": "node-1", "device": device["name"]}
                if consumed:
                    result |= {"consumedCapacity": consumed, "shareID": f"share-{uid}"}
                results.append(result)
        if len(results) < count:
            return None
        self.claims["ns", name] = claim
        return claim

    def watch(self, name: str) -> dict[str, Any]:
        """Allocates a claim with admin access to all devices, even those that other claims hold (KEP-5018).
        As the scheduler of 1.36.2 does, refuses a shared device that lacks the requested capacity.
        """
        claim = self.allocate(name, "quota", among=lambda _: False, count=0) or {}
        for one in self.pool()[0]:
            shared = one.get("allowMultipleAllocations", False)
            assert not shared or self.fits(one, {"memory": "2Mi"}) is not None, f"{one['name']} is full"
        claim["status"]["allocation"]["devices"]["results"] += [
            {"request": "all", "driver": DRIVER, "pool": "node-1", "device": one["name"], "adminAccess": True}
            for one in self.pool()[0]
        ]
        return claim


def consume(capacity: dict[str, Any], asked: str | None, several: bool) -> int | None:
    """The amount that a request consumes, or None if it asks for too much. A device that is not shared is
    consumed as a whole. Otherwise the request policy rounds the requested amount; without a policy it is not
    rounded.
    """
    value, policy = parse(capacity["value"]), capacity.get("requestPolicy")
    if not several:
        return value if asked is None or parse(asked) <= value else None
    if policy is None:
        return value if asked is None else parse(asked)
    amount = parse(policy["default"] if asked is None else asked)
    if "validValues" in policy:
        return next((v for v in map(parse, policy["validValues"]) if v >= amount), None)
    low, high, step = (parse(policy["validRange"][key]) for key in ("min", "max", "step"))
    amount = max(amount, low)
    amount = low + -(-(amount - low) // step) * step
    return amount if amount <= high else None


def refusal(status: int, words: str) -> Refusal:
    return Refusal(ErrorCode.CLUSTER_REFUSED, f"the API server answers {status}: {words}", "", status=status)


# --- the double of the API server over HTTP, for the official client


def _answer(handler: BaseHTTPRequestHandler, work: Any, done: int) -> None:
    try:
        body, status = asyncio.run(work), done
    except Refusal as error:
        body, status = {"kind": "Status", "message": error.sentence}, error.status
    data = json.dumps(body or {}).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def _handler(cluster: Cluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def _body(self) -> dict[str, Any]:
            found: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            return found

        def do_GET(self) -> None:
            url = urlparse(self.path)
            words = url.path.strip("/").split("/")
            if words == ["version"]:
                version = {"major": "1", "minor": f"{cluster.minor_version}+"}
                rest = ("gitVersion", "gitCommit", "gitTreeState", "buildDate", "goVersion", "compiler")
                full = {**version, **dict.fromkeys((*rest, "platform"), "x")}
                _answer(self, _now(full), 200)
            elif words[:3] == ["api", "v1", "nodes"]:
                _answer(self, _node(cluster, words[3]), 200)
            elif words[-1] == "resourceslices":
                asked = parse_qs(url.query)
                chosen = dict(field.split("=") for field in asked["fieldSelector"][0].split(","))
                of = (chosen["spec.driver"], chosen["spec.nodeName"])
                if asked.get("watch"):
                    _answer(self, _event(cluster, *of, asked["resourceVersion"][0]), 200)
                else:
                    _answer(self, _listed(cluster, *of), 200)
            else:
                _answer(self, cluster.claim(words[4], words[6]), 200)

        def do_POST(self) -> None:
            asked = parse_qs(urlparse(self.path).query)
            _answer(self, cluster.create_slice(self._body(), asked.get("dryRun") == ["All"]), 201)

        def do_PUT(self) -> None:
            work = cluster.replace_claim_status if self.path.endswith("/status") else cluster.replace_slice
            _answer(self, work(self._body()), 200)

        def do_DELETE(self) -> None:
            _answer(self, cluster.delete_slice(self.path.rpartition("/")[2]), 200)

    return Handler


def _kubeconfig(port: int) -> str:
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
        }
    )


class HttpCluster:
    """The cluster on a loopback port. `kubeconfig` is the text of a kubeconfig file for it."""

    def __init__(self, cluster: Cluster) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(cluster))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.kubeconfig = _kubeconfig(self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


async def _now(value: dict[str, Any]) -> dict[str, Any]:
    return value


async def _node(cluster: Cluster, name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Node", "metadata": await cluster.node(name)}


async def _listed(cluster: Cluster, driver: str, node: str) -> dict[str, Any]:
    items, version = await cluster.slices(driver, node)
    return {"kind": "ResourceSliceList", "metadata": {"resourceVersion": version}, "items": items}


async def _event(cluster: Cluster, driver: str, node: str, version: str) -> dict[str, Any]:
    await cluster.watch_slices(driver, node, version)
    changed = {"kind": "ResourceSlice", "metadata": {"resourceVersion": str(cluster.version)}}
    return {"type": "MODIFIED", "object": changed}
