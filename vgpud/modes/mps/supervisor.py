"""Supervises one device's control daemon: starts it with limits, watches it, and restarts it if it dies or
hangs.

When a daemon dies, its clients die too (measured on an H200, driver 580). A pidfd reports the death. The pipe
is closed to tenants at once, and opened again when a new daemon has confirmed every limit.
"""

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from vgpud import audit, clock, proc
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.quantity import Percent
from vgpud.modes.edits import driver_environment
from vgpud.modes.mps.control import MpsControl
from vgpud.modes.mps.features import Features
from vgpud.modes.mps.folders import DeviceFolder
from vgpud.modes.mps.health import Health, Verdict
from vgpud.modes.mps.partitions import forget, settle
from vgpud.modes.mps.processes import command, end_servers, of_lives, still_there
from vgpud.modes.mps.rules import MpsLimits, MpsRules, Users
from vgpud.modes.mps.silent import cut_silent
from vgpud.units import Units, UnitSpec

log = structlog.get_logger(__name__)

_FIRST_RETRY_SECONDS = 0.1
_LAST_RETRY_SECONDS = 30.0
_READY_SECONDS = 10.0
_STOP_SECONDS = 5.0
_GONE_SECONDS = 5.0
_CUT_SECONDS = 2.0


def unit_name(device_uuid: str) -> str:
    return f"vgpud-mps@{device_uuid}"


@dataclass(frozen=True)
class Charge:
    """The parameters of a supervisor. The callables are called for each use.

    `device_uuid` is the device or MIG device that the daemon serves, `owner_uuid` the device to which it
    belongs.
    """

    device_uuid: str
    program: str
    folder: DeviceFolder
    features: Callable[[], Features]
    rules: Callable[[], MpsRules]
    # the limits of the largest tenant; None if the device has no tenant
    limits: Callable[[], MpsLimits | None]
    tenants: Callable[[], frozenset[int]]  # the uids of users whose programs may connect
    died: Callable[[str], None]
    # called with a sentence for watchers; with audited=True if the audit trail has the sentence already
    notice: Callable[..., None]
    answer_seconds: float = 5.0
    owner_uuid: str = ""
    # the shares of the device's tenants, by the folders that the guard reads
    shares: Callable[[], Mapping[Path, Percent]] = dict


