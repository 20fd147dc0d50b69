"""A program of a remote slice: it sends its standard input to the engine, and prints what comes back."""

import os
import socket
import sys


def main() -> None:
    host, _, port = os.environ["LUPINE_SERVER"].rpartition(":")
    with socket.create_connection((host, int(port))) as made, made.makefile("rw") as lines:
        for line in sys.stdin:
            if line.startswith("exit "):
                sys.exit(int(line.split()[1]))
            lines.write(line)
            lines.flush()
            sys.stdout.write(lines.readline() or "closed\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
