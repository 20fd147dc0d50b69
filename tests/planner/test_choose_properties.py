"""Properties of the planner that hold after any sequence of allocations and releases, on any node."""

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from tests.examples import examples
from vgpud.model.device import Device, Health, Link, Node, Placement
from vgpud.model.errors import ErrorCode
from vgpud.model.quantity import GIB, MIB, Percent
from vgpud.model.tenancy import Allocation, Isolation, Mode, Request, Selector, Slice, State
from vgpud.planner.choose import choose
from vgpud.planner.use import DeviceUse, use_of
from vgpud.policy.model import DeviceRule, Policy

from .cards import A30_PROFILES, OWNER, h200, node_of, policy
from .test_geometry import legal

A30_MIB = 24125


@st.composite
def devices(draw: st.DrawFn, index: int) -> Device:
    card = draw(st.sampled_from(["h200", "h200", "a30", "plain"]))
    device = h200(index, numa_node=draw(st.sampled_from([None, 0, 1])), mig_on=draw(st.booleans()))
    fields = {name: getattr(device, name) for name in Device.__slots__}
    if card == "a30":
        fields["mig"] = type(device.mig)(True, device.mig.current, device.mig.pending, A30_PROFILES)
        fields |= {"memory_total_bytes": A30_MIB * MIB, "memory_reserved_bytes": 0, "name": "NVIDIA A30"}
    if card == "plain":
        fields |= {"mig": type(device.mig)(), "memory_total_bytes": 16 * GIB, "name": "NVIDIA T4"}
    if draw(st.integers(0, 9)) == 0:
        fields["health"] = Health.LOST
    return Device(**fields)


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    made = [draw(devices(i)) for i in range(draw(st.integers(1, 5)))]
    links = {}
    for a in made:
        for b in made:
            if a.index < b.index and draw(st.booleans()):
                links[a.uuid, b.uuid] = links[b.uuid, a.uuid] = draw(st.sampled_from(Link))
    return node_of(*made, links=links)


MODES = st.sampled_from(["auto", "auto", "auto", "mig", "mps", "preload", "exclusive", "unmanaged"])


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    rules = [
        {
            "index": i,
            "mode": draw(MODES),
            "mps": {
                "max_tenants": draw(st.integers(1, 6)),
                "overcommit_percent": draw(st.sampled_from([100.0, 150.0])),
            },
            "preload": {
                "max_tenants": draw(st.integers(1, 6)),
                "memory_overcommit": draw(st.sampled_from([1.0, 1.5, 4.0])),
            },
            "mig": {"on_top": draw(st.sampled_from([(), (), ("preload",), ("mps",), ("mps", "preload")]))},
        }
        for i in range(draw(st.integers(0, 5)))
    ]
    return policy(*rules, strategy=draw(st.sampled_from(["pack", "spread"])))


@st.composite
def requests(draw: st.DrawFn) -> Request:
    return Request(
        id="r",
        owner=OWNER,
        memory_bytes=draw(st.none() | st.sampled_from([1, MIB, GIB, 5 * GIB, 17 * GIB, 60 * GIB, 200 * GIB])),
        share=draw(st.none() | st.builds(Percent, st.sampled_from([1, 1250, 2500, 3333, 6000, 10000]))),
        count=draw(st.sampled_from([1, 1, 1, 2, 3, 6])),
        isolation=draw(st.none() | st.sampled_from(Isolation)),
        mig_profile=draw(st.sampled_from(["", "", "", "1g.18gb", "3g.71gb", "20", "1g.6gb", "nonsense"])),
        selector=draw(
            st.sampled_from(
                [
                    Selector(),
                    Selector(),
                    Selector(indices=(0,)),
                    Selector(name_glob="*A30*"),
                    Selector(uuids=("x",)),
                ]
            )
        ),
    )


