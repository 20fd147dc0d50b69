"""The protocol of the MPS control daemon against a stand-in that has the special cases measured on real
daemons.
"""

from pathlib import Path

import pytest

from tests.e2e.support import eventually, is_alive
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import MIB, Percent
from vgpud.model.tenancy import Mode, Slice
from vgpud.modes.mps import answers
from vgpud.modes.mps.control import MpsControl
from vgpud.modes.mps.rules import MpsLimits

# Answers as nvidia-cuda-mps-control 550 does: a refusal has exit status 0 and the old value, and GiB are
# rounded down.
STAND_IN = """#!/bin/sh
read verb a b c
printf '%s %s %s %s\\n' "$verb" "$a" "$b" "$c" >>"$D/asked"
show() { m=$(cat "$1"); if [ "$m" -ge 1024 ]; then echo "$((m / 1024))G"; else echo "${m}M"; fi; }
case "$verb" in
set_default_active_thread_percentage) [ -z "$REFUSE" ] && echo "$a" >"$D/share"; cat "$D/share" ;;
get_default_active_thread_percentage) cat "$D/share" ;;
set_default_device_pinned_mem_limit) [ -z "$REFUSE" ] && echo "${b%M}" >"$D/memory" ;;
get_default_device_pinned_mem_limit) show "$D/memory" ;;
get_server_list) cat "$D/servers" ;;
set_device_pinned_mem_limit) [ -z "$REFUSE_SERVER" ] && echo "${c%M}" >"$D/memory.$a" ;;
get_device_pinned_mem_limit) if [ -e "$D/memory.$a" ]; then show "$D/memory.$a"; fi ;;
set_active_thread_percentage) echo "$b" >"$D/share.$a" ;;
get_active_thread_percentage) cat "$D/share.$a" ;;
set_default_client_priority) [ -z "$REFUSE" ] && echo "$a" >"$D/priority" ;;
get_default_client_priority) cat "$D/priority" ;;
terminate_client) [ "$a" = 7 ] || echo "Server $a not found" ;;
shutdown_server) sed -i "/^$a$/d" "$D/servers" ;;
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
    for name, text in (("share", "100.0\n"), ("memory", "0\n"), ("servers", ""), ("priority", "0\n")):
        (tmp_path / name).write_text(text)
    return MpsControl(str(program), tmp_path / "p", tmp_path / "log")


def limits(mebibytes: int, share: str) -> MpsLimits:
    return MpsLimits(mebibytes, Percent.parse(share))


@pytest.mark.parametrize("share", ["100", "50", "12.5", "0.5", "33.33"])
@pytest.mark.parametrize("mebibytes", [1, 1023, 1024, 4097, 81920])
def test_limits_of_an_mps_daemon_are_compared_in_the_form_that_the_daemon_prints(
    control: MpsControl, mebibytes: int, share: str
) -> None:
    control.limit(limits(mebibytes, share), below_normal=True)
    assert (control.log.parent / "memory").read_text() == f"{mebibytes}\n"
    assert (control.log.parent / "priority").read_text() == "1\n"


@pytest.mark.parametrize("what", ["share", "memory", "priority"])
def test_a_refusal_with_exit_status_0_is_recognised(
    control: MpsControl, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("REFUSE", "1")
    with pytest.raises(VgpuError) as refused:
        if what == "share":
            control.set_default_share(Percent.parse("30"))
        elif what == "memory":
            control.set_default_memory(1024)
        else:
            control.set_default_priority(True)
    assert refused.value.code is ErrorCode.MPS_REFUSED


def test_a_new_limit_is_also_set_on_mps_servers_that_already_run(control: MpsControl, tmp_path: Path) -> None:
    """The daemon's default limit applies only to servers that start later. If the running servers kept their
    limits, a larger tenant would run under a smaller tenant's limit.
    """
    (tmp_path / "servers").write_text("7\n9\n")
    control.limit(limits(2048, "50"))
    assert [(tmp_path / f"memory.{pid}").read_text() for pid in (7, 9)] == ["2048\n"] * 2
    assert [(tmp_path / f"share.{pid}").read_text() for pid in (7, 9)] == ["50\n"] * 2


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("share", "default active thread percentage '99' instead of 50"),
        ("memory", "default device pinned mem limit 0 '99M' instead of 2048M"),
        ("priority", "default client priority '99' instead of 1"),
        ("share.7", "active thread percentage 7 '99' instead of 50"),
        ("memory.7", "device pinned mem limit 7 0 '99M' instead of 2048M"),
    ],
)
def test_an_mps_limit_that_was_changed_outside_vgpud_is_noticed(
    control: MpsControl, tmp_path: Path, name: str, found: str
) -> None:
    (tmp_path / "servers").write_text("7\n")
    control.limit(limits(2048, "50"), below_normal=True)
    assert control.changed(limits(2048, "50"), below_normal=True) == ()
    (tmp_path / name).write_text("99\n")
    assert control.changed(limits(2048, "50"), below_normal=True) == (found,)


def test_a_limit_that_an_mps_server_does_not_report_back_is_an_error(
    control: MpsControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "servers").write_text("7\n")
    (tmp_path / "memory.7").write_text("512\n")
    monkeypatch.setenv("REFUSE_SERVER", "1")
    with pytest.raises(VgpuError, match="device pinned mem limit 2048M: it reads back '512M'"):
        control.limit(limits(2048, "50"))


def test_an_mps_server_that_cannot_report_limits_back_is_accepted(
    control: MpsControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that does not report a limit has not refused it: the default was set and read back."""
    (tmp_path / "servers").write_text("7\n")
    monkeypatch.setenv("REFUSE_SERVER", "1")
    control.limit(limits(2048, "50"))


