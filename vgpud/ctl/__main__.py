"""Lets `python -m vgpud.ctl` run vgpuctl on a machine where the command is not installed."""

import sys

from vgpud.ctl.main import main

if __name__ == "__main__":
    sys.exit(main())
