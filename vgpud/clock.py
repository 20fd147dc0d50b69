"""The daemon's clock, which is the event loop's: pauses, timeouts and what is compared with them agree, and a
test that turns the loop's time (tests/clock.py) turns all of them."""

import asyncio


def now() -> float:
    """Seconds of the running loop's monotonic clock; raises RuntimeError outside of a loop."""
    return asyncio.get_running_loop().time()
