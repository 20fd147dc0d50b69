"""A stand-in for the server of a remote engine: one process for each connection, and lines of text.

`alloc BYTES` allocates device memory and answers with the CUresult. `zeros BYTES` answers with that many
bytes. `uid`, `gid`, `groups`, `pids`, `interfaces` and `echo TEXT` answer with what they name. CUDA starts at
the first `alloc`.
"""

import ctypes
import os
import socket
from pathlib import Path


def serve(connection: socket.socket) -> None:
    cuda: ctypes.CDLL | None = None
    with connection, connection.makefile("rw") as lines:
        for line in lines:
            verb, _, rest = line.rstrip("\n").partition(" ")
            if verb == "alloc":
                cuda = cuda or start_cuda()
                said = str(cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(int(rest))))
            elif verb == "zeros":
                said = "0" * int(rest)
            elif verb == "uid":
                said = str(os.getuid())
            elif verb == "gid":
                said = str(os.getgid())
            elif verb == "groups":
                said = " ".join(map(str, os.getgroups()))
            elif verb == "pids":
                said = " ".join(sorted(path.name for path in Path("/proc").glob("[0-9]*")))
            elif verb == "interfaces":
                said = " ".join(name for _, name in socket.if_nameindex())
            else:
                said = rest
            lines.write(said + "\n")
            lines.flush()


def start_cuda() -> ctypes.CDLL:
    cuda = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    return cuda


def main() -> None:
    with socket.create_server(("0.0.0.0", int(os.environ["LUPINE_PORT"]))) as listener:
        while True:
            connection, _ = listener.accept()
            while _reaped():
                pass
            if os.fork() == 0:
                listener.close()
                serve(connection)
                os._exit(0)
            connection.close()


def _reaped() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


if __name__ == "__main__":
    main()