@dataclass
class Supervisor:
    charge: Charge
    units: Units
    multi_user: bool = False  # True if the running daemon has one server for all users
    partitioned: bool = False  # True if the running daemon divides the device into static SM partitions
    _wanted: tuple[MpsLimits, bool | None] | None = None  # the limits that this vgpud set last
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _unwatch: Callable[[], None] | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def name(self) -> str:
        return unit_name(self.charge.device_uuid)

    def control(self, pipe: Path | None = None) -> MpsControl:
        folder = self.charge.folder
        return MpsControl(self.charge.program, pipe or folder.pipe, folder.log, self.charge.answer_seconds)

    # --- start and stop

    async def up(self) -> None:
        """Ensures that a daemon runs with verified limits and accepts clients. Raises VgpuError."""
        async with self._lock:
            if await asyncio.to_thread(self.units.running, self.name) is None:
                await self._start()
            else:
                await self._take_up()
            self.watch()

    async def limit(self) -> None:
        """Sets the limits of the device's present tenants for all later clients of a running daemon."""
        async with self._lock:
            if await asyncio.to_thread(self.units.running, self.name) is not None:
                await self._limit(self.control())

    async def down(self) -> None:
        async with self._lock:
            self._forget()
            # A tenant with a file system of its own (FUSE) can hold the lock of the pipe folder, which it may
            # list. Then each change of the folder waits.
            await asyncio.to_thread(self.charge.folder.close)
            known = await asyncio.to_thread(of_lives, self.charge.folder, self.charge.program)
            await asyncio.to_thread(self.units.stop, self.name, _STOP_SECONDS)
            await asyncio.to_thread(end_servers, self.charge.folder, self.charge.program)
            # A server that is ending stays on the card for some time, and would count as a foreign program.
            left = await asyncio.to_thread(still_there, known, _GONE_SECONDS)
            if left:
                log.warning(LogEvent.MPS_PROCESSES_LEFT_AFTER_STOP, device=self.charge.device_uuid, pids=left)
            await asyncio.to_thread(self.charge.folder.remove)

    async def _start(self) -> None:
        charge = self.charge
        await asyncio.to_thread(end_servers, charge.folder, charge.program)
        life = await asyncio.to_thread(charge.folder.prepare)
        control = self.control(life)
        multi = charge.rules().users is Users.MULTI and charge.features().multi_user
        await asyncio.to_thread(forget, charge.shares())
        self.partitioned = charge.rules().partitions and not charge.device_uuid.startswith("MIG-")
        options = (*(("-multiuser-server",) if multi else ()), *(("-S",) if self.partitioned else ()))
        spec = UnitSpec(
            name=self.name,
            argv=(shutil.which(charge.program) or charge.program, "-f", *options),
            env={
                **driver_environment(),
                **control.environment(),
                "CUDA_VISIBLE_DEVICES": charge.device_uuid,
                "VGPU_MPS_OPTIONS": " ".join(options),  # the systemd unit reads this variable
            },
            ready=control.answers,
            ready_seconds=_READY_SECONDS,
        )
        await asyncio.to_thread(self.units.start, spec)
        try:
            await self._limit(control)
            await asyncio.to_thread(charge.folder.open, life)
        except VgpuError:
            await asyncio.to_thread(self.units.stop, self.name, 0.0)
            raise
        self.multi_user = multi

    async def _take_up(self) -> None:
        """Takes over a daemon that an earlier vgpud process started, and sets its limits again."""
        folder = self.charge.folder
        running = await asyncio.to_thread(self.units.running, self.name)
        words = () if running is None else proc.arguments(running.pid)
        self.multi_user, self.partitioned = b"-multiuser-server" in words, b"-S" in words
        for number in folder.lives():
            life = folder.life(number)
            control = self.control(life)
            if await asyncio.to_thread(control.answers):
                await self._limit(control)
                if not folder.is_open_on(life):
                    await asyncio.to_thread(folder.open, life)
                return
        raise VgpuError(
            ErrorCode.HELPER_TIMEOUT,
            f"the MPS control daemon of device {self.charge.device_uuid} runs and does not answer",
            "see 'vgpuctl mps ls'; it is restarted if it stays silent",
        )

    async def _limit(self, control: MpsControl) -> None:
        """Admits only the tenants' uids to the daemon, and sets the limits."""
        await asyncio.to_thread(self.charge.folder.admit, self.charge.tenants())
        limits = self.charge.limits()
        if limits is None:
            return
        below = self.charge.rules().below_normal if self.charge.features().priority else None
        self._wanted = (limits, below)
        await asyncio.to_thread(control.limit, limits, below)
        if self.partitioned:
            await asyncio.to_thread(settle, control, self.charge.device_uuid, self.charge.shares())

    async def _limit_again(self, control: MpsControl) -> None:
        """If another program has changed limits, sets them again and sends a notice."""
        async with self._lock:
            if self._wanted is None:
                return
            found = await asyncio.to_thread(control.changed, *self._wanted)
            if not found:
                return
            await self._limit(control)
            reason = f"another program changed them: {', '.join(found)}"
            audit.automatic("set MPS limits", reason, device=self.charge.device_uuid)
        self.charge.notice(
            "limits of its MPS control daemon were not as vgpud had set them, and are set again: "
            f"{', '.join(found)}",
            audited=True,
        )

    # --- watch

    def watch(self) -> None:
        """Watches the running daemon: its death, and whether it answers."""
        self._forget()
        self._unwatch = self.units.on_exit(self.name, self._ended)
        self._spawn(self._check_for_ever())

    def _forget(self) -> None:
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        current = asyncio.current_task()
        for task in tuple(self._tasks):
            if task is not current:
                task.cancel()

    def _ended(self, _: str) -> None:
        """Called in the event loop when the daemon has ended."""
        self._unwatch = None
        self._forget()
        self.charge.died("its MPS control daemon died and took its clients along")
        self._spawn(self._bring_back(clock.now()))

    async def _bring_back(self, died: float) -> None:
        """Starts the daemon again. Failed starts are repeated until the daemon runs or the device has no
        tenant. Until then no program can connect: `p` leads to a dead daemon's sockets, or is removed.
        """
        pause = _FIRST_RETRY_SECONDS
        while self.charge.limits() is not None:
            try:
                await self.up()
            except VgpuError as error:
                log.error(LogEvent.MPS_DAEMON_RESTART_FAILED, device=self.charge.device_uuid, why=str(error))
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LAST_RETRY_SECONDS)
                continue
            seconds = clock.now() - died
            audit.automatic(
                "start MPS daemon", "it had died", device=self.charge.device_uuid, seconds=round(seconds, 3)
            )
            self.charge.notice(f"MPS is back after {seconds:.1f} s, with every limit in force", audited=True)
            return

    # --- health checks

    async def _check_for_ever(self) -> None:
        health = Health()
        while True:
            await asyncio.sleep(self.charge.rules().check_seconds)
            try:
                await self._check(health)
            except VgpuError as error:  # the next check tries again
                log.warning(LogEvent.MPS_HEALTH_CHECK_FAILED, device=self.charge.device_uuid, why=str(error))

    async def _check(self, health: Health) -> None:
        control = self.control()
        rules = self.charge.rules()
        try:
            servers = await asyncio.to_thread(control.servers)
        except VgpuError as error:
            verdict = health.silent(clock.now(), rules.hang_seconds)
            await self._silent(verdict, str(error))
            return
        if health.answered():
            self.charge.notice("its MPS control daemon answers again")
        await self._limit_again(control)
        if not self.charge.features().server_status:
            return
        for server in servers:
            state = await asyncio.to_thread(control.server_state, server)
            verdict = health.server(server, state, clock.now(), rules.hang_seconds)
            if verdict is Verdict.SAY:
                self.charge.notice(
                    f"MPS server {server} is in FAULT: a client's fault reached all its clients"
                )
            elif verdict is Verdict.END:
                self.charge.notice(f"MPS server {server} stays in FAULT and is ended", audited=True)
                reason = f"it stays in FAULT for more than {rules.hang_seconds:g} s"
                await asyncio.to_thread(control.shutdown_server, server)
                audit.automatic("end MPS server", reason, device=self.charge.device_uuid, server=server)

    async def _silent(self, verdict: Verdict, why: str) -> None:
        """Closes the connections that block the daemon. If there are none and the verdict is END, ends the
        daemon with all its clients.
        """
        running = await asyncio.to_thread(self.units.running, self.name)
        if running is None:
            return  # the daemon has died, which the watch of its death handles
        if verdict is Verdict.SAY:
            self.charge.notice(f"its MPS control daemon does not answer: {why}")
        found = await asyncio.to_thread(cut_silent, running, _CUT_SECONDS)
        for peer, times in found.items():
            audit.automatic(
                "cut MPS connections",
                f"they kept the control daemon waiting: {why}",
                device=self.charge.device_uuid,
                peer_uid=peer.uid,
                peer_pid=peer.pid,
                command=command(peer.pid),
                connections=times,
            )
        if found:
            uids = ", ".join(map(str, sorted({peer.uid for peer in found})))
            self.charge.notice(
                f"{found.total()} silent connections of uid {uids} kept its MPS control daemon "
                "from answering and were cut",
                audited=True,
            )
        if verdict is Verdict.END and not found:
            await self._end(why)

    async def _end(self, why: str) -> None:
        """Ends the daemon with its watch switched off, because the watch (`_ended`) would cancel this task
        before it has written the audit line. Calls `_ended` itself afterwards.
        """
        if self._unwatch is not None:
            self._unwatch()
        try:
            await asyncio.to_thread(self.units.stop, self.name, 0.0)
        except VgpuError:
            self._unwatch = self.units.on_exit(self.name, self._ended)
            raise
        audit.automatic("end MPS daemon", f"it hangs: {why}", device=self.charge.device_uuid)
        # `_ended` cancels this task, so the event loop calls it later, as it does for the watch.
        asyncio.get_running_loop().call_soon(self._ended, self.name)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
