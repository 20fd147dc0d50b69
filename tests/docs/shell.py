"""One bash for each page of docs/, and the folder in which the commands of the page run."""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests import prepared
from tests.docs.pages import Block, commands, expected
from tests.simnode import ROOT

READER = Path(__file__).parent / "reader"
VGPUCTL = Path(__file__).parent / "vgpuctl.py"
END = "--end-of-command--"


class Shell:
    """A bash. `words` is the command line that starts it. `said` maps names on a page to those of the test,
    for example a path of the host to that of the node.
    """

    def __init__(
        self,
        words: Sequence[str] = ("bash", "--norc"),
        said: Mapping[str, str] | None = None,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        files: Sequence[int] = (),
    ) -> None:
        self._said = dict(said or {})
        self.process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            pass_fds=files,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str) -> tuple[int, str]:
        """Runs a command. Returns its exit code and its output."""
        for theirs, ours in self._said.items():
            command = command.replace(theirs, ours)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        # a command that reads standard input would otherwise consume the commands that follow
        self.process.stdin.write(f"{{ {command}\n}} </dev/null\necho {END} $?\n")
        self.process.stdin.flush()
        printed = ""
        for line in self.process.stdout:
            if END in line:
                before, _, code = line.partition(END)
                return int(code), printed + before
            printed += line
        raise AssertionError(f"bash ended in {command!r}: {printed}")

    def follow(self, block: Block) -> int:
        """Runs a block of a page and compares the output. Returns the number of commands."""
        wanted = commands(block)
        for command in wanted:
            code, printed = self.run(command.line)
            assert code == command.code, f"$ {command.line}\n{printed}ended {code}, not {command.code}"
            for theirs, ours in self._said.items():
                printed = printed.replace(ours, theirs)
            assert expected(command).fullmatch(printed), f"$ {command.line}\n{printed}\nis not\n" + "\n".join(
                command.printed
            )
        return len(wanted)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Reader(Shell):
    """A shell in a folder with the files that the pages mention, and with vgpud's programs."""

    def __init__(self, folder: Path, environment: Mapping[str, str], said: Mapping[str, str]) -> None:
        self.work = folder / "reader"
        shutil.copytree(READER, self.work)
        line = prepared.line_to(environment)
        for name, words in {"vgpuctl": f"-IS '{VGPUCTL}' {line}", "python": ""}.items():
            self.program(name, f'exec "{sys.executable}" {words} "$@"')
        path = f"{self.work / 'bin'}:{environment['PATH']}"
        ours = {**environment, "PYTHONPATH": str(ROOT), "PATH": path, "LC_ALL": "C.UTF-8"}
        super().__init__(said=said, folder=self.work, environment=ours, files=[line])

    def program(self, name: str, script: str) -> None:
        """Installs a program that this bash finds before others of the same name."""
        path = self.work / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
