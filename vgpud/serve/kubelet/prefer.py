"""Chooses ids that vgpud prefers. The kubelet follows this advice if its topology policy allows it. Pure.

For whole cards and MIG instances: from cards near each other. For parts and units of memory: if possible from
one card, which is the fullest or the emptiest card with enough, by the policy's strategy.
"""

from collections.abc import Callable, Iterable, Sequence

from vgpud.model.device import Device
from vgpud.serve.kubelet.resources import Resource, card_of

Nearest = Callable[[tuple[str, ...], tuple[str, ...], int], tuple[str, ...]]


def preferred(
    resource: Resource,
    devices: Sequence[Device],
    available: Sequence[str],
    must: Sequence[str],
    size: int,
    spread: bool,
    nearest: Nearest,
) -> tuple[str, ...]:
    """Chooses `size` ids of `available`, including `must`; fewer only if `available` has fewer."""
    by_card: dict[str, list[str]] = {}
    for name in dict.fromkeys((*must, *available)):
        card = card_of(resource, name, devices)
        if card is not None:
            by_card.setdefault(card.uuid, []).append(name)
    musts = [name for name in must if any(name in names for names in by_card.values())]
    if resource.divisible:
        even = _even(by_card, size) if resource.rule.across == "even" and not musts else ()
        order = even or _one_card_first(by_card, musts, size, spread)
    else:
        order = _near_cards(by_card, musts, size, nearest)
    return tuple(dict.fromkeys((*musts, *order)))[:size]


def _one_card_first(
    by_card: dict[str, list[str]], musts: Sequence[str], size: int, spread: bool
) -> Iterable[str]:
    def key(item: tuple[str, list[str]]) -> tuple[bool, bool, int]:
        names = item[1]
        bound = bool(musts) and not set(musts) <= set(names)
        enough = len(names) >= size
        # Cards that have all `musts` come first, then cards with enough ids. Among those with enough, the
        # card with the fewest is the best start, or with `spread` the card with the most. If none has enough,
        # the card with the most is the best start.
        return bound, not enough, -len(names) if spread or not enough else len(names)

    return [name for _, names in sorted(by_card.items(), key=key) for name in names]


def _even(by_card: dict[str, list[str]], size: int) -> tuple[str, ...]:
    """Equal numbers of ids from as few cards as suffice; empty if one card is enough."""
    full = sorted(by_card.values(), key=len, reverse=True)
    for cards in range(1, len(full) + 1):
        each, rest = divmod(size, cards)
        if not rest and len(full[cards - 1]) >= each:
            return () if cards == 1 else tuple(name for names in full[:cards] for name in names[:each])
    return ()


def _near_cards(
    by_card: dict[str, list[str]], musts: Sequence[str], size: int, nearest: Nearest
) -> Iterable[str]:
    """One id of each card, from cards near each other. A card gives more ids only if there are too
    few cards.
    """
    bound = tuple(uuid for uuid, names in by_card.items() if not set(musts).isdisjoint(names))
    cards = nearest(tuple(by_card), bound, min(size, len(by_card)))
    longest = max(map(len, by_card.values()), default=0)
    return [by_card[uuid][i] for i in range(longest) for uuid in cards if i < len(by_card[uuid])]
