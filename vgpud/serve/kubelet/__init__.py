"""The servers for the kubelet: vgpud's device plugins. It also reads the kubelet's PodResources API."""
