"""Runs the pages' commands beside container engines, Slurm and a cluster, with the real programs if they are
installed.

Replaced are: docker (only `run` with a runtime of the page's daemon.json, by Podman), the API server behind
`kubectl apply` (each object is checked against its published shape), and IMAGE (a file system whose program
fails without a lease).
"""

import base64
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conditions import needs
from tests.demo.node import DemoNode
from tests.docs.pages import in_place, name_of, pages_of
from tests.docs.shell import Reader
from tests.e2e.support import eventually, states
from tests.kubelet.shapes import problems
from tests.runtime.conftest import FRONT, LIMITS, podman_with, rootfs, shared_node  # noqa: F401 - fixtures
from tests.simnode import ROOT
from tests.slurm.conftest import Cluster, cluster  # noqa: F401 - a fixture

EXAMPLES = "/usr/share/doc/vgpud/examples"
CDI = Path("/var/run/cdi")  # Podman of Debian 12 reads only this folder and /etc/cdi
PODMAN = """
mkdir -p {cdi} && for spec in {specs}/*.json; do [ ! -e "$spec" ] || ln -sf "$spec" {cdi}; done
case "$1 $2" in
"--runtime /usr/bin/vgpu-runtime") shift 2; set -- --runtime {front} "$@" ;;
"run "*) set -- --runtime runc "$@" ;;
esac
exec {real} "$@"
"""
DOCKER = """
fail() {{ echo "docker: not as the pages have it: $1" >&2; exit 125; }}
[ "$1 $2" = "run --runtime" ] || fail "$1 $2"
path=$(sed -n "s/.*\\"$3\\": {{\\"path\\": \\"\\([^\\"]*\\)\\".*/\\1/p" {daemon_json})
[ -n "$path" ] || fail "no runtime $3"
shift 3
exec podman --runtime "$path" run "$@"
"""
KUBECTL = """
case "$1" in
config) exec {real} "$@" ;;
apply) shift; exec {python} -m tests.docs.test_doors "$@" ;;
esac
case "$*" in
"-n vgpud create serviceaccount node-1") echo "serviceaccount/node-1 created" ;;
"-n vgpud create token node-1 --duration 8760h") printf the-token ;;
*) echo "not known: $*" >&2; exit 1 ;;
esac
"""


@needs("podman", "root")
@pytest.mark.parametrize("page", pages_of("containers"), ids=name_of)
def test_container_commands_print_what_the_page_shows(
    page: Path,
    shared_node: DemoNode,  # noqa: F811
    rootfs: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    node = podman_with(shared_node, rootfs).node
    inside = "sh -c 'test -e /run/vgpu/lease/limits'"
    shell = Reader(
        tmp_path, node.environment, {" IMAGE": f" --rm {' '.join(LIMITS)} --rootfs {rootfs} {inside}"}
    )
    specs, real = node.folder / "cdi", shutil.which("podman")
    front = f"{FRONT} --runtime-flag=vgpu-run-dir={node.run_dir}"
    shell.program("podman", PODMAN.format(cdi=CDI, specs=specs, front=front, real=real))
    (daemon_json,) = re.findall(r"daemon\.json`\): `(.*?)`\.", (ROOT / "docs" / "containers.md").read_text())
    (tmp_path / "daemon.json").write_text(json.dumps(json.loads(daemon_json)))
    shell.program("docker", DOCKER.format(daemon_json=tmp_path / "daemon.json"))
    try:
        for block in in_place(page, "containers"):
            shell.follow(block)
    finally:
        shell.close()
        for link in CDI.glob("*.json"):
            if link.is_symlink() and link.readlink().parent == specs:
                link.unlink()
    eventually(lambda: not states(node), "nothing is left of the containers")


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path) -> Iterator[Reader]:  # noqa: F811
    made = Reader(tmp_path, {**cluster.node.environment, **cluster.environment}, {})
    (made.work / "job.sh").write_text("#!/bin/sh\npython train.py && touch job-was-here\n")
    try:
        yield made
    finally:
        made.close()


@needs("slurm", "root")
@pytest.mark.parametrize("page", pages_of("slurm"), ids=name_of)
def test_slurm_commands_print_what_the_page_shows(page: Path, job: Reader, cluster: Cluster) -> None:  # noqa: F811
    for block in in_place(page, "slurm"):
        for line in re.findall(r"^\$ .*\n(?:[^$].*\n)*", block.text, re.MULTILINE):
            job.follow(replace(block, text=line))
            # the only device of the node must be free again for the next job of the page
            eventually(lambda: cluster.run("squeue", "-h").stdout == "", "the job has ended")
            eventually(lambda: not states(cluster.node), "its allocation is given back")
    assert (job.work / "job-was-here").exists(), cluster.logs()


@needs("kubectl")
@pytest.mark.parametrize("page", pages_of("kubernetes"), ids=name_of)
def test_kubernetes_commands_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    real = shutil.which("kubectl")
    shell = Reader(tmp_path, os.environ, {EXAMPLES: str(ROOT / "configs")})
    shell.program("kubectl", KUBECTL.format(real=real, python=sys.executable))
    (shell.work / "ca.crt").write_text("a certificate")
    try:
        for block in in_place(page, "kubernetes"):
            shell.follow(block)
    finally:
        shell.close()
    made = yaml.safe_load((shell.work / "vgpud.conf").read_text())
    assert made["current-context"] == "c"
    assert made["users"][0]["user"] == {"token": "the-token"}
    (of_cluster,) = made["clusters"]
    assert base64.b64decode(of_cluster["cluster"]["certificate-authority-data"]) == b"a certificate"


def apply(words: list[str]) -> str | None:
    """Takes the place of the API server. Returns the mistakes in `-f FILE ...`, or None."""
    if not words or words[::2] != ["-f"] * (len(words) // 2):
        return f"only -f FILE ... is known, not {words}"
    for path in words[1::2]:
        for document in yaml.safe_load_all(Path(path).read_text()):
            if document is not None and problems(document):
                return f"{path}: {problems(document)}"
            if document is not None:
                print(f"{_resource(document)} created")  # as kubectl names what it has made
    return None


def _resource(document: dict[str, Any]) -> str:
    group, _, _ = document["apiVersion"].rpartition("/")
    kind = document["kind"].lower() + (f".{group}" if group else "")
    return f"{kind}/{document['metadata']['name']}"


if __name__ == "__main__":
    sys.exit(apply(sys.argv[1:]))
