"""A cluster of one node on the loopback addresses: Kubernetes' own programs, etcd and containerd.

Pods get an address that is never used, and each container has the simulated node's state, as each container
of a real node has the driver's device nodes.
"""

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.demo.node import DemoNode
from tests.e2e.support import eventually
from tests.kubelet.double import fixed_plugins
from tests.kubelet.test_daemon import reboot
from tests.ports import free_port
from tests.runtime.containerd import Containerd, documented_config

NODE = "node-1"
START_SECONDS = 300
#: the kubelet uses this constant folder, whatever its root folder is
DEVICE_PLUGINS = Path("/var/lib/kubelet/device-plugins")
#: the feature gates that docs/kubernetes.md names, which are off by default before 1.36
GATES = ("DRAConsumableCapacity", "DRADeviceTaints", "DRAExtendedResource", "DRAPartitionableDevices")
CNI = """#!/bin/sh
# a network plugin: an address that is never used
cat >/dev/null
case $CNI_COMMAND in
VERSION) echo '{"cniVersion":"0.4.0","supportedVersions":["0.3.1","0.4.0"]}' ;;
ADD) echo '{"cniVersion":"0.4.0","interfaces":[{"name":"'$CNI_IFNAME'","sandbox":"'$CNI_NETNS'"}],
  "ips":[{"version":"4","interface":0,"address":"10.88.0.2/24"}]}' ;;
esac
"""
KUBECONFIG = """apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "{server}", certificate-authority: "{authority}"}}}}]
users: [{{name: u, user: {{token: "{token}"}}}}]
contexts: [{{name: c, context: {{cluster: c, user: u}}}}]
current-context: c
"""


RUNC = """#!/bin/sh
# runc, by which a container with a GPU is lost, with its shim, before its start while {folder}/lose is there
lost() {{
    [ -e {folder}/lose ] || return 1
    for word; do
        grep -qs vgpu-hook "{folder}/state/io.containerd.runtime.v2.task/k8s.io/$word/config.json" && return 0
    done
    return 1
}}
case " $* " in
*" start "*) lost "$@" && kill -9 $PPID && exit 1 ;;
*" delete "* | *" kill "*) lost "$@" && exit 0 ;;
esac
exec {runc} "$@"
"""


def losing_runc(folder: Path) -> Path:
    """A folder with a runc that loses containers between their creation and their start while
    `folder`/lose exists.
    """
    programs = folder / "runtime"
    programs.mkdir()
    runc = shutil.which("runc", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    (programs / "runc").write_text(RUNC.format(folder=folder, runc=runc))
    (programs / "runc").chmod(0o755)
    return programs


def _gate_word(on: bool) -> str:
    return "--feature-gates=" + ",".join(f"{name}={str(on).lower()}" for name in GATES)


@dataclass
class Program:
    """A program of the cluster, which can be restarted with the same command line."""

    words: list[str]
    log: Path
    environment: Mapping[str, str]
    _process: subprocess.Popen[bytes] | None = field(init=False, default=None)

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self.words, env=self.environment, stdout=log, stderr=log)

    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(START_SECONDS)


