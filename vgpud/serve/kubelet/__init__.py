"""The kubelet's door: its device plugin API, and its PodResources API."""
