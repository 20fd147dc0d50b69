"""Quality of the online packing of MIG instances, and the time of a decision, each beside baselines."""

import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from statistics import mean

from tests.bench.common import Report, latency_row
from tests.bench.mig_replay import (
    MIXES,
    PROFILES,
    Choose,
    arrivals,
    baselines,
    best_on_one_card,
    ours,
    reference,
    replay,
)
from tests.planner.cards import (
    A30_PROFILES,
    AUTO,
    H200_PROFILES,
    H200_WITHOUT_ME,
    h200,
    node_of,
    request,
    used_mig,
)
from vgpud.planner.choose import choose
from vgpud.planner.geometry import MigGeometry, bits
from vgpud.planner.transitions import between

LOADS = (0.7, 1.0)
CARDS = (1, 4, 8)


def run(seeds: int = 10, count: int = 1000) -> Report:
    report = Report("mig-packing")
    _packing(report, seeds, count)
    _one_card(report, seeds, count)
    _offline(report)
    _transitions(report)
    _times(report)
    return report


def _packing(report: Report, seeds: int, count: int) -> None:
    table = MigGeometry(H200_WITHOUT_ME)
    policies: dict[str, tuple[Choose, float]] = {
        **{name: (choice, 0.0) for name, choice in baselines(table).items()},
        "ours": (ours, 0.0),
        "ours, 1 % of instances may move": (ours, 0.01),
        "ours, any may move": (ours, 1e9),
    }
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    moved: dict[str, list[float]] = defaultdict(list)
    for mix in MIXES:
        for load in LOADS:
            for cards in CARDS:
                for seed in range(seeds):
                    trace = arrivals(table, mix, load, cards, seed, count)
                    best = reference(table, trace, cards)
                    for name, (choice, part) in policies.items():
                        out = replay(table, trace, cards, choice, part)
                        moved[name].append(out.moved / max(out.accepted, 1))
                        for group in ("mean", f"{cards} cards", mix):
                            ratios[name, group].append(out.work / best)
    for name in policies:
        groups = [
            f"{group} {mean(found) * 100:.1f}"
            for (who, group), found in ratios.items()
            if who == name and group != "mean"
        ]
        note = ", ".join(groups) + (f"; {mean(moved[name]) * 100:.2f} % moved" if policies[name][1] else "")
        report.value(f"accepted work, {name}", mean(ratios[name, "mean"]) * 100, "% of repacking", note)


def _one_card(report: Report, seeds: int, count: int) -> None:
    """The optimum on one device without moves, from a solver that knows the mix and the load."""
    table = MigGeometry(H200_WITHOUT_ME)
    best: list[float] = []
    refusing: list[float] = []
    mine: list[float] = []
    for mix in MIXES:
        for load in LOADS:
            optimum = best_on_one_card(table, mix, load)
            picky = best_on_one_card(table, mix, load, may_refuse=True)
            for seed in range(seeds):
                trace = arrivals(table, mix, load, 1, seed, count)
                work = reference(table, trace, 1)
                best.append(replay(table, trace, 1, optimum).work / work)
                refusing.append(replay(table, trace, 1, picky).work / work)
                mine.append(replay(table, trace, 1, ours).work / work)
    note = f"ours {mean(mine) * 100:.2f} %"
    report.value("accepted work on one card, the optimum", mean(best) * 100, "% of repacking", note)
    note = "it turns away what fits, to keep room for larger ones"
    report.value("the same where it may refuse", mean(refusing) * 100, "% of repacking", note)


def _offline(report: Report) -> None:
    """Times the look-up whether a list of profiles has a layout. Tests compare the same with brute force."""
    table, draw = MigGeometry(H200_PROFILES), random.Random(1)
    ids = [p.id for p in H200_PROFILES]
    lists = [table.packed(draw.choice(ids) for _ in range(draw.randint(1, 8))) for _ in range(10_000)]
    began = time.perf_counter()
    found = sum(counts in table.with_counts for counts in lists)
    report.value(
        "offline: a list of profiles to a layout",
        (time.perf_counter() - began) / 1e4 * 1e6,
        "us",
        f"{found} of 10000 fit",
    )


