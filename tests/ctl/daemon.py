"""A real gRPC server on a Unix socket that sends prepared replies and records the requests."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc

from tests.ctl import canned
from vgpud.api import status
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.api.gen.vgpud_pb2_grpc import VgpudServicer, add_VgpudServicer_to_server
from vgpud.model.errors import VgpuError

METHODS = (
    "GetNode",
    "ListDevices",
    "Allocate",
    "Release",
    "Resize",
    "Suspend",
    "DrainDevice",
    "GetAllocation",
    "ListAllocations",
    "Plan",
    "GetPolicy",
    "ReloadPolicy",
    "GetUsage",
    "Defrag",
    "PlanDefrag",
    "ListProcesses",
    "ListEvents",
    "ListMps",
    "ListMig",
)


class Daemon:
    """A fake daemon. `replies` maps a method to a message, to a VgpuError that is raised, or to a
    function.
    """

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.asked: list[tuple[str, Any]] = []
        self.replies: dict[str, Any] = {
            "GetNode": canned.node(),
            "ListDevices": canned.devices(),
            "Allocate": canned.preload(),
            "Release": pb.ReleaseReply(),
            "Resize": canned.preload(),
            "Suspend": canned.preload(),
            "GetAllocation": canned.used(),
            "ListAllocations": canned.allocations(),
            "Plan": canned.plan(),
            "GetPolicy": canned.policy(),
            "ReloadPolicy": pb.ReloadPolicyReply(digest="5e0a"),
            "GetUsage": canned.usage(),
            "ListProcesses": canned.processes(),
            "ListEvents": canned.events(),
            "ListMps": pb.ListMpsReply(),
            "ListMig": pb.ListMigReply(),
        }
        self.watches: list[Callable[[pb.WatchRequest], Iterator[pb.Event]]] = []
        self.server: grpc.Server | None = None
        for method in METHODS:
            setattr(self, method, self._answer(method))

    def __getattr__(self, name: str) -> Any:
        """Answers a method that has no reply as unimplemented."""
        return partial(getattr(VgpudServicer, name), self)

    def start(self) -> None:
        self.server = grpc.server(ThreadPoolExecutor(4))
        add_VgpudServicer_to_server(cast(VgpudServicer, self), self.server)
        assert self.server.add_insecure_port(f"unix:{self.socket}")
        self.server.start()

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop(None).wait()
        self.server = None

    def requests(self, method: str) -> list[Any]:
        return [request for name, request in self.asked if name == method]

    def _answer(self, method: str) -> Callable[[Any, grpc.ServicerContext], Any]:
        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            self.asked.append((method, request))
            reply = self.replies[method]
            if callable(reply):
                reply = reply(request)
            if isinstance(reply, VgpuError):
                context.abort_with_status(status.to_status(reply))
            return reply

        return answer

    def Watch(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[pb.Event]:  # noqa: N802
        self.asked.append(("Watch", request))
        context.send_initial_metadata(())
        try:
            yield from self.watches.pop(0)(request)
        except VgpuError as failure:
            context.abort_with_status(status.to_status(failure))
