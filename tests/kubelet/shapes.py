"""The fields of the Kubernetes objects that vgpud ships, with their types, as the Kubernetes APIs define
them.

The table is written by hand from the API reference. A field that is missing here has not been checked against
the reference.
"""

from collections.abc import Mapping
from typing import Any

Shape = Any  # a type, a list with the shape of its elements, a dict of shapes, or a Map

NAME = {"name": str}


class Map:
    """An object with any keys, whose values have one shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape


META = {"name": str, "namespace": str, "labels": Map(str), "annotations": Map(str)}
SELECTORS = [{"cel": {"expression": str}}]
CAPACITY = {"requests": Map(str)}
SUBREQUEST = {
    "name": str,
    "deviceClassName": str,
    "selectors": SELECTORS,
    "allocationMode": str,
    "count": int,
    "capacity": CAPACITY,
}
EXACTLY = {key: shape for key, shape in SUBREQUEST.items() if key != "name"} | {"adminAccess": bool}
OPAQUE = {"driver": str, "parameters": Map(object)}
CLAIM = {
    "devices": {
        "requests": [{"name": str, "exactly": EXACTLY, "firstAvailable": [SUBREQUEST]}],
        "constraints": [{"requests": [str], "matchAttribute": str, "distinctAttribute": str}],
        "config": [{"requests": [str], "opaque": OPAQUE}],
    }
}
CONTAINER = {
    "name": str,
    "image": str,
    "command": [str],
    "resources": {"limits": Map(int), "claims": [{"name": str, "request": str}]},
}
POD = {
    "restartPolicy": str,
    "containers": [CONTAINER],
    "initContainers": [CONTAINER],
    "resourceClaims": [{"name": str, "resourceClaimTemplateName": str, "resourceClaimName": str}],
}
RULE_OF_RESOURCES = {"apiGroups": [str], "apiVersions": [str], "resources": [str]}
RULE = {"apiGroups": [str], "resources": [str], "verbs": [str]}
SHAPES: dict[tuple[str, str], dict[str, Shape]] = {
    ("v1", "Namespace"): {},
    ("v1", "Pod"): {"spec": POD},
    ("rbac.authorization.k8s.io/v1", "ClusterRole"): {"rules": [{**RULE, "resourceNames": [str]}]},
    ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding"): {
        "roleRef": {"apiGroup": str, "kind": str, "name": str},
        "subjects": [{"apiGroup": str, "kind": str, "name": str, "namespace": str}],
    },
    ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy"): {
        "spec": {
            "failurePolicy": str,
            "matchConstraints": {"resourceRules": [{**RULE_OF_RESOURCES, "operations": [str]}]},
            "matchConditions": [{"name": str, "expression": str}],
            "variables": [{"name": str, "expression": str}],
            "validations": [{"expression": str, "message": str, "messageExpression": str, "reason": str}],
        }
    },
    ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding"): {
        "spec": {"policyName": str, "validationActions": [str]}
    },
    ("resource.k8s.io/v1", "DeviceClass"): {
        "spec": {"selectors": SELECTORS, "config": [{"opaque": OPAQUE}], "extendedResourceName": str}
    },
    ("resource.k8s.io/v1", "ResourceClaim"): {"spec": CLAIM},
    ("resource.k8s.io/v1", "ResourceClaimTemplate"): {"spec": {"metadata": META, "spec": CLAIM}},
}


def problems(document: Mapping[str, Any]) -> list[str]:
    """Returns the keys and values of an object that its API would reject."""
    kind = (str(document.get("apiVersion")), str(document.get("kind")))
    if kind not in SHAPES:
        return [f"{kind} is not known"]
    whole = {"apiVersion": str, "kind": str, "metadata": META, **SHAPES[kind]}
    return [*_against(document, whole, kind[1]), *_missing(document)]


def _missing(document: Mapping[str, Any]) -> list[str]:
    return [] if (document.get("metadata") or {}).get("name") else ["no name"]


def _against(value: Any, shape: Shape, path: str) -> list[str]:
    if isinstance(shape, Map):
        if not isinstance(value, Mapping):
            return [f"{path} is no object"]
        return [p for key, inner in value.items() for p in _against(inner, shape.shape, f"{path}.{key}")]
    if isinstance(shape, dict):
        if not isinstance(value, Mapping):
            return [f"{path} is no object"]
        unknown = [f"{path}.{key} is not known" for key in value.keys() - shape.keys()]
        known = [key for key in value if key in shape]
        return unknown + [p for key in known for p in _against(value[key], shape[key], f"{path}.{key}")]
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{path} is no list"]
        return [p for i, inner in enumerate(value) for p in _against(inner, shape[0], f"{path}[{i}]")]
    return [] if isinstance(value, shape) else [f"{path} is {value!r}, not {shape.__name__}"]
