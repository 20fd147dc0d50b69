"""Dynamic resource allocation: the cards that are published to the cluster, and its claims on them."""
