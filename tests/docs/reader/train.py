"""Replaces a reader's program: prints nothing, and fails outside of an allocation."""

import os
import sys

sys.exit("VGPU_ALLOCATION" not in os.environ)
