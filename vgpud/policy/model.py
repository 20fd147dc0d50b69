"""The typed policy: the administrator's rules for each device.

Quantities are written as in "4GiB"; every key is checked, and unknown keys are refused. The values are plain
data; only `Match.covers` (fields.py) compares them with a device.
"""

import re
from ipaddress import ip_address
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from vgpud.model.caller import BARE, Account
from vgpud.model.device import Device
from vgpud.model.tenancy import ANYONE, Mode
from vgpud.policy.fields import Match, MemoryBytes, PolicyTable, Seconds, wrong
from vgpud.policy.kubelet import DraSettings, KubeletResource, KubeletSettings
from vgpud.policy.remote import RemoteSettings

# The modes that have a table of settings in a [[device]] rule.
MODES_WITH_SETTINGS = ("preload", "mps", "mig", "exclusive")

# Maximum of rules, which bounds the comparison of each rule with each other. No node has nearly as many
# devices.
MAX_RULES = 256

# Profile names of NVML on data-centre and workstation cards: 1g.18gb, 1g.18gb+me, 1g.24gb-me.
_PROFILE = r"^([1-9]c\.)?[1-9][0-9]*g\.[1-9][0-9]*gb([+-][a-z]+(\.[a-z]+)*)?$"


# An element of a MIG layout: a word for a whole layout, or a profile with a placement or a count.
_LAYOUT_WORD = (
    r"^([1-9]c\.)?([1-9][0-9]*g\.[1-9][0-9]*gb([+-][a-z]+(\.[a-z]+)*)?|[0-9]{1,3})"
    r"(@[0-9]{1,2}|\*[1-9][0-9]?)?$"
)
_LAYOUT_WHOLE = r"^(all-balanced|none|off|all-[1-9][0-9]*g\.[1-9][0-9]*gb([+-][a-z]+(\.[a-z]+)*)?)$"


def _version(value: object) -> object:
    # The type is checked too, because Literal[1] alone would accept true and 1.0.
    if type(value) is not int or value != 1:
        small = type(value) is int and abs(value) < 10**9
        sentence = f"version {value} is not known to" if small else "is not a version known to"
        raise wrong(f"{sentence} this vgpud", "write version = 1")
    return value


def _profiles(value: tuple[str, ...]) -> tuple[str, ...]:
    for name in value:
        if not re.fullmatch(_PROFILE, name):
            raise wrong(
                f"{name!r} is not the name of a GPU instance profile",
                "write it as nvidia-smi mig -lgip does, without MIG: 1g.18gb, 1g.18gb+me",
            )
    twice = next((name for name in value if value.count(name) > 1), None)
    if twice is not None:
        raise wrong(f"{twice!r} is listed {value.count(twice)} times", "list it once")
    return value


def _layout(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(value) == 1 and re.fullmatch(_LAYOUT_WHOLE, value[0]):
        return value
    for word in value:
        if not re.fullmatch(_LAYOUT_WORD, word):
            raise wrong(
                f"{word!r} is not a part of a MIG layout",
                'write it as in ["3g.71gb@4", "1g.18gb*2"], or ["all-balanced"], ["all-1g.18gb"], ["none"]',
            )
    return value


Profiles = Annotated[
    # strict=False, because TOML arrays are lists, which strict mode refuses for a tuple
    tuple[str, ...],
    Field(strict=False, min_length=1),
    AfterValidator(_profiles),
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "uniqueItems": True,
            "items": {"type": "string", "pattern": _PROFILE},
        }
    ),
]


MigLayout = Annotated[
    tuple[str, ...],
    Field(strict=False, min_length=1, max_length=32),
    AfterValidator(_layout),
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "maxItems": 32,
            "anyOf": [
                {"items": {"type": "string", "pattern": _LAYOUT_WORD}},
                {"maxItems": 1, "items": {"type": "string", "pattern": _LAYOUT_WHOLE}},
            ],
        }
    ),
]


OnTop = Annotated[tuple[Literal["preload", "mps"], ...], Field(strict=False, max_length=2)]


