"""The MPS protocol, spoken defensively: against a stand-in with the traps that were measured."""

import os
from pathlib import Path

import pytest

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import GIB, MIB, Percent
from vgpud.modes.mps_control import MpsControl, memory_as_printed

# answers as nvidia-cuda-mps-control 550 does: rc 0 and the old value on a refusal, floored GiB
STAND_IN = """#!/bin/sh
read verb a b
case "$verb" in
set_default_active_thread_percentage) [ -z "$REFUSE" ] && echo "$a" >"$D/share"; cat "$D/share" ;;
get_default_active_thread_percentage) cat "$D/share" ;;
set_default_device_pinned_mem_limit) [ -z "$REFUSE" ] && echo "${b%M}" >"$D/memory" ;;
get_default_device_pinned_mem_limit)
  m=$(cat "$D/memory"); if [ "$m" -ge 1024 ]; then echo "$((m / 1024))G"; else echo "${m}M"; fi ;;
*) echo "Cannot find MPS control daemon process" >&2; exit 1 ;;
esac
exit 0
"""


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MpsControl:
    program = tmp_path / "control"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    monkeypatch.setenv("D", str(tmp_path))
    (tmp_path / "share").write_text("100.0\n")
    (tmp_path / "memory").write_text("0\n")
    return MpsControl(str(program), tmp_path / "f")


@pytest.mark.parametrize("share", ["100", "50", "12.5", "0.5"])
def test_a_share_that_was_taken(control: MpsControl, share: str) -> None:
    control.set_default_share(Percent.parse(share))


@pytest.mark.parametrize("limit", [MIB, 1023 * MIB, 1024 * MIB, 4097 * MIB, 80 * GIB])
def test_a_limit_that_was_taken_is_compared_as_it_is_printed(control: MpsControl, limit: int) -> None:
    control.set_default_memory(limit)


def test_a_refusal_is_seen_although_the_status_is_0(
    control: MpsControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSE", "1")
    with pytest.raises(VgpuError) as share:
        control.set_default_share(Percent.parse("30"))
    with pytest.raises(VgpuError) as memory:
        control.set_default_memory(GIB)
    assert {share.value.code, memory.value.code} == {ErrorCode.MPS_REFUSED}


def test_a_dead_daemon_and_a_missing_program(control: MpsControl) -> None:
    with pytest.raises(VgpuError, match="Cannot find MPS control daemon") as dead:
        control.ask("ps")
    assert dead.value.code is ErrorCode.HELPER_FAILED
    missing = MpsControl("/nonexistent/mps-control", control.folder)
    assert not missing.answers()
    with pytest.raises(VgpuError, match="cannot be run"):
        missing.ask("ps")


def test_a_silent_daemon_does_not_hang_vgpud(tmp_path: Path) -> None:
    program = tmp_path / "control"
    program.write_text("#!/bin/sh\nsleep 60\n")
    program.chmod(0o755)
    with pytest.raises(VgpuError) as silent:
        MpsControl(str(program), tmp_path / "f", timeout_seconds=0.2).ask("ps")
    assert silent.value.code is ErrorCode.HELPER_TIMEOUT


def test_a_pipe_path_that_would_fail_is_refused_before(tmp_path: Path) -> None:
    with pytest.raises(VgpuError, match="longer than 90 bytes"):
        MpsControl("x", tmp_path / ("d" * 100)).prepare()


def test_folders_can_be_reached_by_any_tenant(tmp_path: Path) -> None:
    control = MpsControl("x", tmp_path / "m")
    before = os.umask(0o077)
    try:
        control.prepare()
    finally:
        os.umask(before)
    assert {f.stat().st_mode & 0o777 for f in (control.folder, control.pipe, control.log)} == {0o755}


def test_printing_of_limits() -> None:
    """Measured on 550.163.01: 4097M reads back as 4G, 1023M as 1023M."""
    assert [memory_as_printed(m) for m in (1023, 1024, 4097)] == ["1023M", "1G", "4G"]
