"""Stands for a reader's training program: it prints nothing, and fails outside of an allocation."""

import os
import sys

sys.exit("VGPU_ALLOCATION" not in os.environ)
