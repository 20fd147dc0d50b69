"""Stands in for a program of the reader's: says nothing, and fails where it is not under an allocation."""

import os
import sys

sys.exit("VGPU_ALLOCATION" not in os.environ)