class PreloadSettings(PolicyTable):
    """Mode preload: libvgpu enforces each tenant's memory limit and compute share."""

    max_tenants: int = Field(64, ge=1, le=1024, description="allocations on one device at one time")
    memory_overcommit: float = Field(
        1.0,
        ge=1.0,
        le=10.0,
        description="how many times the device's memory the limits of all tenants may add up to; above 1 the "
        "card itself can be full, and a tenant then meets an out-of-memory error below its limit",
    )
    share_policy: Literal["hard", "work-conserving"] = Field(
        "hard",
        description="hard: a tenant never exceeds its share, also while it is alone; work-conserving: it may "
        "also use the time that others leave idle",
    )
    engine: Literal["auto", "cut", "gate"] = Field(
        "auto",
        description="what keeps the time slices of tenants: cut takes them off the device in the middle of a "
        "kernel, gate holds their launches back; auto: cut where a probe of the device shows that its "
        "driver can, and gate elsewhere",
    )
    idle_suspend: Seconds | None = Field(
        None,
        description="a tenant that has done nothing on the device for so long is suspended, until it works "
        "again; left out: never",
    )
    turn: Seconds | None = Field(
        None,
        description="with memory_overcommit: how long tenants that do not fit beside each other keep the "
        "device in turn, their memory on the host meanwhile; left out: no turns",
    )
    min_residence: Seconds = Field(
        60.0, description="minimum time between the resumption of a tenant and its next suspension as idle"
    )
    memory_limit: Literal["driver", "libvgpu"] = Field(
        "driver",
        description="what enforces the memory limit: driver, where the driver limits the memory of control "
        "groups (from branch 615 on), and libvgpu elsewhere; or libvgpu everywhere",
    )
    evictable: bool | None = Field(
        None,
        description="libvgpu makes device memory that it can evict by itself, so that a suspension takes as "
        "long as a copy; such memory cannot be shared between processes; left out: with idle_suspend or turn",
    )
    on_bypass: Literal["report", "stop"] = Field(
        "report",
        description="a tenant whose processes hold device memory that libvgpu does not count, or that "
        "tampers with its lease: report marks it, stop also ends its processes and releases it",
    )

    @property
    def makes_evictable(self) -> bool:
        ruled = self.idle_suspend is not None or self.turn is not None
        return ruled if self.evictable is None else self.evictable


class MpsSettings(PolicyTable):
    """Mode mps: one NVIDIA MPS control daemon per device."""

    max_tenants: int = Field(
        16,
        ge=1,
        le=60,
        description="allocations on one device at one time; the driver takes 48 contexts, 60 from R590",
    )
    overcommit_percent: float = Field(
        100.0,
        ge=100.0,
        le=1000.0,
        description="maximum sum of the active thread percentages of all tenants of a device",
    )
    users: Literal["same", "queue", "multi"] = Field(
        "same",
        description="a second user on a device, where NVIDIA's server takes one at a time: same refuses it, "
        "queue lets it wait for the first one's programs to end, multi runs one server for all users "
        "if the driver supports that, and otherwise acts as same",
    )
    processes_per_tenant: int = Field(
        1,
        ge=1,
        le=48,
        description="into how many equal parts a tenant's share and memory are cut, one for each of its "
        "processes; a process that finds no part left is refused, so that all together hold to the share",
    )
    memory: Literal["driver", "libvgpu"] = Field(
        "driver",
        description="what enforces a tenant's memory limit: driver limits each process, to an equal part if "
        "several are allowed; libvgpu limits all processes of the tenant together, and to the byte",
    )
    exclusive_process: bool = Field(
        False,
        description="set compute mode EXCLUSIVE_PROCESS while MPS is on the device, so that no program can "
        "bypass MPS; the earlier compute mode is restored afterwards",
    )
    static_partitions: bool = Field(
        False,
        description="give each tenant multiprocessors of its own, in whole chunks of the device, by the "
        "static SM partitions of NVIDIA's daemon (R590); devices where it has none are refused",
    )
    client_priority: Literal["normal", "below-normal"] = Field(
        "normal", description="a hint to the driver, for allocations that ask for no priority of their own"
    )
    check_seconds: float = Field(
        10.0, ge=0.2, le=3600.0, description="interval of checks that a control daemon answers"
    )
    hang_seconds: float = Field(
        30.0,
        ge=1.0,
        le=3600.0,
        description="a control daemon that does not answer for this time is ended with its clients, and "
        "restarted; a server that stays in FAULT for this time is ended",
    )


