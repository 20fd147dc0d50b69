"""`python -m vgpud.ctl` is vgpuctl where it is not installed."""

import sys

from vgpud.ctl.main import main

if __name__ == "__main__":
    sys.exit(main())
