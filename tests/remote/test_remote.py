"""Remote programs from end to end, with a stand-in engine on the simulated node."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.lease.conftest import eventually as until
from tests.remote.clients import ended, opened, say
from tests.remote.node import PROGRAM, USER, RemoteNode
from tests.simnode import ROOT

pytestmark = needs("root", "namespaces")


def test_a_remote_program_is_held_to_its_slice_and_its_end_releases_it(short: RemoteNode) -> None:
    client = short.client(short.grant(), "--memory", "4GiB", "--cores", "25")
    said, errors = client.communicate("alloc 1073741824\nalloc 8589934592\nexit 7\n", timeout=300)
    assert (client.returncode, said) == (7, "0\n2\n"), errors + short.log.read_text()
    until(lambda: not short.held())


def test_listings_metrics_and_audit_lines_name_the_remote_user_and_the_address(remote: RemoteNode) -> None:
    asked = ("--memory", "1GiB", "--isolation", "quota", "--priority", "below-normal", "--label", "night run")
    client = opened(remote, remote.grant(), *asked)
    (held,) = remote.held()
    assert held.priority == "below-normal"
    (row,) = remote.node.ctl_json("top", "-1")["tenants"]
    assert row["label"] == held.label
    assert f'label="{held.label}"' in _figures(remote)
    assert held.label.startswith(f"remote {USER}/")
    assert held.label.endswith(" 127.0.0.1 night run")
    log = remote.node.log.read_text()
    assert any('"audit": "allocate"' in line and " 127.0.0.1 night run" in line for line in log.splitlines())
    client.kill()
    ended(client)


def _figures(remote: RemoteNode) -> str:
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(remote.node.run_dir / "metrics.sock"))
    with closing(connection):
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()


def test_the_server_runs_as_the_grants_account_in_namespaces_of_its_own(remote: RemoteNode) -> None:
    client = opened(remote, remote.grant(user="65534"), "--memory", "1GiB")
    assert say(client, "uid") == "65534"
    assert say(client, "interfaces") == "lo"
    assert say(client, "pids").split()[0] == "1"
    with pytest.raises(ConnectionRefusedError):
        # the port of the engine must not be reachable from the host
        socket.create_connection(("127.0.0.1", 14833))
    (held,) = remote.held()
    assert held.owner_uid == 65534
    client.kill()
    ended(client)


def test_a_remote_program_that_ends_its_side_of_a_connection_gets_the_whole_answer(short: RemoteNode) -> None:
    ask = (
        "import os, socket; made = socket.create_connection(os.environ['LUPINE_SERVER'].split(':'));"
        "made.sendall(b'echo ' + b'z' * 1000000 + b'\\n'); made.shutdown(socket.SHUT_WR);"
        "print(len(made.makefile('rb').read()))"
    )
    client = short.client(short.grant(), "--memory", "1GiB", command=[sys.executable, "-c", ask])
    said, errors = client.communicate(timeout=300)
    assert said == "1000001\n", errors + short.log.read_text()


def test_a_remote_program_that_cannot_be_started_has_the_exit_code_of_a_shell_and_leaves_no_slice(
    short: RemoteNode,
) -> None:
    client = short.client(short.grant(), "--memory", "1GiB", command=["/no/program"])
    assert "vgpuctl: cannot run '/no/program': no such file or directory (E103)" in ended(client)
    assert client.returncode == 127
    until(lambda: not short.held())


def test_a_signal_to_the_client_reaches_the_program_and_is_the_exit_code(short: RemoteNode) -> None:
    client = opened(short, short.grant(), "--memory", "1GiB")
    client.send_signal(signal.SIGTERM)
    assert client.wait(timeout=300) == 128 + signal.SIGTERM
    until(lambda: not short.held())


def test_status_lists_the_sessions_of_the_user_alone(remote: RemoteNode) -> None:
    own, other = remote.grant(), remote.grant(user="65534")
    client = opened(remote, own, "--memory", "1GiB")
    (held,) = remote.held()
    shown, _ = remote.client(own, verb="status").communicate(timeout=300)
    assert held.id in shown
    shown, _ = remote.client(other, verb="status").communicate(timeout=300)
    assert held.id not in shown
    client.kill()
    ended(client)


def test_the_files_of_the_client_package_need_only_the_standard_library(
    remote: RemoteNode, tmp_path: Path
) -> None:
    rules = (ROOT / "packaging/deb/debian/rules").read_text()
    words = re.search(r"for file in (__init__ ctl/.+?); do", rules, re.DOTALL)
    assert words is not None
    for name in words[1].replace("\\", "").split():
        copy = tmp_path / "vgpud" / f"{name}.py"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / "vgpud" / f"{name}.py").read_bytes())
    script = (ROOT / "packaging/deb/remote/vgpuctl").read_text()
    (tmp_path / "vgpuctl").write_text(script.replace("/usr/lib/vgpud-remote-client", str(tmp_path)))
    bare = [sys.executable, "-I", "-S", str(tmp_path / "vgpuctl")]  # -S: without installed packages
    place = [f"127.0.0.1:{remote.port}", "--library", str(remote.node.folder)]
    told = {"PATH": os.environ["PATH"], "VGPU_REMOTE_TOKEN": remote.grant()}
    done = subprocess.run(
        [*bare, "remote", "run", *place, "--memory", "1GiB", "--", *PROGRAM],
        env=told,
        input="echo bare\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "bare\n"), done.stderr

    def ctl(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([*bare, *words], env=told, capture_output=True, text=True, check=False)

    shown = ctl("-o", "json", "remote", "status", place[0])
    assert json.loads(shown.stdout)["sessions"] == [], shown.stderr
    for line, sentence in (
        (("ls",), "'ls' needs the package vgpud (E103)"),
        (("help", "status"), "'status' needs the package vgpud (E103)"),
        (("remote", "grant", "x"), "'remote grant' is for the node (package vgpud) (E103)"),
        (("remote", "grants"), "'remote grants' is for the node (package vgpud) (E103)"),
        (("remote", "walk"), "unknown verb 'walk' (E103)"),
    ):
        refused = ctl(*line)
        assert (refused.returncode, refused.stderr.partition("\n")[0]) == (2, f"vgpuctl: {sentence}")
    assert [one.split()[0] for one in ctl().stdout.splitlines() if one.startswith("  r")] == ["remote"]
    assert "grant" not in ctl("remote", "--help").stdout


def test_a_client_says_what_is_wrong_before_it_connects(remote: RemoteNode) -> None:
    none = str(remote.node.folder / "none")
    for verb, token, options, sentence in (
        ("status", "garbage", (), "what VGPU_REMOTE_TOKEN has is not a token"),
        ("status", "a.b.c", ("--certificate", "x.pem"), "--key is missing"),
        ("status", "a.b.c", ("--token-file", none), f"there is no token: {none}: no such file or directory"),
        ("run", "a.b.c", (), "no command to run"),
    ):
        client = remote.client(token, *options, verb=verb, command=())
        assert sentence in ended(client)
        assert client.returncode == 2


def test_the_library_folder_given_to_a_program_is_absolute_and_is_checked_for_the_libraries(
    remote: RemoteNode, tmp_path: Path
) -> None:
    token, here = remote.grant(), os.path.relpath(remote.node.folder, ROOT)
    show = [sys.executable, "-c", "import os; print(os.environ['LD_LIBRARY_PATH'])"]
    client = remote.client(token, "--memory", "1GiB", "--library", here, command=show)
    said, errors = client.communicate(timeout=300)
    assert said.startswith("/"), errors
    client = remote.client(token, "--library", str(tmp_path), command=show)
    assert f"the engine's libraries are not in {tmp_path} (E103)" in ended(client)
