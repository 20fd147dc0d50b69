"""`python -m tests.oldkernel COMMAND...`: runs the command as on a kernel before 6.5, which has fewer ways to
identify processes, and passes descriptors to programs that do not want any.

A seccomp filter refuses SO_PEERPIDFD (Linux 6.5), PIDFD_GET_USER_NAMESPACE (6.11) and SO_PASSRIGHTS (6.16) as
that kernel does, so vgpud's code for it runs. If the
caller is not root, the command cannot gain privileges, for example by a set-user-id program.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from importlib import import_module

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2  # from prctl(2)
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # from linux/bpf_common.h: BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000  # from linux/seccomp.h
# offsets in struct seccomp_data: the call, and the low words of the second and third argument
_NUMBER, _SECOND, _THIRD = 0, 24, 32
# numbers of getsockopt, setsockopt and ioctl
_CALLS = {"x86_64": (55, 54, 16), "aarch64": (209, 208, 29)}
_SO_PEERPIDFD, _SO_PASSRIGHTS, _PIDFD_GET_USER_NAMESPACE = 77, 83, 0xFF09


def words() -> list[str]:
    """Returns the beginning of a command line that runs a command as on an older kernel."""
    return [sys.executable, "-m", "tests.oldkernel"]


def _filter() -> bytes:
    getsockopt, setsockopt, ioctl = _CALLS[platform.machine()]
    rows = [
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 0, 2, getsockopt),
        (_LOAD, 0, 0, _THIRD),
        (_EQUAL, 3, 8, _SO_PEERPIDFD),
        (_EQUAL, 0, 3, setsockopt),
        (_LOAD, 0, 0, _THIRD),
        (_EQUAL, 0, 5, _SO_PASSRIGHTS),
        (_RETURN, 0, 0, _ERRNO | errno.ENOPROTOOPT),
        (_EQUAL, 0, 3, ioctl),
        (_LOAD, 0, 0, _SECOND),
        (_EQUAL, 0, 1, _PIDFD_GET_USER_NAMESPACE),
        (_RETURN, 0, 0, _ERRNO | errno.ENOTTY),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("<HBBI", *row) for row in rows)


def _confine() -> None:
    code = _filter()
    rows = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(rows))
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0:
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, program, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel takes no filter")


def main() -> int:
    """In a process that tests/prepared.py forked: runs the command `python -m MODULE...` without an exec."""
    _confine()
    module = sys.argv[3]
    sys.argv = [module, *sys.argv[4:]]
    return int(import_module(module).main())


if __name__ == "__main__":
    _confine()
    os.execvp(sys.argv[1], sys.argv[1:])
