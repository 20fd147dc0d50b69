"""Judges one device for one request: which mode, and whether the request fits. The first obstacle ends the
judgement.
"""

from vgpud.model.device import ComputeMode, Health, Virtualisation
from vgpud.model.errors import ErrorCode
from vgpud.model.quantity import counted
from vgpud.model.tenancy import Mode, Slice
from vgpud.planner.fit_mig import fit_mig
from vgpud.planner.fit_on_top import fit_on_top
from vgpud.planner.fit_shared import fit_shared
from vgpud.planner.use import EMPTY
from vgpud.planner.verdict import Fit, Seat, Unfit, Verdict, busy, never, occupied
from vgpud.planner.wanted import Wanted
from vgpud.planner.words import shown_bytes


def fit_exclusive(seat: Seat) -> Verdict:
    """A whole device fits if neither the ledger nor NVML shows another user on it."""
    device = seat.device
    if seat.use.count:
        held = counted(seat.use.count, "allocation")
        return busy(seat, Mode.EXCLUSIVE, f"it holds {held} in mode {seat.use.mode}")
    if device.processes:
        return occupied(seat, Mode.EXCLUSIVE, device.processes)
    usable = device.memory_usable_bytes
    return Fit(
        device=device,
        mode=Mode.EXCLUSIVE,
        piece=Slice(device.uuid, Mode.EXCLUSIVE, usable),
        # Cards that can serve nothing else come first, then smaller cards.
        rank=(int(seat.terms.fixed is None), device.memory_total_bytes),
        sentence=f"mode exclusive, the whole card with {shown_bytes(usable)}",
    )


_UNWELL = {Health.SILENT: ErrorCode.NVML_TIMEOUT, Health.SICK: ErrorCode.RESET_NEEDED}
_HOSTS_MACHINES = (Virtualisation.HOST_VGPU, Virtualisation.HOST_VSGA)


def judge(seat: Seat, want: Wanted, spread: bool) -> Verdict:
    """The verdict on a device that matches the request's selector."""
    closed = _closed(seat)
    if closed is not None:
        return closed
    top = _mode_on_top(seat, want)
    if top is not None:
        return _judge_on_top(seat, top, want, spread)
    if want.profile and Mode.MIG not in want.modes:
        return _whole_only(seat, want.modes[0])
    mode = _mode(seat, want)
    if isinstance(mode, Unfit):
        return _unless_never(seat, mode, want)
    if mode is not Mode.MIG and seat.device.mig.current:
        return _whole_only(seat, mode)
    return _fit(seat, mode, want, spread)


def _judge_on_top(seat: Seat, mode: Mode, want: Wanted, spread: bool) -> Verdict:
    if seat.use.mode in (None, Mode.MIG):
        return fit_on_top(seat, mode, want, spread)
    idle = fit_on_top(seat._replace(use=EMPTY), mode, want, spread)
    if isinstance(idle, Unfit) and not idle.busy:
        return idle
    holds = counted(seat.use.count, "allocation")
    return busy(seat, mode, f"it is in mode {seat.use.mode} with {holds} and the request needs MIG")


def _mode_on_top(seat: Seat, want: Wanted) -> Mode | None:
    """The mode in which the request shares a MIG instance of the device; None if the request does not share
    one.

    A device shares MIG instances only if it is in MIG mode, or enters MIG mode because of the policy or of
    the request's profile.
    """
    terms = seat.terms
    if not terms.mig_on_top or not seat.device.mig.capable or terms.fixed not in (None, Mode.MIG):
        return None
    if not (seat.device.mig.current or terms.fixed or seat.use.mode is Mode.MIG or want.profile):
        return None
    first = next((mode for mode in want.modes if mode is Mode.MIG or mode in terms.mig_on_top), None)
    return None if first is Mode.MIG else first


def _whole_only(seat: Seat, mode: Mode) -> Unfit:
    """Returns why `mode` cannot serve a device in MIG mode, or a request that names a MIG profile."""
    if not seat.device.mig.capable:
        sentence = f"mode {mode} was asked on a MIG instance, and the device has no MIG"
        return never(seat, mode, ErrorCode.UNSUPPORTED, sentence)
    if mode is Mode.EXCLUSIVE:
        return never(
            seat, mode, ErrorCode.UNSUPPORTED, "MIG mode is on, so only its MIG instances can be allocated"
        )
    sentence = f"mode {mode} on top of its MIG instances is not allowed by the policy (mig.on_top)"
    return never(seat, mode, ErrorCode.DENIED_BY_POLICY, sentence)


def _fit(seat: Seat, mode: Mode, want: Wanted, spread: bool) -> Verdict:
    if mode is Mode.MIG:
        return fit_mig(seat, want, spread)
    if mode is Mode.EXCLUSIVE:
        return fit_exclusive(seat)
    return fit_shared(seat, mode, want, spread)


def _closed(seat: Seat) -> Unfit | None:
    """Returns why the device accepts no request at all; None if it accepts requests."""
    device = seat.device
    if device.health is not Health.OK:
        why = f": {device.health_reason}" if device.health_reason else ""
        code = _UNWELL.get(device.health, ErrorCode.GPU_LOST)
        return never(seat, None, code, f"the device is {device.health}{why}")
    if seat.terms.fixed is Mode.UNMANAGED:
        return never(seat, None, ErrorCode.DENIED_BY_POLICY, "the policy leaves it unmanaged")
    if device.virtualisation in _HOSTS_MACHINES:
        return never(
            seat, None, ErrorCode.UNSUPPORTED, f"it serves virtual machines (mode {device.virtualisation})"
        )
    if device.mig.current != device.mig.pending:
        pending = "on" if device.mig.pending else "off"
        return never(
            seat, None, ErrorCode.RESET_NEEDED, f"MIG mode becomes {pending} at its next reset, which is due"
        )
    if device.compute_mode is ComputeMode.PROHIBITED:
        return never(
            seat, None, ErrorCode.UNSUPPORTED, "its compute mode is prohibited, which lets no process use it"
        )
    return None


def _mode(seat: Seat, want: Wanted) -> Mode | Unfit:
    """The mode in which the device can serve the request now, or the reason why there is none."""
    fixed, held = seat.terms.fixed, seat.use.mode
    if fixed is not None and fixed not in want.modes:
        return never(
            seat,
            fixed,
            ErrorCode.DENIED_BY_POLICY,
            f"the policy fixes mode {fixed} and the request needs {want.needs}",
        )
    idle_mode = fixed or _idle_mode(seat, want)
    if held is None or held is idle_mode:
        return idle_mode
    if fixed is None and held in want.modes:
        return held
    holds = counted(seat.use.count, "allocation")
    policy = "" if fixed is None else f", whose end the policy's mode {fixed} waits for,"
    return busy(
        seat,
        idle_mode,
        f"it is in mode {held} with {holds}{policy} and the request needs {want.needs}",
    )


def _idle_mode(seat: Seat, want: Wanted) -> Mode:
    """The mode for an idle device with policy mode "auto": MIG if MIG mode is on and the request allows mode
    MIG, else the first mode that the request allows.
    """
    if seat.device.mig.current and Mode.MIG in want.modes:
        return Mode.MIG
    return want.modes[0]


def _unless_never(seat: Seat, unfit: Unfit, want: Wanted) -> Unfit:
    """Returns `unfit`, the verdict on a busy device. But if the device could never serve the request, returns
    that permanent reason.
    """
    if not unfit.busy or unfit.mode is None:
        return unfit
    idle = _fit(seat._replace(use=EMPTY), unfit.mode, want, spread=False)
    return idle if isinstance(idle, Unfit) and not idle.busy else unfit
