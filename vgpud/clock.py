"""The daemon's clock is the clock of the event loop. So sleeps, timeouts and time stamps agree, and a test
that advances the loop's time (tests/clock.py) advances all of them.
"""

import asyncio


def now() -> float:
    """Seconds of the running loop's monotonic clock; raises RuntimeError outside of a loop."""
    return asyncio.get_running_loop().time()
