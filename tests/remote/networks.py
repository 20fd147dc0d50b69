"""Two networks for one test, joined by one link: that of the node and that of the client. They end with their
processes.
"""

import subprocess
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tests.lease.conftest import eventually as until

NODE, CLIENT = "192.0.2.1", "192.0.2.2"


def _is_apart(pid: int) -> bool:
    return Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()


class Networks:
    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        with ExitStack() as undone:
            undone.callback(self.close)
            for _ in range(2):
                # cat ends when its standard input is closed, which the kernel does at the end of this process
                self._holders.append(subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE))
            for holder in self._holders:
                until(partial(_is_apart, holder.pid))
            client = str(self._holders[1].pid)
            link = ("link", "add", "node", "type", "veth", "peer", "name", "client", "netns", client)
            self._ip(self.node, *link)
            for within, name, address in ((self.node, "node", NODE), (self.client, "client", CLIENT)):
                self._ip(within, "address", "add", f"{address}/30", "dev", name)
                self._ip(within, "link", "set", name, "up")
                self._ip(within, "link", "set", "lo", "up")
            undone.pop_all()

    @property
    def node(self) -> list[str]:
        """The beginning of a command that runs in the node's network."""
        return self._within(0)

    @property
    def client(self) -> list[str]:
        return self._within(1)

    def cut(self) -> None:
        """Cuts the link. No packet passes any more, so neither side notices the end of a connection."""
        self._ip(self.node, "link", "set", "node", "down")

    def close(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.communicate()

    def _within(self, number: int) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._holders[number].pid}/ns/net"]

    def _ip(self, within: list[str], *words: str) -> None:
        subprocess.run([*within, "ip", *words], check=True)