class MigSettings(PolicyTable):
    """Mode mig: one GPU instance per slice."""

    profiles: Profiles | None = Field(
        None,
        description="profiles that may be made, by name; all if left out. Where 3g.71gb is allowed, so are "
        "the compute instances that it can be divided into (1c.3g.71gb), which may also be named alone",
    )
    change_mode: bool = Field(True, description="whether MIG mode may be switched on an idle device")
    layout: MigLayout | None = Field(
        None,
        description="the instances that stand on the device, whether allocated or not: profiles, with @START "
        "for a memory slice or *N for several, compute instances (1c.3g.71gb) among them; or all-balanced, "
        "all-PROFILE, none, off",
    )
    dynamic: bool | None = Field(
        None,
        description="whether requests may make instances beside a layout, and move its idle ones; "
        "left out: where no layout is given",
    )
    foreign: Literal["keep", "lend", "remove"] = Field(
        "keep",
        description="instances that other programs made: keep them, lend them to tenants, or remove idle "
        "ones that are in the way",
    )
    on_top: OnTop = Field(
        (),
        description="modes in which tenants may have a part of an instance: preload, mps, or both; left out, "
        "instances are given whole only",
    )
    reset: bool = Field(
        False,
        description="whether an idle device may be reset where a change of MIG mode needs it (Ampere)",
    )

    @property
    def grows(self) -> bool:
        """True if requests may add MIG instances to the device or remove them."""
        return self.layout is None if self.dynamic is None else self.dynamic


class ExclusiveSettings(PolicyTable):
    """Mode exclusive: whole devices; it has no settings."""


ModeOrAuto = Literal["auto", "mig", "mps", "preload", "exclusive", "unmanaged"]


def modes_of(settings: str) -> list[str]:
    """The modes of [[device]] rules that may have this table of settings. Settings of preload and mps are
    also allowed with mode mig, because these modes can share MIG instances.
    """
    return ["auto", settings, *(["mig"] if settings in ("preload", "mps") else [])]


def _settings_fit_mode(schema: dict[str, Any]) -> None:
    """Adds a check to the schema that a rule's settings fit its mode; rules.py makes the same check."""
    schema["allOf"] = [
        {"if": {"required": [name]}, "then": {"properties": {"mode": {"enum": modes_of(name)}}}}
        for name in MODES_WITH_SETTINGS
    ]


class DeviceRule(PolicyTable):
    """One [[device]] table; the first rule whose match covers a device applies to it."""

    model_config = ConfigDict(json_schema_extra=_settings_fit_mode)

    match: Match = Field(default_factory=Match, description="which devices; left out, all of them")
    mode: ModeOrAuto = Field("auto", description="how they are shared; auto lets each request choose")
    on_sick: Literal["drain", "move", "report"] = Field(
        "drain",
        description="a device for which NVML asks for a reset, a reboot or a replacement: drain gives it no "
        "new allocations until it is well, move also moves its tenants away, report only says so",
    )
    preload: PreloadSettings | None = Field(None, description="settings of mode preload")
    mps: MpsSettings | None = Field(None, description="settings of mode mps")
    mig: MigSettings | None = Field(None, description="settings of mode mig")
    exclusive: ExclusiveSettings | None = Field(None, description="settings of mode exclusive")

    def settings_preload(self) -> PreloadSettings:
        return self.preload or PreloadSettings()

    def settings_mps(self) -> MpsSettings:
        return self.mps or MpsSettings()

    def settings_mig(self) -> MigSettings:
        return self.mig or MigSettings()

    def settings_exclusive(self) -> ExclusiveSettings:
        return self.exclusive or ExclusiveSettings()

    def allows(self, mode: Mode) -> bool:
        """True if tenants may use a device of this rule in `mode`. Always False for an unmanaged device."""
        return mode is not Mode.UNMANAGED and self.mode in ("auto", mode.value)