def test_a_refused_termination_of_a_client_is_an_error_despite_exit_status_0(control: MpsControl) -> None:
    control.terminate_client(7, 100)
    with pytest.raises(VgpuError, match="Server 8 not found") as refused:
        control.terminate_client(8, 100)
    assert refused.value.code is ErrorCode.MPS_REFUSED


def test_a_dead_mps_daemon_and_a_missing_control_program_are_reported(control: MpsControl) -> None:
    with pytest.raises(VgpuError, match="Cannot find MPS control daemon") as dead:
        control.ask("ps")
    assert dead.value.code is ErrorCode.HELPER_FAILED
    missing = MpsControl("/nonexistent/mps-control", control.pipe, control.log)
    assert not missing.answers()
    with pytest.raises(VgpuError, match="cannot be run"):
        missing.ask("ps")


def test_a_silent_daemon_neither_hangs_vgpud_nor_leaves_a_process(tmp_path: Path) -> None:
    program = tmp_path / "control"
    program.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid\nsleep 60 & echo $! >{tmp_path}/child\nwait\n")
    program.chmod(0o755)
    control, child = MpsControl(str(program), tmp_path / "p", tmp_path / "l", 0.5), tmp_path / "child"
    # on a busy machine vgpud may end the first daemon before it has started its child
    while not child.exists() or not child.read_text():
        with pytest.raises(VgpuError) as silent:
            control.ask("ps")
        assert silent.value.code is ErrorCode.HELPER_TIMEOUT
    eventually(lambda: not is_alive(int(child.read_text())), "the silent daemon's child ends")


def test_the_default_limits_of_an_mps_daemon_are_those_of_its_largest_tenant() -> None:
    small = Slice("GPU-0", Mode.MPS, 1024 * MIB, Percent.parse("60"))
    large = Slice("GPU-0", Mode.MPS, 4096 * MIB, Percent.parse("10"))
    assert MpsLimits.largest((small, large)) == limits(4096, "60")
    assert MpsLimits.largest((large, Slice("GPU-0", Mode.MPS, MIB))) == limits(4096, "100")
    assert MpsLimits.largest(()) is None


def test_memory_limits_are_rounded_as_mps_daemons_print_them() -> None:
    """Measured on 535.309.01 and 550.163.01: MPS daemons round GiB down, so 4097M is read back as 4G, and
    1023M as 1023M.
    """
    assert [answers.memory_as_printed(m) for m in (1023, 1024, 4097)] == ["1023M", "1G", "4G"]
