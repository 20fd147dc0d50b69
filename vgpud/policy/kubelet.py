"""The tables [kubelet] and [dra] of the policy: how the node's GPUs are offered to Kubernetes."""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from vgpud.model.quantity import GIB, MIB, format_bytes
from vgpud.policy.fields import Match, MemoryBytes, PolicyTable, wrong


class DraSettings(PolicyTable):
    """The table [dra]. Each card is published in the form that its [[device]] rule allows."""

    enabled: bool = Field(
        False, description="whether cards are published to the cluster, and claims on them prepared"
    )
    auto: Literal["quota", "compute", "hardware", "device"] = Field(
        "quota",
        description="how cards of mode auto are published: quota and compute as memory to share, limited by "
        "libvgpu or by MPS; hardware as MIG instances; device whole",
    )
    check_seconds: float = Field(
        30.0,
        ge=0.2,
        le=3600.0,
        description="interval of checks that the cluster still has the published cards and the held claims",
    )


MAX_RESOURCES = 64
# Smallest unit of memory: an H200 has 564 units of this size, and the kubelet gets all of them at each
# change.
MIN_UNIT_BYTES = 256 * MIB

_PROFILE = "{profile}"
# Pattern of a resource name: a DNS subdomain, a slash and a label of up to 63 characters (Kubernetes,
# extended resources).
_NAME = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9_.-]*(\{profile\})?[A-Za-z0-9_.-]*)$"


def _name(value: str) -> str:
    if not re.fullmatch(_NAME, value):
        raise wrong(f"{value[:64]!r} is not the name of a resource", 'write it as in "example.com/gpu"')
    domain, _, bare = value.partition("/")
    if domain == "kubernetes.io" or domain.endswith(".kubernetes.io"):
        raise wrong(f"{value[:64]!r} is in the domain of Kubernetes itself", "use a domain of your own")
    if len(bare.replace(_PROFILE, "")) > 63 or len(domain) > 253:
        sentence = f"a name of {len(domain)} and {len(bare)} characters is too long"
        raise wrong(sentence, "at most 253 may stand before the slash, and 63 after it")
    return value


ResourceName = Annotated[str, AfterValidator(_name), WithJsonSchema({"type": "string", "pattern": _NAME})]

MigProfiles = Annotated[
    tuple[str, ...],
    Field(strict=False, min_length=1),
    WithJsonSchema({"type": "array", "minItems": 1, "uniqueItems": True, "items": {"type": "string"}}),
]


class KubeletResource(PolicyTable):
    """One [[kubelet.resource]]: a name that pods request, and the meaning of one unit."""

    name: ResourceName = Field(
        description='as in resources.limits of a pod: "vgpud.io/gpu"; for kind mig it may hold {profile}',
    )
    kind: Literal["card", "mig", "part", "memory"] = Field(
        description="what one of it is: a whole card, a MIG instance, one of equal parts of a card, or an "
        "amount of a card's memory"
    )
    match: Match = Field(default_factory=Match, description="the devices that it covers; left out: all")
    profiles: MigProfiles | None = Field(
        None,
        description="kind mig: the profiles, each a resource of its own; left out, all that the cards have",
    )
    parts: int | None = Field(
        None, ge=2, le=64, description="kind part: the number of equal parts of memory of each card"
    )
    unit: MemoryBytes | None = Field(None, description="kind memory: the size of one unit; 1GiB if left out")
    isolation: Literal["quota", "compute"] = Field(
        "quota", description="kinds part and memory: quota is libvgpu's, compute is MPS's"
    )
    limit_compute: bool = Field(
        False, description="kinds part and memory: whether the share of compute is limited in proportion too"
    )
    across: Literal["refuse", "even"] = Field(
        "refuse",
        description="a container whose units the kubelet took from several cards: refuse refuses it, even "
        "accepts it if the kubelet took as many from each",
    )

    @property
    def unit_bytes(self) -> int:
        return GIB if self.unit is None else self.unit

    @model_validator(mode="after")
    def _keys_fit_kind(self) -> Self:
        stray = [
            key
            for key, kind in (("profiles", "mig"), ("parts", "part"), ("unit", "memory"))
            if getattr(self, key) is not None and self.kind != kind
        ]
        if stray:
            raise wrong(f"{stray[0]} is not allowed in a resource of kind {self.kind}", f"remove {stray[0]}")
        if self.kind == "part" and self.parts is None:
            raise wrong("a resource of kind part does not say into how many parts", "write parts = 4")
        if self.kind == "memory" and self.unit_bytes < MIN_UNIT_BYTES:
            least = format_bytes(MIN_UNIT_BYTES)
            raise wrong(f"a unit of {format_bytes(self.unit_bytes)} is too small", f"the least is {least}")
        return self

    @model_validator(mode="after")
    def _name_fits_kind(self) -> Self:
        if _PROFILE in self.name and self.kind != "mig":
            raise wrong(f"{{profile}} is not allowed in the name of kind {self.kind}", "it is for kind mig")
        if self.kind == "mig" and _PROFILE not in self.name and len(self.profiles or ()) != 1:
            raise wrong("several MIG profiles would have one name", f"write {_PROFILE} into the name")
        return self

    def name_of(self, profile: str) -> str:
        """The resource name for one MIG profile. Characters that Kubernetes forbids in names become dots
        (1g.18gb.me for 1g.18gb+me).
        """
        return self.name.replace(_PROFILE, re.sub(r"[^a-z0-9.-]", ".", profile.lower()))


class KubeletSettings(PolicyTable):
    """The table [kubelet]. vgpud serves the device plugin API only if there is a resource."""

    resource: tuple[KubeletResource, ...] = Field(
        (),
        strict=False,
        max_length=MAX_RESOURCES,
        description="resources for pods; without one, vgpud does not register with the kubelet",
    )
    inject: Literal["cdi", "edits"] = Field(
        "cdi",
        description="how a container gets its part: by the name of a CDI device (kubelet 1.28 and later), "
        "or as environment, mounts and device nodes",
    )
    release_seconds: float = Field(
        60.0,
        ge=1.0,
        le=86400.0,
        description="an allocation that no pod holds for this time, by the kubelet's PodResources API, is "
        "released",
    )
    check_seconds: float = Field(
        10.0, ge=0.2, le=3600.0, description="interval of asking the kubelet which pods hold what"
    )

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [resource.name for resource in self.resource]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise wrong(f"{names.count(twice)} resources have the name {twice}", "give each its own")
        return self
