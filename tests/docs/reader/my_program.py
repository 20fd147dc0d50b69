"""Stands in for a program that looks for a GPU: fails where it finds no driver."""

import ctypes
import sys

sys.exit(ctypes.CDLL("libcuda.so.1").cuInit(0))