def check_device(device: Device, slices: list[Slice], rules: Policy) -> None:
    """Asserts that a device's slices do not exceed it."""
    modes = {piece.device_mode for piece in slices}
    assert len(modes) <= 1
    mode = next(iter(modes), None)
    rule_ = rules.rule_for(device)
    if mode is None:
        return
    assert rule_.allows(mode)
    assert device.health is Health.OK
    assert all(piece.memory_bytes > 0 for piece in slices)
    if mode is Mode.EXCLUSIVE:
        assert len(slices) == 1
    if mode is Mode.MIG:
        check_instances(device, slices, rule_)
        return
    assert all(piece.memory_bytes <= device.memory_usable_bytes for piece in slices)
    factor = rule_.settings_preload().memory_overcommit if mode is Mode.PRELOAD else 1
    assert sum(piece.memory_bytes for piece in slices) <= device.memory_usable_bytes * factor
    if mode is Mode.MPS:
        total = sum(piece.share.hundredths for piece in slices if piece.share is not None)
        assert total <= rule_.settings_mps().overcommit_percent * 100
        assert len(slices) <= rule_.settings_mps().max_tenants
    if mode is Mode.PRELOAD:
        assert len(slices) <= rule_.settings_preload().max_tenants


def check_instances(device: Device, slices: list[Slice], rule_: DeviceRule) -> None:
    """Asserts that a whole instance has one tenant, and that a shared instance has one mode and does not hold
    more than it has.
    """
    keys = [(piece.mig.profile_id, piece.mig.placement) for piece in slices if piece.mig is not None]
    assert len(keys) == len(slices)
    assert legal(device.mig.profiles, frozenset[tuple[int, Placement]](keys))
    for key in set(keys):
        parts = [piece for piece, at in zip(slices, keys, strict=True) if at == key]
        (mode,) = {piece.mode for piece in parts}
        profile = next(p for p in device.mig.profiles if p.id == key[0])
        factor = rule_.settings_preload().memory_overcommit if mode is Mode.PRELOAD else 1
        assert sum(piece.memory_bytes for piece in parts) <= profile.memory_bytes * factor
        if mode is Mode.MIG:
            assert len(parts) == 1
            continue
        assert mode.value in rule_.settings_mig().on_top
        settings = rule_.settings_mps() if mode is Mode.MPS else rule_.settings_preload()
        assert len(parts) <= settings.max_tenants


class Tenancy(RuleBasedStateMachine):
    """Tenants start and end at random. The planner gets only the sums of its own earlier decisions."""

    held = Bundle("held")

    @initialize(node=nodes(), rules=policies())
    def start(self, node: Node, rules: Policy) -> None:
        self.node, self.policy = node, rules
        self.use: dict[str, DeviceUse] = {}
        self.allocations: dict[int, Allocation] = {}
        self.next = 0

    @rule(target=held, wanted=requests())
    def allocate(self, wanted: Request) -> int:
        decision = choose(wanted, self.node, self.policy, self.use)
        assert decision == choose(wanted, self.node, self.policy, dict(self.use))
        assert [r.device_uuid for r in decision.reasons] == [d.uuid for d in self.node.devices]
        assert all(reason.sentence for reason in decision.reasons)
        taken = [reason.device_uuid for reason in decision.reasons if reason.taken]
        assert sorted(taken) == sorted(piece.device_uuid for piece in decision.slices)
        assert (decision.refusal is None) == bool(decision.slices)
        self.next += 1
        if decision.refusal is not None:
            assert decision.refusal.sentence
            assert decision.refusal.hint
            return self.next
        assert len({piece.device_uuid for piece in decision.slices}) == wanted.count == len(decision.slices)
        assert len({piece.mode for piece in decision.slices}) == 1
        self._check_asked(wanted, decision.slices)
        for piece in decision.slices:
            held = self.use.get(piece.device_uuid, DeviceUse())
            self.use[piece.device_uuid] = held.with_slice(piece)
        self.allocations[self.next] = Allocation(str(self.next), wanted, State.ACTIVE, decision.slices)
        return self.next

    def _check_asked(self, wanted: Request, slices: tuple[Slice, ...]) -> None:
        """Asserts that a tenant gets at least what it has requested, and exactly that unless a mode
        rounds.
        """
        for piece in slices:
            asked = wanted.memory_bytes or 0
            if piece.mode in (Mode.MPS, Mode.PRELOAD) and asked:
                assert piece.memory_bytes == asked
            assert piece.memory_bytes >= asked
            if wanted.share is not None and wanted.share.hundredths < 10000:
                assert piece.share is not None
                assert piece.share >= wanted.share

    @rule(number=consumes(held))
    def release(self, number: int) -> None:
        allocation = self.allocations.pop(number, None)
        for piece in allocation.slices if allocation else ():
            self.use[piece.device_uuid] = self.use[piece.device_uuid].without_slice(piece)

    @invariant()
    def nothing_is_promised_twice(self) -> None:
        for device in getattr(self, "node", Node()).devices:
            slices = [p for a in self.allocations.values() for p in a.slices if p.device_uuid == device.uuid]
            check_device(device, slices, self.policy)

    @invariant()
    def sums_are_those_of_the_allocations(self) -> None:
        allocations = getattr(self, "allocations", {})
        fresh = use_of(allocations.values())
        for uuid, held in getattr(self, "use", {}).items():
            expected = fresh.get(uuid, DeviceUse())
            assert (held.mode, held.memory_bytes, held.share_hundredths, held.count, set(held.mig)) == (
                expected.mode,
                expected.memory_bytes,
                expected.share_hundredths,
                expected.count,
                set(expected.mig),
            )
            assert set(held.shared) == set(expected.shared)


