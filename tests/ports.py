"""A TCP port for a server that a test starts later."""

import random
import socket

# The range is below the ports that Linux gives to clients' sockets (32768 and up, ip(7)). Another test's
# connection could take such a port before the server starts.
_FIRST, _LAST = 20000, 32000


def free_port() -> int:
    """A TCP port on which nothing listens on any IPv4 address. Raises OSError if 100 random ports are
    in use.
    """
    # Hypothesis seeds the functions of the module `random` equally in each worker, so they are not used
    for port in random.SystemRandom().sample(range(_FIRST, _LAST), 100):
        try:
            socket.create_server(("", port)).close()
        except OSError:
            continue
        return port
    raise OSError(f"100 random ports from {_FIRST} to {_LAST} are in use")