class PlannerSettings(PolicyTable):
    """How a device is chosen among those that fit, and which part of the places for shared slices one user
    may have.
    """

    strategy: Literal["pack", "spread"] = Field(
        "pack", description="pack fills the fullest device that fits, spread takes the emptiest"
    )
    user_places_percent: int = Field(
        75,
        ge=1,
        le=100,
        description="of the places for shared slices (max_tenants of all devices), the part that one user "
        "may have without a [[quota]] that counts slices or allocations; root and pods have no bound",
    )


def _listen(value: str) -> str:
    """Checks a listen address. Only loopback addresses are accepted, because the pages have no access
    control.
    """
    host, colon, port = value.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    try:
        loopback = ip_address(bare).is_loopback and (host == bare) != (":" in bare)
    except ValueError:
        loopback = False
    if value and not (colon and loopback and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise wrong(
            f"{value!r} is not a loopback address with a port",
            'write it as in "127.0.0.1:PORT" or "[::1]:PORT"; for others put a proxy with a login in front',
        )
    return value


Listen = Annotated[
    str,
    Field(max_length=64),
    AfterValidator(_listen),
    WithJsonSchema({"type": "string", "pattern": r"^((127(\.[0-9]{1,3}){3}|\[::1\]):[0-9]{1,5})?$"}),
]


class MetricsSettings(PolicyTable):
    """The table [metrics]: metrics for Prometheus. They are always served on the Unix socket metrics.sock."""

    listen: Listen = Field("", description="also by TCP at this loopback address; empty: no TCP")
    workloads: bool = Field(
        True,
        description="vgpud_allocation_info has the names of namespace, pod, container and claim; "
        "false: these labels are empty",
    )


class HttpSettings(PolicyTable):
    """The table [http]: the read-only status page."""

    listen: Listen = Field("", description="serve it by TCP at this loopback address; empty: no page")


class RuntimeSettings(PolicyTable):
    """The table [runtime]: containers that vgpu-runtime starts through runtime.sock, each in its own
    allocation.
    """

    users: bool = Field(
        False,
        description="users in group vgpu may start them too (rootless Podman), not only root; "
        "each container then belongs to the user who starts it",
    )
    environment: bool = Field(
        False,
        description="a container without annotations may ask by variables (VGPU_MEMORY), "
        "which may be its image's",
    )
    must_ask: bool = Field(
        True,
        description="a pod's container that comes to vgpu-runtime and asks for nothing is refused: "
        "the engine did not pass on what its pod asks for",
    )


Ids = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=2**32 - 1)], ...],
    Field(strict=False, max_length=MAX_RULES),
]


Names = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=256)], ...],
    Field(strict=False, max_length=MAX_RULES),
]


class QuotaRule(PolicyTable):
    """One [[quota]] table. The first quota that covers a user bounds the sum of all the user's
    allocations.
    """

    users: Names = Field((), description="the users, by the names that this host has for them")
    groups: Names = Field((), description="members of these groups, supplementary members too, by name")
    uids: Ids = Field((), description="the users, by number")
    gids: Ids = Field((), description="members of these groups, by number")
    max_allocations: int | None = Field(None, ge=0, le=1_000_000, description="at one time")
    max_devices: int | None = Field(None, ge=0, le=1024, description="slices on all devices together")
    max_memory: MemoryBytes | None = Field(None, description="of all slices together")
    max_cores: float | None = Field(
        None,
        ge=0.0,
        le=102_400.0,
        description="percent of a device, of all slices together; one without a limit counts as 100",
    )
    max_priority: Literal["normal", "above-normal"] = Field(
        "normal", description="the highest priority that its allocations may have; normal without a rule, too"
    )

    @property
    def goes_by_account(self) -> bool:
        return bool(self.users or self.groups or self.gids)

    def covers(self, uid: int, gid: int, account: Account = BARE) -> bool:
        """Does the quota cover the owner? A quota that names no users or groups covers all owners except
        pods, and root, which runs agents.
        """
        if not (self.uids or self.gids or self.users or self.groups):
            return uid not in (0, ANYONE)
        is_member = gid in self.gids or not account.gids.isdisjoint(self.gids)
        is_named = account.user in self.users or not account.groups.isdisjoint(self.groups)
        return uid in self.uids or is_member or is_named


