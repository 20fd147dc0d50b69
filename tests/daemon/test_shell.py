"""The daemon's environment: settings from variables, messages to systemd, fields of the journal."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vgpud import logs, sd
from vgpud.model.errors import ErrorCode, Exit, VgpuError
from vgpud.settings import load_settings, misspelt


def run_daemon(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vgpud.daemon", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VGPUD_RUN_DIR", "/somewhere/run")
    monkeypatch.setenv("VGPUD_LOG_LEVEL", "warning")
    settings = load_settings()
    assert settings.run_dir == Path("/somewhere/run")
    assert settings.policy_paths().run_dir == Path("/somewhere/run/conf.d")
    assert settings.policy_paths().is_roots == (os.geteuid() == 0)
    assert settings.level == 30


def test_a_policy_file_that_the_environment_names_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not load_settings().policy_paths().main_required
    monkeypatch.setenv("VGPUD_CONFIG", "/etc/vgpud/vgpud.toml")
    assert load_settings().policy_paths().main_required


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VGPUD_NVML_DEADLINE_SECONDS", "-1"),
        ("VGPUD_NVML_DEADLINE_SECONDS", "soon"),
        # the kubelet's sockets below this folder would have paths longer than a socket allows
        ("VGPUD_KUBELET_DIR", "/data/" + "k" * 90),
        ("VGPUD_KUBELET_DIR", "kubelet"),
    ],
)
def test_a_bad_setting_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(VgpuError, match=name) as bad:
        load_settings()
    assert bad.value.code is ErrorCode.BAD_SETTING


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("VGPUD_LOGLEVEL", "VGPUD_LOG_LEVEL"),
        ("VGPUD_STATEDIR", "VGPUD_STATE_DIR"),
        ("VGPUD_CONFIG_FILE", "VGPUD_CONFIG"),
        ("VGPUD_LOG_LEVEL", ""),
        ("VGPUD_SOCKET", ""),  # vgpuctl's
        ("VGPUD_SLURM_DIR", ""),  # of the programs for Slurm
        ("VGPUD_SLURM_ISOLATION", ""),
    ],
)
def test_a_misspelt_setting_causes_a_warning_with_the_nearest_name(name: str, near: str) -> None:
    said = [f"{name} is not a setting of vgpud: did you mean {near}"] if near else []
    assert list(misspelt({name: "x", "PATH": "/bin"})) == said


def test_a_bad_log_level_is_a_configuration_error() -> None:
    done = run_daemon("--check", VGPUD_LOG_LEVEL="loud")
    assert done.returncode == Exit.CONFIG
    assert "VGPUD_LOG_LEVEL is 'loud'" in done.stderr


def test_the_daemons_option_check_reads_the_policy_and_starts_nothing(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text("version = 1\n")
    bad.write_text("version = 1\n[planer]\nstrategy = 'pack'\n")
    run = {"VGPUD_RUN_DIR": str(tmp_path / "run"), "VGPUD_STATE_DIR": str(tmp_path / "state")}
    accepted = run_daemon("--check", VGPUD_CONFIG=str(good), VGPUD_LOGLEVEL="debug", **run)
    assert accepted.returncode == 0
    assert "warning: VGPUD_LOGLEVEL is not a setting" in accepted.stderr
    refused = run_daemon("--check", VGPUD_CONFIG=str(bad), **run)
    assert refused.returncode == Exit.CONFIG
    assert refused.stderr.count(f"{bad}:2") == 1
    assert "planner" in refused.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.toml", "good.toml"]


@pytest.mark.parametrize("plain", [False, True])
def test_readiness_reaches_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: bool) -> None:
    """READY=1 reaches the notify socket with and without the package systemd-python. The protocol is one
    datagram.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        if plain:
            monkeypatch.setattr(sd, "HAS_SYSTEMD_PYTHON", False)
        sd.notify("READY=1", "STATUS=8 devices")
        assert listener.recv(4096).decode().rstrip("\n") == "READY=1\nSTATUS=8 devices"


def test_without_systemd_vgpud_sends_no_notification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    sd.notify("READY=1")
    assert sd.watchdog_seconds() is None


def test_the_watchdog_is_notified_twice_in_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert sd.watchdog_seconds() == 15
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert sd.watchdog_seconds() is None


def test_journal_fields_have_names_that_the_journal_accepts() -> None:
    event = {"event": "allocated", "level": "warning", "allocation": "a1", "gpu.uuid": "GPU-1"}
    fields = dict(logs.journal_fields(event))
    assert fields == {
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "vgpud",
        "VGPUD_ALLOCATION": "a1",
        "VGPUD_GPU_UUID": "GPU-1",
    }