class Cluster:
    """A one-node cluster. `programs` is a folder with kube-apiserver, kube-controller-manager,
    kube-scheduler, kubelet and kubectl.
    """

    def __init__(
        self, folder: Path, programs: Path, etcd: Path, containerd: Containerd, node: DemoNode
    ) -> None:
        self.folder, self._programs, self.containerd, self.node = folder, programs, containerd, node
        self.root = node.folder / "k"  # a short path, because a socket's path has at most 108 bytes
        self.tokens = {name: secrets.token_hex(16) for name in ("admin", "kubelet")}
        self._etcd_port, self._peer_port, self._api_port, kubelet_port = (free_port() for _ in range(4))
        self._write_credentials()
        self._kubelet_port = kubelet_port
        self._write_kubelet_config(gates=True)
        self.etcd = self._program("etcd", [str(etcd), *self._etcd_words()])
        self.api = self._program("kube-apiserver", self._api_words(gates=True))
        self.controllers = self._program("kube-controller-manager", self._controller_words(gates=True))
        self.scheduler = self._program("kube-scheduler", self._scheduler_words(gates=True))
        self.kubelet = self._program("kubelet", self._kubelet_words())

    # --- configuration

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self._api_port}"

    @property
    def authority(self) -> Path:
        """The certificate that the API server makes for itself."""
        return self.folder / "pki" / "apiserver.crt"

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "admin.conf"

    def _program(self, name: str, words: list[str]) -> Program:
        command = words if words[0].startswith("/") else [str(self._programs / name), *words]
        return Program(command, self.folder / f"{name}.log", os.environ)

    def _write_credentials(self) -> None:
        (self.folder / "pki").mkdir()
        key, public = self.folder / "sa.key", self.folder / "sa.pub"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        subprocess.run(
            ["openssl", "rsa", "-in", key, "-pubout", "-out", public], check=True, capture_output=True
        )
        admin, kubelet = self.tokens["admin"], self.tokens["kubelet"]
        lines = (f"{admin},admin,1,system:masters", f"{kubelet},system:node:{NODE},2,system:nodes")
        (self.folder / "tokens.csv").write_text("\n".join(lines) + "\n")
        for name, token in self.tokens.items():
            text = KUBECONFIG.format(server=self.server, authority=self.authority, token=token)
            (self.folder / f"{name}.conf").write_text(text)

    def _write_kubelet_config(self, gates: bool) -> None:
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": self._kubelet_port,
            "featureGates": dict.fromkeys(GATES, gates),
            "healthzPort": 0,
            "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "containerRuntimeEndpoint": f"unix://{self.containerd.socket}",
            "podLogsDir": str(self.folder / "pods"),
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
            "imageGCHighThresholdPercent": 100,
            "maxPods": 250,
            # the kubelet tries to prepare a failed claim again after this time; by default after 60 to 90 s
            "syncFrequency": "1s",
            "nodeStatusUpdateFrequency": "1s",
        }
        (self.folder / "kubelet.json").write_text(json.dumps(config))

    def _etcd_words(self) -> list[str]:
        client, peer = (f"http://127.0.0.1:{port}" for port in (self._etcd_port, self._peer_port))
        return [
            f"--data-dir={self.folder}/etcd",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        ]

    def _api_words(self, gates: bool) -> list[str]:
        return [
            _gate_word(gates),
            # with DRADeviceTaints other programs watch this version of the API; a server that lacks it only
            # logs that
            "--runtime-config=resource.k8s.io/v1alpha3=true",
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._api_port}",
            # an address for documentation, which is never used; the API server refuses a loopback address
            "--advertise-address=198.51.100.1",
            "--endpoint-reconciler-type=none",
            f"--cert-dir={self.folder}/pki",
            f"--token-auth-file={self.folder}/tokens.csv",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--disable-admission-plugins=ServiceAccount",
            "--service-cluster-ip-range=10.96.0.0/24",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.folder}/sa.pub",
            f"--service-account-signing-key-file={self.folder}/sa.key",
        ]

    def _scheduler_words(self, gates: bool) -> list[str]:
        return [
            _gate_word(gates),
            "--leader-elect=false",
            "--secure-port=0",
            f"--kubeconfig={self.kubeconfig}",
        ]

    def _controller_words(self, gates: bool) -> list[str]:
        return [
            _gate_word(gates),
            f"--kubeconfig={self.kubeconfig}",
            f"--service-account-private-key-file={self.folder}/sa.key",
            f"--root-ca-file={self.authority}",
            "--leader-elect=false",
            "--secure-port=0",
        ]

    def _kubelet_words(self) -> list[str]:
        plugins = fixed_plugins(self.root)
        for path in (plugins, DEVICE_PLUGINS):
            path.mkdir(parents=True, exist_ok=True)
        kubelet = [
            str(self._programs / "kubelet"),
            f"--config={self.folder}/kubelet.json",
            f"--kubeconfig={self.folder}/kubelet.conf",
            f"--hostname-override={NODE}",
            f"--root-dir={self.root}",
            f"--cert-dir={self.folder}/kubelet-pki",
            "--vmodule=kubelet=4",  # with this level the log has the time of each pod's end
        ]
        # in the kubelet's mount namespace a folder of the test lies over the kubelet's constant folder
        own = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
        return [
            *("/usr/bin/unshare", "--mount", "--propagation=slave", "sh", "-ec", own, "sh"),
            *(str(plugins), str(DEVICE_PLUGINS), *kubelet),
        ]

    # --- life

    def start(self) -> None:
        """Returns when the node is ready."""
        self.etcd.start()
        self.start_api()
        self.controllers.start()
        self.scheduler.start()
        self.kubelet.start()
        eventually(self.ready, "the node is ready", START_SECONDS)

    def start_api(self) -> None:
        self.api.start()
        eventually(
            lambda: self.api.ended() or self.kubectl("get", "--raw=/readyz", check=False).returncode == 0,
            "the API server is ready",
            START_SECONDS,
        )
        assert not self.api.ended(), self.api.log.read_text()[-3000:]

    def restart_with_gates(self, gates: bool) -> None:
        """Restarts Kubernetes' programs with all gates on or off."""
        self.kubelet.stop()
        for program, words in (
            (self.scheduler, self._scheduler_words),
            (self.controllers, self._controller_words),
            (self.api, self._api_words),
        ):
            program.stop()
            program.words[1:] = words(gates)
        self._write_kubelet_config(gates)
        self.start_api()
        for program in (self.controllers, self.scheduler, self.kubelet):
            program.start()

    def ready(self) -> bool:
        assert not self.kubelet.ended(), self.kubelet.log.read_text()[-3000:]
        found = self.kubectl("get", "node", NODE, "-o", "json", check=False)
        if found.returncode != 0:
            return False
        conditions = json.loads(found.stdout)["status"]["conditions"]
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def reboot(self) -> None:
        """Ends all processes of the node, empties /run, and starts the node's services in the order that
        vgpud's unit sets. The control plane runs on, as on another machine.
        """
        self.kubelet.kill()
        self.containerd.kill()
        self.containerd.end_containers()
        reboot(self.node)
        self.containerd.start()
        self.node.start()
        self.kubelet.start()

    def stop(self) -> None:
        for program in (self.kubelet, self.scheduler, self.controllers, self.api, self.etcd):
            program.stop()
        shutil.rmtree(self.root, ignore_errors=True)

    # --- objects

    def kubectl(self, *words: str, stdin: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [self._kubectl(), f"--kubeconfig={self.kubeconfig}", f"--cache-dir={self.folder}/cache", *words],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
        )
        if check:
            assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
        return done

    def _kubectl(self) -> str:
        own = self._programs / "kubectl"
        return str(own) if own.exists() else "kubectl"

    def minor(self) -> int:
        """The minor version of the API server."""
        return int(json.loads(self.kubectl("version", "-o", "json").stdout)["serverVersion"]["minor"])

    def apply(self, *objects: Mapping[str, Any]) -> None:
        """Creates the objects, or changes them."""
        self.kubectl(
            "apply", "-f", "-", stdin=json.dumps({"kind": "List", "apiVersion": "v1", "items": objects})
        )

    def get(self, *words: str) -> Any:
        """Returns the object that `kubectl get WORDS` names, or all objects if it lists several."""
        found = json.loads(self.kubectl("get", *words, "-o", "json").stdout)
        return found.get("items", found)