def _transitions(report: Report) -> None:
    table = MigGeometry(H200_WITHOUT_ME)
    states = list(table.free_after)
    began = time.perf_counter()
    touched = sum(mask.bit_count() for a in states for b in states for mask in between(a, b))
    each = (time.perf_counter() - began) / len(states) ** 2
    report.value(
        "723 x 723 transitions, each", each * 1e6, "us", f"{touched / len(states) ** 2:.2f} instances touched"
    )


def _times(report: Report) -> None:
    for name, profiles in (
        ("7 slices with +me", H200_PROFILES),
        ("7 slices", H200_WITHOUT_ME),
        ("4 slices", A30_PROFILES),
    ):
        seconds = []
        for _ in range(7):
            began = time.perf_counter()
            table = MigGeometry(profiles)
            assert table.with_counts
            seconds.append(time.perf_counter() - began)
        report.add(
            latency_row(f"building the tables, {name}", seconds, note=f"{len(table.free_after)} states")
        )
    _decision(report)


LAYOUTS = [
    ((19, 6), (14, 4)),
    ((9, 4),),
    ((5, 0), (19, 6)),
    ((19, 6),),
    ((14, 4), (14, 2)),
    ((19, 5),),
    ((9, 4), (19, 0)),
    (),
]


def _decision(report: Report) -> None:
    """Measures how long the planner takes to choose among eight devices in use for a request of a MIG
    instance. For comparison it also measures the choice of a place alone, and a scan of all free places.
    """
    node = node_of(*(h200(i, mig_on=True) for i in range(8)))
    use = {f"GPU-{i}": used_mig(*places) for i, places in enumerate(LAYOUTS) if places}
    asked = [request(mig_profile=name) for name in ("1g.18gb", "2g.35gb", "3g.71gb")]
    for one in asked:
        choose(one, node, AUTO, use)
    table = MigGeometry(H200_PROFILES)
    states = [table.layout((), use[f"GPU-{i}"].mig if f"GPU-{i}" in use else ()) for i in range(8)]
    ids = [PROFILES[0], PROFILES[2], PROFILES[3]]

    def anew(number: int) -> object:
        """Decides for an equal node without cached results."""
        fresh = node_of(*(replace(device) for device in node.devices))
        return choose(asked[number % 3], fresh, AUTO, use)

    def scan(profile_id: int) -> object:
        """Evaluates every free place of the profile on every device, without a cache."""
        options = []
        for device, layout in enumerate(states):
            places = [table.slots[slot] for slot in bits(table.free(layout))]
            for place in (place for profile, place in places if profile.id == profile_id):
                after = layout._replace(slots=layout.slots | 1 << table.number[profile_id, place])
                options.append(
                    (table.worth(table.free(layout)) - table.worth(table.free(after)), device, place)
                )
        return min(options)

    def places(profile_id: int) -> object:
        found = [
            (p.cost, p.worth, i)
            for i, layout in enumerate(states)
            if (p := table.best_place(layout, profile_id))
        ]
        return min(found)

    changes = [used_mig((19, 6), (14, 4)), used_mig((9, 4)), used_mig((5, 0)), used_mig((19, 6))]

    def changed(number: int) -> object:
        """Changes one device and decides. Three devices have changed since the last request of this kind."""
        use[f"GPU-{number % 8}"] = changes[(number + number // 8) % 4]
        return choose(asked[number % 3], node, AUTO, use)

    def changed_one_kind(number: int) -> object:
        """Changes one device and decides on one request. All requests are of the same kind."""
        use[f"GPU-{number % 8}"] = changes[(number + number // 8) % 4]
        return choose(asked[0], node, AUTO, use)

    for name, work in (
        ("decision on 8 devices, none changed", lambda n: choose(asked[n % 3], node, AUTO, use)),
        ("decision on 8 devices, one changed", changed_one_kind),
        ("the same, three kinds of requests in turn: three changed", changed),
        ("decision on 8 devices, all judged anew (baseline)", anew),
        ("the place alone, by table", lambda n: places(ids[n % 3])),
        ("the place alone, by scanning (baseline)", lambda n: scan(ids[n % 3])),
    ):
        report.add(latency_row(name, [_timed(work, n) for n in range(3000)]))


def _timed(work: Callable[[int], object], number: int) -> float:
    began = time.perf_counter()
    work(number)
    return time.perf_counter() - began
