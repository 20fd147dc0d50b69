"""Stands for a program that needs a GPU: it fails if it finds no driver."""

import ctypes
import sys

sys.exit(ctypes.CDLL("libcuda.so.1").cuInit(0))
