"""Runs, as root on an installed node, the commands that the pages give for an administrator."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.docs.pages import in_place, name_of, pages_of
from tests.docs.shell import Shell
from tests.docs.spans import ON_MACHINE
from tests.packaging.conftest import Installed
from tests.packaging.machine import Machine

pytestmark = [needs("machine", "debhelper", "root"), pytest.mark.xdist_group("packaging")]

READER = "/tmp/reader"
#: Files that the pages' commands create.
MADE = "/etc/containers/oci/hooks.d/vgpud-hook.json /etc/systemd/system/vgpud.service.d"
EDITOR = """#!/bin/sh
printf '[Service]\\nPrivateNetwork=no\\nRestrictAddressFamilies=AF_INET AF_INET6\\n' >"$1"
"""


@pytest.fixture
def shell(installed: Installed) -> Iterator[Shell]:
    """A shell in a folder that has build/deb. The machine is restored afterwards."""
    machine = installed.machine
    machine.shell(f"mkdir -p {READER}/build; ln -sfn /debs {READER}/build/deb")
    made = Shell(machine.inside("sh", "-c", f"cd {READER} && exec bash --norc"))
    try:
        yield made
    finally:
        made.close()
        machine.shell(f"rm -rf {READER} {MADE}; rmdir -p /etc/containers/oci/hooks.d 2>/dev/null || true")
        machine.shell("systemctl daemon-reload; systemctl restart vgpud.service")


@pytest.mark.parametrize("page", pages_of("machine"), ids=name_of)
def test_the_commands_of_a_page_print_what_the_page_shows(page: Path, shell: Shell) -> None:
    for block in in_place(page, "machine"):
        shell.follow(block)


def test_commands_in_the_prose_of_pages_run_without_error(installed: Installed, shell: Shell) -> None:
    machine: Machine = installed.machine
    machine.shell(f"cat >/tmp/editor <<'END'\n{EDITOR}END\nchmod 755 /tmp/editor")
    for span, command in ON_MACHINE.items():
        code, printed = shell.run(command)
        assert code == 0, f"{span}: $ {command}\n{printed}"
