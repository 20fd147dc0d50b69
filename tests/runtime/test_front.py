"""vgpu-runtime in front of a fake runtime that records its arguments: the whole command line is passed on."""

import json
import os
import subprocess
import threading
from pathlib import Path

import pytest

from tests.demo.node import BUILD
from tests.runtime.door import FakeDoor
from vgpud.serve.runtime_wire import Status

FRONT = BUILD / "bin" / "vgpu-runtime"
ASKS = json.dumps({"annotations": {"vgpud.io/memory": "1GiB"}, "root": {"path": "rootfs"}})
EDITED = json.dumps({"edited": True, "annotations": {"vgpud.io/prepared": "a1"}})


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    """A runtime that prints its arguments, one a line, and exits with 7."""
    program = tmp_path / "runc"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexit 7\n')
    program.chmod(0o755)
    return program


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "config.json").write_text(ASKS)
    (folder / "config.json").chmod(0o640)
    return folder


def front(
    runtime: Path, run_dir: Path, *words: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [FRONT, f"--vgpu-run-dir={run_dir}", f"--vgpu-runtime={runtime}", *words],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        check=False,
    )


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--version",),
        ("features",),
        ("--root", "/r", "state", "c1"),
        ("kill", "create", "9"),
        ("--systemd-cgroup", "--log=/l", "start", "c1"),
        ("exec", "--process", "/p.json", "c1"),
    ],
)
def test_commands_other_than_create_and_run_go_to_the_real_runtime_unchanged(
    runtime: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    done = front(runtime, tmp_path / "no-vgpud", *words)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.splitlines() == list(words or ("",))


def test_vgpu_runtime_calls_no_daemon_for_a_container_without_a_request(
    runtime: Path, bundle: Path, tmp_path: Path
) -> None:
    (bundle / "config.json").write_text(r'{"process": {"env": ["PATH=/bin"], "args": ["a\u003cb \u0026"]}}')
    done = front(runtime, tmp_path / "no-vgpud", "create", "--bundle", str(bundle), "c1")
    assert (done.returncode, done.stderr) == (7, "")
    assert list(bundle.iterdir()) == [bundle / "config.json"]


def test_vgpu_runtime_tells_vgpud_the_name_that_docker_gave_the_container(
    runtime: Path, bundle: Path, tmp_path: Path
) -> None:
    own = tmp_path / "containers" / "c1"
    own.mkdir(parents=True)
    (own / "config.v2.json").write_text(json.dumps({"ID": "c1", "Name": "/web"}))
    mounts = [{"destination": "/etc/hostname", "source": str(own / "hostname")}]
    (bundle / "config.json").write_text(json.dumps({**json.loads(ASKS), "mounts": mounts}))
    with FakeDoor(tmp_path / "run", [(Status.UNCHANGED, b"")]) as door:
        assert front(runtime, door.run_dir, "create", "--bundle", str(bundle), "c1").returncode == 7
        (own / "config.v2.json").write_text(json.dumps({"ID": "c1", "Name": "/" + "long" * 16}))
        assert front(runtime, door.run_dir, "create", "--bundle", str(bundle), "c1").returncode == 7
    assert [heard.id for heard in door.heard] == ["c1/web", "c1"]


@pytest.mark.parametrize(("parent", "told"), [("conmon", "c1/web"), ("other", "c1")])
def test_vgpu_runtime_takes_the_containers_name_from_conmons_command_line(
    runtime: Path, bundle: Path, tmp_path: Path, parent: str, told: str
) -> None:
    """A shell with the name conmon stands for conmon. It does not replace itself by its last command."""
    (tmp_path / parent).symlink_to("/bin/sh")
    with FakeDoor(tmp_path / "run", [(Status.UNCHANGED, b"")]) as door:
        options = f"--vgpu-run-dir={door.run_dir} --vgpu-runtime={runtime}"
        create = f"{FRONT} {options} create --bundle {bundle} c1; true"
        subprocess.run([tmp_path / parent, "-c", create, "-n", "web"], check=True, timeout=300)
    assert [heard.id for heard in door.heard] == [told]


def by_hook(bundle: Path, run_dir: Path) -> subprocess.Popen[bytes]:
    with (bundle / "config.json").open() as config:
        words = [str(BUILD / "bin" / "vgpu-hook"), f"--run-dir={run_dir}", "precreate"]
        return subprocess.Popen(words, stdin=config, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_container_with_a_request_does_not_start_without_the_daemon(
    runtime: Path, bundle: Path, tmp_path: Path
) -> None:
    # the hook and the runtime both wait ten seconds for the daemon
    hook = by_hook(bundle, tmp_path / "no-vgpud")
    done = front(runtime, tmp_path / "no-vgpud", "create", "--bundle", str(bundle), "c1")
    assert done.returncode == 1 and "E801" in done.stderr
    assert b"E801" in hook.communicate(timeout=300)[1] and hook.returncode == 1


@pytest.mark.parametrize(
    "key", [r"vgpud\u002eio/memory", r"vgpud.\u0069o/memory", r"\u0076gpud.io/memory", "VGPUD.IO/memory"]
)
def test_a_request_with_an_escaped_or_upper_case_key_is_sent_to_the_daemon_too(
    runtime: Path, bundle: Path, tmp_path: Path, key: str
) -> None:
    (bundle / "config.json").write_text(f'{{"annotations": {{"{key}": "1000GiB"}}}}')
    with FakeDoor(tmp_path / "run", [(Status.REFUSED, b"no (E401)")]) as door:
        hook = by_hook(bundle, door.run_dir)
        done = front(runtime, door.run_dir, "create", "--bundle", str(bundle), "c1")
        assert b"E401" in hook.communicate(timeout=300)[1] and hook.returncode == 1
    assert done.returncode == 1 and "E401" in done.stderr


def test_a_request_in_a_config_above_one_mebibyte_is_refused_with_both_sizes(
    runtime: Path, bundle: Path, tmp_path: Path
) -> None:
    (bundle / "config.json").write_text(ASKS + " " * (1 << 20))
    hook = by_hook(bundle, tmp_path / "no-vgpud")
    done = front(runtime, tmp_path / "no-vgpud", "create", "--bundle", str(bundle), "c1")
    size = len(ASKS) + (1 << 20)
    said = f"the container's config.json has {size} bytes, and vgpud reads 1048576 at most (E103)"
    assert done.returncode == 1 and said in done.stderr
    assert said.encode() in hook.communicate(timeout=300)[1] and hook.returncode == 1


def test_a_container_whose_config_is_too_large_to_look_for_a_request_does_not_start(
    runtime: Path, bundle: Path, tmp_path: Path
) -> None:
    os.truncate(bundle / "config.json", (64 << 20) + 1)
    done = front(runtime, tmp_path / "no-vgpud", "create", "--bundle", str(bundle), "c1")
    assert done.returncode == 1 and "config.json is larger than 64 MiB (E103)" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("--root", "/r", "--log-format", "json", "create", "--bundle", "B", "--pid-file", "/p", "c1"),
        ("create", "-b", "B", "--console-socket=/s", "--no-pivot", "c1"),
        ("run", "--bundle=B", "--preserve-fds", "3", "c1"),
        ("-systemd-cgroup", "run", "-bundle", "B", "--keep", "c1"),
        ("run", "-d", "c1"),
        ("run", "--config", "B/config.json", "c1"),
        ("restore", "--image-path=/i", "--bundle", "B", "c1"),
    ],
)
def test_vgpu_runtime_edits_the_bundle_and_calls_the_runtime_with_the_same_arguments(
    runtime: Path, bundle: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    words = tuple(
        word.replace("B", str(bundle)) if word.startswith(("B", "--bundle=")) else word for word in words
    )
    with FakeDoor(tmp_path / "run", [(Status.DONE, EDITED.encode())]) as door:
        done = front(runtime, door.run_dir, *words, cwd=bundle)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.splitlines() == list(words)
    (asked,) = door.heard
    assert (asked.verb, asked.flags, asked.id, asked.body.decode()) == (1, 0, "c1", ASKS)
    config = bundle / "config.json"
    assert config.read_text() == EDITED and config.stat().st_mode & 0o777 == 0o640
    assert (bundle / "config.json.vgpud-original").read_text() == ASKS


def test_a_container_whose_edits_cannot_be_written_does_not_start(
    runtime: Path, bundle: Path, tmp_path: Path
) -> None:
    (bundle / "config.json.vgpud-original").mkdir()
    with FakeDoor(tmp_path / "run", [(Status.DONE, EDITED.encode())]) as door:
        done = front(runtime, door.run_dir, "create", "--bundle", str(bundle), "c1")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"cannot write {bundle}/config.json" in done.stderr and "(E605)" in done.stderr
    assert (bundle / "config.json").read_text() == ASKS
    assert sorted(path.name for path in bundle.iterdir()) == ["config.json", "config.json.vgpud-original"]


def test_a_runtime_that_cannot_be_executed_is_reported(runtime: Path, tmp_path: Path) -> None:
    runtime.write_text("#!/no/such/interpreter\n")
    done = front(runtime, tmp_path, "state", "c1")
    assert done.returncode == 126 and f"cannot run {runtime}" in done.stderr


def test_a_reused_bundle_is_prepared_from_its_original_config(
    runtime: Path, bundle: Path, tmp_path: Path
) -> None:
    """The config.json must not contain the edits of the first container, whose allocation is gone."""
    with FakeDoor(tmp_path / "run", [(Status.DONE, EDITED.encode())]) as door:
        for name in ("c1", "c2"):
            front(runtime, door.run_dir, "run", name, cwd=bundle)
    assert [(asked.id, asked.body.decode()) for asked in door.heard] == [("c1", ASKS), ("c2", ASKS)]


def test_the_answer_unchanged_leaves_the_bundle_as_it_is(runtime: Path, bundle: Path, tmp_path: Path) -> None:
    with FakeDoor(tmp_path / "run", [(Status.UNCHANGED, b"")]) as door:
        assert front(runtime, door.run_dir, "run", "c1", cwd=bundle).returncode == 7
    assert (bundle / "config.json").read_text() == ASKS


@pytest.mark.parametrize("style", ["json", "text"])
def test_a_refusal_is_written_to_standard_error_and_to_the_runtimes_log(
    runtime: Path, bundle: Path, tmp_path: Path, style: str
) -> None:
    """Podman reads the refusal on standard error, and containerd reads it in runc's log. The runtime is not
    called.
    """
    said = 'only 1GiB is free on "device 0" (E401)\nhint: ask for less'
    log = tmp_path / "log"
    log.write_text("before\n")
    with FakeDoor(tmp_path / "run", [(Status.REFUSED, said.encode())]) as door:
        words = ("--log", str(log), f"--log-format={style}", "create", "-b", str(bundle), "c1")
        done = front(runtime, door.run_dir, *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"vgpu-runtime: {said}\n"
    before, line = log.read_text().splitlines()
    assert before == "before"
    if style == "json":
        assert json.loads(line)["msg"] == f"vgpu-runtime: {said}" and json.loads(line)["level"] == "error"
    else:
        assert "level=error" in line and "E401" in line
    assert (bundle / "config.json").read_text() == ASKS


def test_vgpu_runtime_waits_for_a_daemon_that_restarts(runtime: Path, bundle: Path, tmp_path: Path) -> None:
    results: list[subprocess.CompletedProcess[str]] = []
    run_dir = tmp_path / "run"
    waiting = threading.Thread(
        target=lambda: results.append(front(runtime, run_dir, "run", "c1", cwd=bundle))
    )
    waiting.start()
    # the first connection is closed without an answer, as by a killed daemon
    with FakeDoor(run_dir, [None, (Status.DONE, EDITED.encode())]):
        waiting.join(300)
    assert results[0].returncode == 7 and (bundle / "config.json").read_text() == EDITED


def test_vgpu_runtime_never_calls_itself(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "runc").symlink_to(FRONT)
    done = subprocess.run(
        [FRONT, "--version"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 127 and "no OCI runtime" in done.stderr


def test_vgpu_runtime_finds_the_real_runtime_by_path_and_by_name(runtime: Path, tmp_path: Path) -> None:
    crun = tmp_path / "other" / "crun"
    crun.parent.mkdir()
    crun.write_text("#!/bin/sh\necho crun\n")
    crun.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{crun.parent}:{os.environ['PATH']}"}
    done = subprocess.run([FRONT, "x"], env=path, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout == "x\n"
    named = {**path, "VGPU_OCI_RUNTIME": "crun"}
    done = subprocess.run([FRONT, "x"], env=named, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout == "crun\n"
