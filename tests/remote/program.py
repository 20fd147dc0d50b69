"""A program for a remote slice: it sends its standard input to the engine, and prints the answers."""

import os
import socket
import sys
from io import TextIOWrapper


def main() -> None:
    host, _, port = os.environ["LUPINE_SERVER"].rpartition(":")
    with socket.create_connection((host, int(port))) as made, made.makefile("rw") as lines:
        for line in sys.stdin:
            if line.startswith("exit "):
                sys.exit(int(line.split()[1]))
            sys.stdout.write(answered(lines, line) or "closed\n")
            sys.stdout.flush()


def answered(lines: TextIOWrapper, line: str) -> str:
    """The engine's answer, or "" if the connection is closed before or while the line is sent."""
    try:
        lines.write(line)
        lines.flush()
        return lines.readline()
    except OSError:
        return ""


if __name__ == "__main__":
    main()