TestTenancy = Tenancy.TestCase
TestTenancy.settings = settings(
    max_examples=examples(30),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@settings(max_examples=examples(30))
@given(nodes(), policies(), requests())
def test_a_request_is_refused_for_capacity_exactly_if_an_idle_node_could_serve_it(
    node: Node, rules: Policy, wanted: Request
) -> None:
    """The refusal NO_CAPACITY says that waiting helps, and IMPOSSIBLE says that it does not. MIG mode stays
    off here, because the snapshot would not show that the last release disables a mode that vgpud has
    enabled.
    """
    off = [replace(d, mig=replace(d.mig, current=False, pending=False)) for d in node.devices]
    node = node_of(*off, links=dict(node.links))
    idle = choose(wanted, node, rules, {})
    whole = {d.uuid: Slice(d.uuid, Mode.EXCLUSIVE, d.memory_usable_bytes) for d in node.devices}
    full = {uuid: DeviceUse().with_slice(piece) for uuid, piece in whole.items()}
    busy = choose(wanted, node, rules, full)
    assert busy.refusal is not None
    assert (busy.refusal.code is ErrorCode.NO_CAPACITY) == (idle.refusal is None)


@settings(max_examples=examples(20))
@given(nodes(), policies(), requests(), st.randoms(use_true_random=False))
def test_the_order_of_the_devices_does_not_change_the_planners_choice(
    node: Node, rules: Policy, wanted: Request, random: object
) -> None:
    mixed = list(node.devices)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    one = choose(wanted, node, rules, {})
    other = choose(wanted, node_of(*mixed, links=dict(node.links)), rules, {})
    assert set(one.slices) == set(other.slices)
    assert set(one.reasons) == set(other.reasons)


@settings(max_examples=examples(20))
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_pack_never_uses_more_cards_than_spread(amounts: list[int]) -> None:
    node = node_of(*(h200(i) for i in range(4)))
    cards = {}
    for strategy in ("pack", "spread"):
        rules, use = policy(strategy=strategy), dict[str, DeviceUse]()
        for amount in amounts:
            for piece in choose(Request("r", OWNER, amount * GIB), node, rules, use).slices:
                use[piece.device_uuid] = use.get(piece.device_uuid, DeviceUse()).with_slice(piece)
        cards[strategy] = len(use)
    assert cards["pack"] <= cards["spread"]
