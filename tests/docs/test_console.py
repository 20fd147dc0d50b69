"""Every command of these pages, run on a simulated node: what the page promises is what is printed.

In a `console` block a line that begins with "$ " is run by one bash for the page; the lines after it are
what it prints: "..." stands for anything, on a line of its own for any lines, and "...words..." for a line
somewhere among others. "? N" comes first where the exit code is not 0. A `toml` block that begins with
`version` becomes the node's policy file.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ctl.conftest import ROOT
from tests.demo.node import DemoNode
from tests.e2e.conftest import NodeMaker, make_node  # noqa: F401 - a fixture
from vgpud.policy.show import check

PAGES = ("quickstart", "choosing-a-mode", "policy-cookbook", "preload-limits", "troubleshooting")
BLOCK = re.compile(r"^```(console|toml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
END = "--end-of-command--"


def blocks(page: str) -> list[tuple[str, str]]:
    return BLOCK.findall((ROOT / "docs" / f"{page}.md").read_text())


def commands(block: str) -> list[tuple[str, int, list[str]]]:
    """(command, exit code, lines that are expected)."""
    found: list[tuple[str, int, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], 0, []))
        elif line.startswith("? "):
            found[-1] = (found[-1][0], int(line[2:]), found[-1][2])
        else:
            found[-1][2].append(line)
    return found


def pattern(lines: list[str]) -> re.Pattern[str]:
    """Blanks of any length are one: columns are as wide as what is in them."""
    parts = []
    for line in lines:
        if line.strip() == "...":
            parts.append(r"(?:.*\n)*?")
        elif line.startswith("...") and line.endswith("..."):
            parts.append(rf"(?:.*\n)*?.*{re.escape(line.strip('.'))}.*\n(?:.*\n)*?")
        else:
            words = r"[ ]+".join(re.escape(word) for word in line.split())
            parts.append(r"[ ]*" + words.replace(r"\.\.\.", r".*") + r"[ ]*\n")
    return re.compile("".join(parts))


class Shell:
    """One bash on the node, with its own folder and a `vgpuctl` that is this tree's."""

    def __init__(self, node: DemoNode, folder: Path) -> None:
        (folder / "bin").mkdir()
        program = folder / "bin" / "vgpuctl"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m vgpud.ctl "$@"\n')
        program.chmod(0o755)
        environment = {
            **node.environment,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{folder / 'bin'}:{node.environment['PATH']}",
            "LC_ALL": "C.UTF-8",
        }
        self.process = subprocess.Popen(
            ["bash", "--norc"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str) -> tuple[int, str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command}\necho {END} $?\n")
        self.process.stdin.flush()
        said = ""
        for line in self.process.stdout:
            if line.startswith(END):
                return int(line.split()[1]), said
            said += line
        raise AssertionError(f"bash ended in {command!r}: {said}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.parametrize("page", PAGES)
def test_what_the_page_says_is_what_happens(page: str, make_node: NodeMaker, tmp_path: Path) -> None:  # noqa: F811
    node = make_node()
    node.start()
    shell = Shell(node, tmp_path)
    tried = 0
    try:
        for kind, block in blocks(page):
            if kind == "toml":
                if block.startswith("version"):
                    path = Path(node.environment["VGPUD_CONFIG"])
                    path.write_text(block)
                    check(path)
                continue
            for command, expected, lines in commands(block):
                code, said = shell.run(command)
                assert code == expected, f"$ {command}\n{said}"
                assert pattern(lines).fullmatch(said), f"$ {command}\n{said}\nis not\n" + "\n".join(lines)
                tried += 1
    finally:
        shell.close()
    assert tried > 2


def test_pages_name_only_pages_and_pictures_that_are_there() -> None:
    ours = (*PAGES, "metrics", "policy", "figures")
    for path in [*(ROOT / "docs" / f"{page}.md" for page in ours), ROOT / "README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} names {target}"