def cluster_config(release: str, node: DemoNode, folder: Path, base_spec: Path) -> str:
    """containerd's documented configuration, with a network and a container specification of the tests."""
    programs, networks = folder / "cni", folder / "net.d"
    programs.mkdir()
    networks.mkdir()
    for name in ("loopback", "vgpud-test"):
        (programs / name).write_text(CNI)
        (programs / name).chmod(0o755)
    network = {"cniVersion": "0.4.0", "name": "test", "plugins": [{"type": "vgpud-test"}]}
    (networks / "10-test.conflist").write_text(json.dumps(network))
    head = '[plugins."io.containerd.grpc.v1.cri"]\n'
    # a killed run then leaves no network namespaces outside the test's folder
    own = f"{head}    netns_mounts_under_state_dir = true\n"
    config = documented_config(release, node.folder / "cdi").replace(head, own)
    config = config.replace('"/usr/lib/cni"', f'"{programs}"').replace('"/etc/cni/net.d"', f'"{networks}"')
    return config.replace(
        'runtime_type = "io.containerd.runc.v2"',
        f'runtime_type = "io.containerd.runc.v2"\n  base_runtime_spec = "{base_spec}"',
    )


def write_base_spec(ctr: Path, state: str, path: Path) -> None:
    """Writes containerd's default specification of containers, with the state of the simulated node added."""
    shown = subprocess.run([ctr, "oci", "spec"], capture_output=True, text=True, check=True)
    spec = json.loads(shown.stdout)
    spec["process"]["env"] = [f"VGPU_SIM_STATE={state}"]
    spec["mounts"].append({"destination": state, "source": state, "type": "bind", "options": ["rbind", "rw"]})
    path.write_text(json.dumps(spec))
