"""The cards that a resource of the kubelet offers."""

from tests.planner.cards import h200
from vgpud.policy.model import Policy
from vgpud.serve.kubelet.resources import offered, resources_of


def test_a_resource_offers_only_the_cards_that_its_rule_matches() -> None:
    rule = {"name": "vgpud.io/gpu", "kind": "card", "match": {"index": 1}}
    settings = Policy.model_validate({"kubelet": {"resource": [rule]}}).kubelet
    cards = tuple(h200(index) for index in range(3))
    (resource,) = resources_of(settings, cards, lambda _: {})
    assert [offered(resource, card, {}, card.memory_usable_bytes) for card in cards] == [0, 1, 0]
