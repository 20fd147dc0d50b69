"""Commands that sentences of the docs name, each with the command that a test runs for it, and commands that
no test runs.

A command that some page's block contains, or begins with, is in none of these tables.
"""

#: Run on the simulated node. $HELD is an allocation, $PID a process of it, and $CLIENT a process under MPS.
ON_NODE = {
    "vgpuctl run --memory 8GiB --cores 25 -- PROGRAM": "vgpuctl run --memory 8GiB --cores 25 -- true",
    "vgpuctl resize ALLOCATION --cores N": "vgpuctl resize $HELD --cores 30",
    "vgpuctl run --count 2": "vgpuctl run --count 2 -- python train.py",
    "vgpuctl mig export": "vgpuctl mig export",
    "vgpuctl drain DEVICE": "vgpuctl drain 1",
    "vgpuctl undrain DEVICE": "vgpuctl undrain 1",
    "vgpuctl drain N": "vgpuctl drain 1 && vgpuctl undrain 1",
    "vgpuctl undrain N": "vgpuctl drain 1 && vgpuctl undrain 1",
    "vgpuctl explain ALLOCATION": "vgpuctl explain $HELD",
    "vgpuctl show ID": "vgpuctl show $HELD",
    "vgpuctl --timeout 120 suspend ...": "vgpuctl --timeout 120 suspend $HELD && vgpuctl resume $HELD",
    "vgpuctl why PID": "vgpuctl why $PID",
    "vgpuctl top --sort waited": "vgpuctl top --sort waited",
    "vgpuctl top -1 --sort waited --filter gpu0": "vgpuctl top -1 --sort waited --filter gpu0",
    "vgpuctl version": "vgpuctl version",
    "vgpuctl help VERB": "vgpuctl help run",
    "vgpuctl VERB --help": "vgpuctl run --help",
    "vgpuctl mps terminate PID": "vgpuctl mps terminate $CLIENT",
    'eval "$(vgpuctl alloc --memory 8GiB -o env)"': 'eval "$(vgpuctl alloc --memory 8GiB -o env)"'
    ' && vgpuctl release "$VGPU_ALLOCATION"',
}
#: Run as root on the machine of tests/packaging.
ON_MACHINE = {
    "systemctl edit vgpud": "SYSTEMD_EDITOR=/tmp/editor script -qec 'systemctl edit vgpud' /dev/null"
    " && systemctl cat vgpud | grep AF_INET6 && systemctl revert vgpud",
    "systemctl restart vgpud-arbiter": "systemctl restart vgpud-arbiter",
    "systemctl status vgpud": "systemctl status vgpud",
    "systemctl stop vgpud": "systemctl stop vgpud && vgpuctl status && systemctl is-active vgpud",
    "systemd-analyze security vgpud": "systemd-analyze security vgpud | grep 'exposure level.* 2.4 OK'",
    "systemd-analyze security": "systemd-analyze security",
    "journalctl -u vgpud | grep kubelet": r"printf '[[kubelet.resource]]\nname = \"a/b\"\nkind = \"card\"\n'"
    " >/etc/vgpud/conf.d/60-kubelet.toml && vgpuctl policy reload && journalctl -u vgpud | grep kubelet;"
    " rm /etc/vgpud/conf.d/60-kubelet.toml",
    "journalctl -x": "journalctl -x -u vgpud | grep 'Subject: vgpud serves'",
    "journalctl -u vgpud -n 50": "journalctl -u vgpud -n 50",
    # the test's machine has no GPU, so journalctl finds no line of the driver and exits with 1
    "journalctl -k -g NVRM": "journalctl -k -g NVRM || true",
    "journalctl VGPUD_OWNER=1000": "journalctl VGPUD_OWNER=1000",
    "usermod -aG vgpu USER": "usermod -aG vgpu alice",
}
#: Code spans that only begin like a command, or name a part of a program.
MENTIONS = {
    "dpkg -i",
    "docker exec",
    "podman exec",
    "nvidia-smi pmon",
    "nvidia-smi -L",
    "nvidia-smi -r",
    "nvidia-ctk cdi generate",
    "vgpu-hook precreate",
    "vgpud does not answer at ...",
}
_CARD = "needs a real card"
_LONG = "measures for minutes"
_SUITE = "is the suite, or is run by a test of it by other words"
#: Commands of sentences and `checkout` blocks that no test runs, each with the reason. The files that they
#: name exist.
NOT_RUN = {
    "./dev shell": _SUITE,
    "kubectl apply -k configs/kubernetes": "is rendered by tests/kubelet/test_manifests.py",
    "./dev demo": _SUITE,  # run by tests/demo
    "./dev test": _SUITE,
    "./dev test tests/planner": _SUITE,
    "./dev test -k suspended": _SUITE,
    "./dev test-all": _SUITE,
    "./dev test-all tests/slurm": _SUITE,
    "./dev test-all -m real": _SUITE,
    "./dev test tests/model": _SUITE,
    "./dev test tests/model/test_lifecycle.py::NAME -n 0": _SUITE,
    "./dev lint": _SUITE,
    "./dev test --explore 30": _SUITE,
    "./dev test --driver 535": _SUITE,
    "./dev cluster-test --kubernetes FOLDER": "needs the server programs of Kubernetes",
    "./dev fuzz": _LONG,
    "./dev fuzz arbiter --minutes 30": _LONG,
    "./dev coverage": _SUITE,
    "./dev coverage --pure": _SUITE,
    "./dev build": _SUITE,
    "./dev deb": _SUITE,  # run by tests/packaging
    "./dev deb --system-compiler": _SUITE,
    "./dev deb --arch arm64": _SUITE,  # run by tests/packaging/cross.py
    "pytest tests/slurm": _SUITE,
    "python native/libvgpu/portable.py --out FOLDER --machine aarch64": _SUITE,
    "python -m tests.gpu.compute_programs --build build/native --out F --seconds 3 --part 1/2": _CARD,
    "python -m tests.e2e.matrix": _SUITE,
    "python -m tests.gpu.compute_programs": _CARD,
    "python -m tests.gpu.compute_h200 --engine cut together": _CARD,
    "python -m tests.gpu.compute_h200 --engine cut stretched": _CARD,
    "python -m tests.gpu.compute_h200 --engine cut alone": _CARD,
    "python -m tests.gpu.compute_h200 --engine cut cost": _CARD,
    "python -m tests.gpu.compute_h200 --engine cut killed": _CARD,
    "python -m tests.gpu.compute_h200 --engine cut killed_off": _CARD,
    "python -m tests.gpu.compute_h200 --engine cut meetings": _CARD,
    "python -m tests.gpu.compute_h200 --engine cut callbacks": _CARD,
    "python -m tests.gpu.edges_h200 off": _CARD,
    "python -m tests.gpu.compute_ranks --engine cut nccl": _CARD,
    "python -m tests.gpu.edges_h200 --engine gate live": _CARD,
    "python -m tests.gpu.edges_h200 --engine cut live": _CARD,
    "python -m tests.gpu.edges_h200 --engine cut cycles": _CARD,
    "python -m tests.gpu.compute_h200 --engine gate quick": _CARD,
    "python -m tests.gpu.NAME --build build/native --out FILE": _CARD,
    "python -m tests.gpu.remote_slices --server PROGRAM --library FOLDER --out FILE": _CARD,
    "python -m tests.gpu.mps_h200": _CARD,
    "nvidia-smi --gpu-reset -i N": _CARD,
    "./dev test tests/remote": _SUITE,
    "journalctl -t vgpuctl": "needs a journal",
    "journalctl -u 'vgpud-remote-session@*'": "needs a journal",
    "kubectl get resourceslices": "needs a cluster with cards",
    "vgpuctl remote grants": _SUITE,  # run by tests/remote
    "vgpuctl remote revoke GRANT": _SUITE,
    "systemctl status vgpud-remote": _SUITE,
    "systemctl status vgpud-remote-accept vgpud-remote-session.socket": _SUITE,
    "kubectl get resourceclaim NAME -o yaml": "needs a cluster with claims",
    "python -m tests.serve.bench_relay": _LONG,
    "python -m tests.runtime.cost": _LONG,
    "python -m tests.runtime.soak --starts 2000 --restart-every 50": _LONG,
    "./dev bench simulator": _LONG,
    "python -m tests.bench.plot": _LONG,
    "python -m tests.http.pictures": _LONG,
    "python -m tests.packaging.cross": _LONG,
    "./dev bench NAME": _LONG,
    "./dev bench arbiter": _LONG,
    "./dev bench loop": _LONG,
    "./dev bench loop --attack listings": _LONG,
    "./dev bench exposition": _LONG,
    "./dev bench operate": _LONG,
    "./dev bench soak --cycles 200000": _LONG,
    "./dev bench mig-packing": _LONG,
    "./dev bench idle-replay": _LONG,
    "./dev bench pool-replay": _LONG,
    "apt install ./vgpud_NEW.deb ./libvgpu_NEW.deb": "the test of an upgrade has dpkg do it",
    "apt upgrade": "the test of an upgrade has dpkg do it",
    "apt remove vgpud": "the test of removal has dpkg do it, which asks nobody",
    "apt purge vgpud": "the test of removal has dpkg do it, which asks nobody",
    "pip install 'vgpud[dra]'": "takes packages from a registry; tests/kubelet/test_official.py has them",
}
