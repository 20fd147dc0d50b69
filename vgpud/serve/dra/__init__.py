"""Dynamic resource allocation (DRA): publishes cards to the Kubernetes cluster, and prepares claims
on them.
"""
