"""The kubelet's door: its device plugin API, and what its PodResources API says of pods."""
