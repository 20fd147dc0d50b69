"""A decision from cached results equals a decision without them."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from vgpud.planner.choose import choose
from vgpud.planner.judge import judge
from vgpud.planner.memory import Memory
from vgpud.planner.pool import NO_POOL, Pool
from vgpud.planner.terms import terms_of
from vgpud.planner.use import EMPTY
from vgpud.planner.verdict import Seat
from vgpud.planner.wanted import wanted
from vgpud.policy.model import DeviceRule

from .cards import AUTO, h200, node_of, policy, request, used_mig

USES = (EMPTY, used_mig((19, 6)), used_mig((9, 4)), used_mig((5, 0), (14, 4)), used_mig((0, 0)))
PROFILES = ("1g.18gb", "2g.35gb", "3g.71gb", "7g.141gb")


@given(
    st.lists(
        st.tuples(st.sampled_from(PROFILES), st.integers(0, 3), st.sampled_from(USES)),
        min_size=1,
        max_size=20,
    )
)
def test_a_decision_with_cached_results_equals_one_without(steps: list[tuple[str, int, object]]) -> None:
    """Decides the same request twice: with all caches, and for a node without cached results."""
    node = node_of(*(h200(i, mig_on=True) for i in range(4)))
    use = {}
    for profile, index, held in steps:
        use[f"GPU-{index}"] = held
        fresh = node_of(*(replace(device) for device in node.devices))
        asked = request(mig_profile=profile)
        assert choose(asked, node, AUTO, use) == choose(asked, fresh, AUTO, use)  # type: ignore[arg-type]


def test_a_change_of_any_part_of_a_device_gives_a_new_decision() -> None:
    calls: list[Seat] = []

    def counted(seat, want, spread):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        calls.append(seat)
        return judge(seat, want, spread)

    memory = Memory(counted)
    want = wanted(request(mig_profile="1g.18gb"))
    device = h200(0, mig_on=True)
    rule = DeviceRule()
    seat = Seat(device, terms_of(device, rule), EMPTY, NO_POOL)
    for changed in (
        seat,
        seat,
        seat._replace(use=used_mig((19, 6))),
        seat._replace(device=replace(device)),
        seat._replace(terms=terms_of(device, rule)),
        seat._replace(pool=Pool(foreign="lend")),
    ):
        memory.of(want, False)(*changed)
    assert len(calls) == 5, "only the second is as the one before it"
    memory.of(want, True)(*seat)
    memory.of(wanted(request(mig_profile="2g.35gb")), False)(*seat)
    assert len(calls) == 7


def test_a_changed_policy_takes_effect_at_once() -> None:
    node = node_of(h200(0, mig_on=True))
    asked = request(mig_profile="1g.18gb")
    assert choose(asked, node, AUTO, {}).slices
    assert choose(asked, node, policy({"mode": "unmanaged"}), {}).refusal is not None
    assert choose(asked, node, AUTO, {}).slices
