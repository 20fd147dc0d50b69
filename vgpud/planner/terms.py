"""Combines policy and hardware into the terms of each device, computed once for each snapshot and policy."""

from typing import NamedTuple

from vgpud.model.device import Device, MigProfile, Node
from vgpud.model.quantity import Percent
from vgpud.model.tenancy import Mode
from vgpud.policy.model import DeviceRule, Policy


class Offer(NamedTuple):
    """A MIG profile as a tenant sees it: bare name, memory and share of the multiprocessors.

    NVML rounds the memory of the full-card profile up to more than the card has; here it is exact. With
    `compute`, the offer is one compute instance in a GPU instance of `profile`. Its memory is then an even
    part of the GPU instance's, which is not a limit.
    """

    profile: MigProfile
    name: str
    memory_bytes: int
    share: Percent
    allowed: bool
    compute: MigProfile | None = None

    @property
    def instance_bytes(self) -> int:
        """The memory of the GPU instance, which all tenants in it share."""
        if self.compute is None:
            return self.memory_bytes
        return self.memory_bytes * self.profile.slice_count // self.compute.slice_count


class Terms(NamedTuple):
    """What policy and hardware allow on a device. `fixed` is the mode of the rule, None for "auto"; `offers`
    are all MIG profiles, the smallest first.
    """

    fixed: Mode | None
    preload_tenants: int
    preload_memory_hundredths: int
    mps_tenants: int
    mps_share_hundredths: int
    mig_change_mode: bool
    mig_on_top: tuple[Mode, ...]
    offers: tuple[Offer, ...]
    mig_profiles: frozenset[str] | None = None
    preload_turns: bool = False

    def tenants(self, mode: Mode) -> int:
        """Returns how many allocations in mode preload or mps may be on the device at one time."""
        return self.mps_tenants if mode is Mode.MPS else self.preload_tenants

    def memory_bytes(self, mode: Mode, usable_bytes: int) -> int:
        """The memory that all tenants of a device may hold together in mode preload or mps, overcommit
        included.
        """
        return usable_bytes * self.preload_memory_hundredths // 100 if mode is Mode.PRELOAD else usable_bytes

    def share_hundredths(self, mode: Mode) -> int:
        """The maximum sum of the shares on the device in mode preload or mps."""
        return self.mps_share_hundredths if mode is Mode.MPS else 10000


def terms_of(device: Device, rule: DeviceRule) -> Terms:
    mps, mig = rule.settings_mps(), rule.settings_mig()
    return Terms(
        fixed=None if rule.mode == "auto" else Mode(rule.mode),
        preload_tenants=rule.settings_preload().max_tenants,
        preload_memory_hundredths=round(rule.settings_preload().memory_overcommit * 100),
        mps_tenants=mps.max_tenants,
        mps_share_hundredths=round(mps.overcommit_percent * 100),
        mig_change_mode=mig.change_mode,
        mig_on_top=tuple(Mode(name) for name in mig.on_top),
        offers=_offers(device, mig.profiles),
        preload_turns=rule.settings_preload().turn is not None,
        mig_profiles=None if mig.profiles is None else frozenset(map(bare_name, mig.profiles)),
    )


def bare_name(name: str) -> str:
    """The name in lower case, without NVML's prefix: "1g.18gb" for "MIG 1g.18gb"."""
    return name.strip().lower().removeprefix("mig ").strip()


def _offers(device: Device, allowed: tuple[str, ...] | None) -> tuple[Offer, ...]:
    """Offers, smallest first: by memory, then compute slices, then the profile with more instances."""
    profiles = device.mig.profiles
    most = max((profile.sm_count for profile in profiles), default=1) or 1
    names = None if allowed is None else {bare_name(name) for name in allowed}
    offers = (
        Offer(
            profile=profile,
            name=bare_name(profile.name),
            memory_bytes=min(profile.memory_bytes, device.memory_usable_bytes),
            share=Percent(min(max(profile.sm_count * 10000 // most, 1), 10000)),
            allowed=names is None or bare_name(profile.name) in names,
        )
        for profile in profiles
    )
    return tuple(
        sorted(
            offers,
            key=lambda o: (o.memory_bytes, o.profile.slice_count, -o.profile.instance_count, o.profile.id),
        )
    )


# The last snapshot and policy with their terms. The terms are cached by the identity of snapshot and policy,
# because both are immutable and seldom change.
_last: tuple[Policy, Node, dict[str, Terms]] | None = None


def all_terms(policy: Policy, node: Node) -> dict[str, Terms]:
    """The terms of every device of the node, by uuid."""
    global _last  # noqa: PLW0603 - a memory of one entry, replaced whole
    last = _last
    if last is None or last[0] is not policy or last[1] is not node:
        last = (
            policy,
            node,
            {device.uuid: terms_of(device, policy.rule_for(device)) for device in node.devices},
        )
        _last = last
    return last[2]
