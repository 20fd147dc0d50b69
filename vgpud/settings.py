"""The daemon's settings from VGPUD_* environment variables. Policy is in TOML files."""

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.policy.layers import PolicyPaths

_INSTALLED_LIBRARIES = Path("/usr/lib/vgpud")
# the longest path of a socket below the kubelet's root folder
_KUBELET_SOCKET = "plugins_registry/gpu.vgpud.io-reg.sock"
_NEAR = 0.7  # how similar a misspelt name is to the setting's; the names of other programs are below that
_SOCKET_BYTES = 107  # maximum length of a socket's path in sockaddr_un (unix(7))


class Settings(BaseSettings):
    """The settings. Defaults are for a packaged installation; a test or a laptop sets other folders."""

    model_config = SettingsConfigDict(env_prefix="VGPUD_", frozen=True)

    run_dir: Path = Field(Path("/run/vgpud"), description="sockets, leases, helpers; lost at reboot")
    state_dir: Path = Field(Path("/var/lib/vgpud"), description="the ledger; must survive a reboot")
    config: Path = Field(Path("/etc/vgpud/vgpud.toml"), description="the main policy file")
    cdi_dir: Path = Field(Path("/var/run/cdi"), description="where CDI specs of allocations go")
    host_root: Path = Field(Path("/"), description="root below which /dev and /proc of the driver are read")
    lib_dir: Path = Field(_INSTALLED_LIBRARIES, description="holds libvgpu.so")
    arbiter: Path = Field(_INSTALLED_LIBRARIES / "vgpu-arbiter", description="the arbiter program")
    hook: Path = Field(_INSTALLED_LIBRARIES / "vgpu-hook", description="the program behind containers' hooks")
    suspender: Path = Field(
        _INSTALLED_LIBRARIES / "vgpu-suspend", description="the program that suspends processes"
    )
    engine_probe: Path = Field(
        _INSTALLED_LIBRARIES / "vgpu-engine-probe",
        description="the program that finds out if a device can have the engine cut",
    )
    group: str = Field("vgpu", description="group that may allocate; empty: the daemon's own group")
    log_level: str = Field(
        "info",
        description="debug, info, warning or error; at debug all allocations are checked after each change",
    )
    nvml_deadline_seconds: float = Field(10.0, gt=0, description="a single NVML call may take this long")
    kubelet_dir: Path = Field(Path("/var/lib/kubelet"), description="the kubelet's root folder (--root-dir)")
    device_plugins_dir: Path = Field(
        Path("/var/lib/kubelet/device-plugins"),
        description="tests only: device plugins' sockets, which a kubelet's root folder does not move",
    )
    kubeconfig: Path = Field(
        Path("/etc/kubernetes/vgpud.conf"), description="how the API server is reached, for dra"
    )
    node_name: str = Field("", description="the node's name in the cluster; empty: the host's name")
    cgroup: str = Field(
        "vgpud",
        description="folder, below the mount of cgroup v2, for the control groups of tenants; "
        "made only if the driver limits the memory of groups",
    )
    mps_control: str = Field("nvidia-cuda-mps-control", description="NVIDIA's MPS control daemon")
    any_run_dir: bool = Field(
        False,
        description="tests only: run_dir may be where a container's root can leave set-user-id programs",
    )
    fault_point: str = Field("", description="tests only: the daemon kills itself after this step")

    @field_validator("kubelet_dir")
    @classmethod
    def _has_room_for_sockets(cls, folder: Path) -> Path:
        longest = len(os.fsencode(folder / _KUBELET_SOCKET))
        if not folder.is_absolute() or longest > _SOCKET_BYTES:
            raise ValueError(
                f"{folder} cannot hold the kubelet's sockets: it must be absolute, and leave room for "
                f"{_KUBELET_SOCKET} in {_SOCKET_BYTES} bytes"
            )
        return folder

    def policy_paths(self) -> PolicyPaths:
        return PolicyPaths(
            main=self.config,
            # If a configured path does not exist, that is an error; the built-in policy is not used.
            main_required="config" in self.model_fields_set,
            vendor_dir=_INSTALLED_LIBRARIES / "conf.d",
            run_dir=self.run_dir / "conf.d",
            admin_dir=self.config.parent / "conf.d",
            is_roots=os.geteuid() == 0,
        )

    @property
    def node(self) -> str:
        """The node's name in Kubernetes. The default is the same as the kubelet's."""
        return self.node_name or socket.gethostname().lower()

    @property
    def level(self) -> int:
        """The level as a number of the logging module. Raises VgpuError(BAD_SETTING)."""
        number = logging.getLevelNamesMapping().get(self.log_level.upper())
        if number is None:
            raise VgpuError(
                ErrorCode.BAD_SETTING,
                f"VGPUD_LOG_LEVEL is {self.log_level!r}, which is not a log level",
                "use debug, info, warning or error",
            )
        return number


def misspelt(environment: Mapping[str, str]) -> Iterator[str]:
    """Sentences on variables that are probably misspelt settings. A VGPUD_* variable that resembles no
    setting is passed over, because other programs have such variables too: VGPUD_SOCKET is vgpuctl's.
    """
    for name in sorted(environment):
        prefix, _, rest = name.upper().partition("VGPUD_")
        if prefix or not rest or rest.lower() in Settings.model_fields:
            continue
        for near in get_close_matches(rest.lower(), Settings.model_fields, n=1, cutoff=_NEAR):
            yield f"{name} is not a setting of vgpud: did you mean VGPUD_{near.upper()}"


def load_settings() -> Settings:
    """Reads the settings. Raises VgpuError(BAD_SETTING), which names every invalid variable except
    VGPUD_LOG_LEVEL, which `level` checks.
    """
    try:
        return Settings()
    except ValidationError as error:
        wrong = [f"VGPUD_{str(e['loc'][0]).upper()}: {e['msg'].lower()}" for e in error.errors()]
        raise VgpuError(
            ErrorCode.BAD_SETTING, f"bad setting {wrong[0]}", "correct the variable", tuple(wrong)
        ) from None
