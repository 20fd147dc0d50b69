"""A client of a container engine's CRI, in place of the kubelet. Pods have the host's network."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from tests.e2e.support import eventually
from tests.runtime.containerd import IMAGE

NODE_NETWORK = 2
SECONDS = 300


@dataclass(frozen=True)
class Pod:
    id: str
    config: Any


class Cri:
    def __init__(self, socket: Path) -> None:
        messages, services = grpc.protos_and_services("tests/runtime/cri.proto")
        self.messages: Any = messages
        self._channel = grpc.insecure_channel(f"unix:{socket}")
        self._calls: Any = services.RuntimeServiceStub(self._channel)
        self.ready()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()
        self._channel.close()

    def call(self, name: str, **fields: Any) -> Any:
        """Calls a method whose request has these fields."""
        method = self.messages.DESCRIPTOR.services_by_name["RuntimeService"].methods_by_name[name]
        request = getattr(self.messages, method.input_type.name)(**fields)
        return getattr(self._calls, name)(request, timeout=SECONDS, wait_for_ready=True)

    def ready(self) -> None:
        """Waits until the engine has read its state. Until then it refuses calls."""

        def initialized() -> bool:
            try:
                self.call("Status")
            except grpc.RpcError as error:
                if "not initialized" in str(error.details()):
                    return False
                raise
            return True

        eventually(initialized, "the engine's CRI is initialized")

    def pod(self, name: str, handler: str = "", annotations: Mapping[str, str] | None = None) -> Pod:
        config = self.messages.PodSandboxConfig(
            metadata={"name": name, "uid": f"uid-{name}", "namespace": "default"},
            annotations=annotations or {},
            linux={"security_context": {"namespace_options": {"network": NODE_NETWORK}}},
        )
        made = self.call("RunPodSandbox", config=config, runtime_handler=handler).pod_sandbox_id
        return Pod(made, config)

    def start(self, pod: Pod, state: str, cdi: str = "") -> str:
        """Starts a container that sleeps, on the simulated node whose state is in the folder `state`. Returns
        its id. Raises grpc.RpcError if the engine refuses it.
        """
        config = self.messages.ContainerConfig(
            metadata={"name": "main"},
            image={"image": IMAGE},
            command=["/usr/bin/sleep", "600"],
            envs=[{"key": "VGPU_SIM_STATE", "value": state.encode()}],
            mounts=[{"container_path": state, "host_path": state}],
            linux={"security_context": {"namespace_options": {"network": NODE_NETWORK}}},
            CDI_devices=[{"name": cdi}] if cdi else [],
        )
        made = self.call("CreateContainer", pod_sandbox_id=pod.id, config=config, sandbox_config=pod.config)
        self.call("StartContainer", container_id=made.container_id)
        return str(made.container_id)

    def run(self, container: str, *words: str) -> str:
        """Runs a program in the container. Returns its output, or its error output if it failed."""
        done = self.call("ExecSync", container_id=container, cmd=words)
        said: bytes = done.stderr if done.exit_code else done.stdout
        return said.decode().strip()

    def running(self, container: str) -> bool:
        state = self.call("ContainerStatus", container_id=container).status.state
        return bool(state == self.messages.RUNNING)

    def clear(self) -> None:
        """Removes all pods of the engine, with their containers."""
        for pod in self.call("ListPodSandbox").items:
            self.call("StopPodSandbox", pod_sandbox_id=pod.id)
            self.call("RemovePodSandbox", pod_sandbox_id=pod.id)
