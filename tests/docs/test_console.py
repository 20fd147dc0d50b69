"""Runs the commands of the pages that are meant for a node on a simulated node, and compares the output.

A `toml` block that begins with `version` becomes the node's policy. One with cases becomes the page's
CASES.toml. All pages share one daemon, so a page releases its allocations.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.conditions import needs
from tests.demo.node import BUILD, POLICY, DemoNode
from tests.docs.pages import blocks, name_of, pages_of
from tests.docs.shell import Reader
from tests.docs.spans import ON_NODE
from tests.e2e.conftest import NodeMaker, make_shared_node  # noqa: F401 - a fixture
from tests.e2e.support import eventually
from vgpud.policy.load import check

# the pages show commands of an administrator
pytestmark = [pytest.mark.xdist_group("docs-console"), needs("root")]


@pytest.fixture(scope="module")
def node(make_shared_node: NodeMaker) -> DemoNode:  # noqa: F811
    made = make_shared_node()
    made.start()
    return made


@pytest.fixture
def shell(node: DemoNode, tmp_path: Path) -> Iterator[Reader]:
    etc = Path(node.environment["VGPUD_CONFIG"]).parent
    (etc / "conf.d").mkdir(exist_ok=True)
    collector = tmp_path / "node-exporter"
    collector.mkdir()
    paths = {
        "/etc/vgpud": str(etc),
        "/run/vgpud": str(node.run_dir),
        "/tmp/node": str(tmp_path / "node"),
        "/var/lib/prometheus/node-exporter": str(collector),
    }
    made = Reader(
        tmp_path, {**node.environment, "PATH": f"{BUILD / 'bin'}:{node.environment['PATH']}"}, paths
    )
    try:
        yield made
    finally:
        made.close()
        for left in (etc / "conf.d").iterdir():
            left.unlink()
        Path(node.environment["VGPUD_CONFIG"]).write_text(POLICY)
        node.ctl("policy", "reload")
        # Releases the allocations that a failed page has left, so that the next page finds a free node.
        if kept := node.ctl("ls", "-o", "name").stdout.split():
            node.ctl("release", "--force", *kept)


def policy(text: str, node: DemoNode) -> None:
    path = Path(node.environment["VGPUD_CONFIG"])
    path.write_text(text)
    check(path)


def pages() -> list[ParameterSet]:
    """The pages as parameters. One that calls curl has the condition `curl`."""
    marks = {page: [needs("curl")] if "$ curl " in page.read_text() else [] for page in pages_of("")}
    return [pytest.param(page, marks=mark, id=name_of(page)) for page, mark in marks.items()]


@pytest.mark.parametrize("page", pages())
def test_the_commands_of_a_page_print_what_the_page_shows(page: Path, node: DemoNode, shell: Reader) -> None:
    tried = 0
    for block in blocks(page):
        if block.language == "toml" and "[[case]]" in block.text:
            (shell.work / "CASES.toml").write_text(block.text)
        elif block.language == "toml" and block.text.startswith("version"):
            policy(block.text, node)
        elif block.language == "python":
            (shell.work / "example.py").write_text(block.text)
            assert shell.run("python example.py") == (0, "")
        elif block.language == "console" and block.place == "":
            tried += shell.follow(block)
    assert tried
    eventually(lambda: node.ctl("ls", "-o", "name").stdout == "", f"{page.name} gives back what it takes")
    assert not [d for d in node.ctl_json("devices")["items"] if d.get("drained")], "a device stays drained"


def test_commands_in_the_prose_of_pages_run_without_error(node: DemoNode, shell: Reader) -> None:
    hold = [str(BUILD / "bin" / "vgpu-probe"), "hold", str(1 << 20), "--then-wait-on-stdin"]
    quota = node.tenant(["--memory", "1GiB", "--isolation", "quota", "--device", "0"], hold)
    client = node.tenant(["--memory", "1GiB", "--isolation", "compute", "--device", "7"], hold)
    try:
        for tenant in (quota, client):
            tenant.line()
        (held,) = (
            item["id"] for item in node.ctl_json("ls")["items"] if item["slices"][0]["mode"] == "preload"
        )
        shell.run(f"HELD={held} PID={quota.process.pid} CLIENT={client.process.pid}")
        for span, command in ON_NODE.items():
            code, printed = shell.run(command)
            assert code == 0, f"{span}: $ {command}\n{printed}"
    finally:
        for tenant in (quota, client):
            tenant.end()
