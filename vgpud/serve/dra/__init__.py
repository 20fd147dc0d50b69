"""Dynamic resource allocation: what the cluster is told of the cards, and the claims that it makes."""
