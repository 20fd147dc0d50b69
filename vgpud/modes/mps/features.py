"""Finds out which features this node's nvidia-cuda-mps-control has, by probing the program and not from the
driver's version.

A command exists if the program's file contains its name (checked with NVIDIA's branches 470 to 615); this
needs no daemon. `-v` is run too: branches up to 550 open a command prompt instead, so the program gets no
input and a short timeout.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_VERSION_SECONDS = 3.0
_VOLTA = (7, 0)
# `Binary version` of the first release that allows 60 clients: CUDA 13.1, R590 (MPS guide, "client limits")
_SIXTY_CLIENTS = 13010
# `Binary version` of the first release with static SM partitions (MPS guide, "Static SM Partitioning")
_PARTITIONS = 13010


@dataclass(frozen=True, slots=True)
class Features:
    """The features of nvidia-cuda-mps-control. `version` is the number that `-v` prints (13000 is CUDA 13.0),
    or 0 if it prints none.
    """

    version: int = 0
    memory_limits: bool = False
    server_status: bool = False
    terminate: bool = False
    priority: bool = False
    multi_user: bool = False
    partitions: bool = False

    def client_limit(self, compute_capability: tuple[int, int] | None) -> int:
        """The number of client processes that one server accepts: 16 before Volta, 48 since Volta, 60 since
        CUDA 13.1.
        """
        if compute_capability is not None and compute_capability < _VOLTA:
            return 16
        return 60 if self.version >= _SIXTY_CLIENTS else 48


def probe(program: str) -> Features:
    """The features of the program, or Features() if the program is missing. If the file changes, it is probed
    again.
    """
    found = shutil.which(program)
    if found is None:
        return Features()
    stat = Path(found).stat()
    return _probe(found, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4)
def _probe(program: str, mtime_ns: int, size: int) -> Features:
    text = Path(program).read_bytes()
    version = _version(program)
    return Features(
        version=version,
        memory_limits=b"set_default_device_pinned_mem_limit" in text,
        server_status=b"get_server_status" in text,
        terminate=b"terminate_client" in text,
        priority=b"set_default_client_priority" in text,
        multi_user=b"multiuser-server" in text,
        partitions=b"sm_partition" in text and version >= _PARTITIONS,
    )


def _version(program: str) -> int:
    try:
        done = subprocess.run(
            [program, "-v"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_VERSION_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.search(r"Binary version: ([0-9]+)", done.stdout)
    return int(match.group(1)) if match else 0
