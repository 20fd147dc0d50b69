"""vgpud: shares the NVIDIA GPUs of a Linux node as enforced slices."""

__version__ = "0.1.0"