class PoolSettings(PolicyTable):
    """The table [pool]: settings for suspended tenants, whose device memory is in host memory."""

    host_memory: MemoryBytes | None = Field(
        None,
        description="maximum of host memory for all tenants together: the memory of suspended ones, and "
        "buffers of running ones; left out: no bound",
    )
    host_memory_reserve: MemoryBytes = Field(
        2 << 30, description="memory that suspensions leave available on the host"
    )
    unevictable: Literal["checkpoint", "keep", "refuse"] = Field(
        "checkpoint",
        description="what happens to a tenant of whose memory libvgpu can evict less than half: checkpoint "
        "has the driver save all of it, keep evicts what can be evicted, refuse does not suspend it",
    )


class Policy(PolicyTable):
    """The policy of a node."""

    version: Annotated[Literal[1], BeforeValidator(_version)] = Field(1, description="of this format")
    planner: PlannerSettings = Field(default_factory=PlannerSettings, description="choosing among devices")
    pool: PoolSettings = Field(default_factory=PoolSettings, description="suspending and resuming tenants")
    device: tuple[DeviceRule, ...] = Field(
        (),
        strict=False,
        max_length=MAX_RULES,
        description="rules in order: the first whose match covers a device gives its mode",
    )
    metrics: MetricsSettings = Field(default_factory=MetricsSettings, description="figures for Prometheus")
    http: HttpSettings = Field(default_factory=HttpSettings, description="the status page")
    quota: tuple[QuotaRule, ...] = Field(
        (),
        strict=False,
        max_length=MAX_RULES,
        description="quotas in order: the first that covers a user counts; without one, there is none",
    )
    kubelet: KubeletSettings = Field(
        default_factory=KubeletSettings, description="resources for pods, by the kubelet's device plugin API"
    )
    dra: DraSettings = Field(default_factory=DraSettings, description="devices for the claims of pods")
    runtime: RuntimeSettings = Field(
        default_factory=RuntimeSettings, description="containers that start with an allocation"
    )
    remote: RemoteSettings = Field(
        default_factory=RemoteSettings, description="slices for machines without a GPU"
    )

    def rule_for(self, device: Device) -> DeviceRule:
        """The first rule that covers the device; without one, mode "auto"."""
        return next((rule for rule in self.device if rule.match.covers(device)), DeviceRule())

    def quota_of(self, uid: int, gid: int, account: Account = BARE) -> QuotaRule | None:
        return next((rule for rule in self.quota if rule.covers(uid, gid, account)), None)


# Every table by its name in TOML, without array numbers.
TABLES: dict[str, type[BaseModel]] = {
    "": Policy,
    "planner": PlannerSettings,
    "metrics": MetricsSettings,
    "http": HttpSettings,
    "quota": QuotaRule,
    "pool": PoolSettings,
    "device": DeviceRule,
    "device.match": Match,
    "device.preload": PreloadSettings,
    "device.mps": MpsSettings,
    "device.mig": MigSettings,
    "device.exclusive": ExclusiveSettings,
    "kubelet": KubeletSettings,
    "kubelet.resource": KubeletResource,
    "kubelet.resource.match": Match,
    "dra": DraSettings,
    "runtime": RuntimeSettings,
    "remote": RemoteSettings,
}
