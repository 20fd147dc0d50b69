"""Lets `python -m vgpud.ctl` run vgpuctl where it is not installed."""

import sys

from vgpud.ctl.main import main

if __name__ == "__main__":
    sys.exit(main())
