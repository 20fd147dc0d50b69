"""The daemon: reads settings and policy, opens the ledger, the hardware and the doors, and serves until a
signal ends it.
"""

import argparse
import asyncio
import gc
import os
import resource
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import CoroutineType
from typing import Any, TypeVar

import structlog
import uvloop

from vgpud import __version__, audit, logs, proc, sd
from vgpud.hardware.engine_probe import EngineProbe
from vgpud.hardware.events import DeviceEvent, watch_events
from vgpud.hardware.fatal import FatalEvents
from vgpud.hardware.gateway import Gateway
from vgpud.hardware.nodes import monitor_nodes
from vgpud.hardware.suspender import Suspender
from vgpud.inject.driver import find_driver
from vgpud.inject.hooks import HookProgram
from vgpud.inject.specs import Specs
from vgpud.lease.engines import EngineFiles
from vgpud.ledger import Ledger, RowTable
from vgpud.model.caller import Caller, Door
from vgpud.model.errors import ErrorCode, Exit, VgpuError
from vgpud.model.journal import Message
from vgpud.model.log_event import LogEvent
from vgpud.model.rows import Rows
from vgpud.model.tenancy import Lifetime, Mode
from vgpud.modes.base import Effector, Paths
from vgpud.modes.exclusive import Exclusive
from vgpud.modes.mig import MigMode, Wish
from vgpud.modes.mig_records import MigRecords
from vgpud.modes.mps import MpsMode, unit_name
from vgpud.modes.preload import ARBITER_UNIT, Preload
from vgpud.modes.walls import Walls
from vgpud.node.cdi_watch import CdiWatch
from vgpud.node.containers import Containers
from vgpud.node.devices.drains import Drains
from vgpud.node.devices.engines import Engines
from vgpud.node.devices.inventory import Inventory
from vgpud.node.devices.policies import Policies
from vgpud.node.devices.transitions import Transitions
from vgpud.node.keeper import NodeKeeper
from vgpud.node.observe import observe
from vgpud.node.recover import Start, agree, recover
from vgpud.node.room import Room
from vgpud.node.store.allocations import AllocationStore
from vgpud.node.store.book import Book
from vgpud.node.tenants.cgroups import cgroup_of
from vgpud.node.tenants.context import NodeContext
from vgpud.node.tenants.users import SUBORDINATE
from vgpud.node.worlds import mps_world, preload_world, wall_world
from vgpud.policy.load import LoadedPolicy, load
from vgpud.policy.model import DeviceRule, Policy
from vgpud.serve.doors import run_all
from vgpud.serve.dra.api import ApiServer
from vgpud.serve.dra.door import DraDoor
from vgpud.serve.dra.monitors import Monitors
from vgpud.serve.http.doors import Doors
from vgpud.serve.kubelet.door import Kubelet, KubeletDoor
from vgpud.serve.old_files import take_over
from vgpud.serve.peers import Identities
from vgpud.serve.runtime import RuntimeDoor
from vgpud.serve.server import Server
from vgpud.serve.sockets import claim, passed_sockets, public_sockets, runtime_socket, send_away
from vgpud.settings import Settings, load_settings, misspelt
from vgpud.units import Units, choose_units
from vgpud.untrusted import Untrusted, renew_ended_keeper

T = TypeVar("T")
log = structlog.get_logger("vgpud")

_STOP_SECONDS = 10.0
_RETRY_SECONDS = 1.0
_DESCRIPTORS = 524_288  # limit of open descriptors, the same as LimitNOFILE= in the systemd units


class Daemon:
    """Holds the objects that live as long as the process. `running` builds those that need the ledger."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        fatal = FatalEvents(settings.run_dir / "fatal.json")
        self.gateway = Gateway(settings.nvml_deadline_seconds, settings.host_root, fatal=fatal)
        self.inventory = Inventory(self.gateway)
        self.book = Book()
        self.units: Units = choose_units(settings.run_dir)
        self.specs = Specs(settings.cdi_dir, HookProgram(settings.hook, settings.run_dir))
        self.stopping = asyncio.Event()
        self.keeper: NodeKeeper | None = None
        self.ledger: Ledger | None = None
        self.containers: Containers | None = None
        self.cdi_watch: CdiWatch | None = None
        # descriptor of the run directory's lock; it stays open until the process ends
        self.claim: int | None = None

    def rows(self, table: RowTable) -> Rows:
        assert self.ledger is not None
        return self.ledger.rows[table]

    def load_policy(self) -> LoadedPolicy:
        return load(self.settings.policy_paths())

    def paths(self) -> Paths:
        return Paths(
            run_dir=self.settings.run_dir,
            host_root=self.settings.host_root,
            libvgpu=self.settings.lib_dir / "libvgpu.so",
            arbiter=self.settings.arbiter,
            mps_control=self.settings.mps_control,
        )

    def _mig_wish(self, device_uuid: str) -> Wish:
        layouts = None if self.keeper is None else self.keeper.mig
        return Wish() if layouts is None else layouts.pools.wish(device_uuid)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[NodeKeeper]:
        """Recovers the allocations from the ledger, and yields the keeper. Raises VgpuError if the start
        fails. At the end, stops the arbiter and the MPS daemons if there are no allocations.
        """
        policy = self.load_policy()
        make_folders(self.settings)
        check_mount(self.settings)
        async with await Ledger.open(self.settings.state_dir / "ledger.db") as ledger:
            self.claim = claim(self.settings.run_dir)
            self.ledger = ledger
            state, _, self.specs.driver = await asyncio.gather(
                ledger.load(),
                self.inventory.refresh(),
                asyncio.to_thread(find_driver, self.settings.host_root),
            )
            await take_over(
                self.settings.state_dir,
                ledger.sync,
                ledger.rows[RowTable.KUBELET_HOLDS],
                ledger.rows[RowTable.PREPARED_CLAIMS],
                ledger.rows[RowTable.CONTAINERS],
            )
            keeper = self._assemble(ledger, policy)
            if self.inventory.error is not None:
                log.warning(LogEvent.DEVICES_UNREADABLE_AT_START, why=str(self.inventory.error))
            if self.inventory.node.simulated:
                log.warning(LogEvent.NODE_IS_SIMULATED, driver=self.inventory.node.driver_version)
            self.keeper = keeper
            start = Start(self.units, self.settings.run_dir, sd.boot_id())
            await recover(keeper, state, start)
            keeper.spawn(keeper.sickness.tend_all())
            self.inventory.came_back = lambda: keeper.spawn(agree(keeper, start, boot_changed=False))
            self.containers = Containers(keeper)
            self.cdi_watch = CdiWatch(keeper)
            try:
                yield keeper
            finally:
                await keeper.close()
                if not len(self.book):
                    self._stop_helpers()

    def _assemble(self, ledger: Ledger, policy: LoadedPolicy) -> NodeKeeper:
        rows, paths, book, inventory = ledger.rows, self.paths(), self.book, self.inventory
        store = AllocationStore(ledger, book, checked=self.settings.log_level == "debug")
        policies = Policies(policy, self.load_policy, store, inventory)
        files = EngineFiles(self.settings.run_dir)
        probe = EngineProbe(self.settings.engine_probe, files.folder)
        engines = Engines(files, probe, inventory, sd.boot_id())
        walled = wall_world(self.gateway, policies, book, inventory, rows[RowTable.CONTAINERS])
        world = preload_world(policies, book, inventory, engines, lambda: self.keeper)
        preload = Preload(self.units, paths, world, Walls(self.settings.cgroup, walled))
        originals = rows[RowTable.ORIGINALS]
        shared = mps_world(policies, book, inventory, originals, lambda: self.keeper)
        mps = MpsMode(self.gateway, self.units, shared, paths, preload)
        records = MigRecords(rows[RowTable.MIG_INSTANCES], rows[RowTable.MIG_LAYOUTS])
        mig = MigMode(self.gateway, originals, records, paths, self._mig_wish)
        exclusive = Exclusive(self.gateway, paths)
        effectors: dict[Mode, Effector] = {one.mode: one for one in (exclusive, preload, mps, mig)}
        context = NodeContext(
            store=store,
            inventory=inventory,
            policies=policies,
            transitions=Transitions(effectors, inventory, lambda uuid: bool(book.slices_on(uuid))),
            effectors=effectors,
            preload=preload,
            mps=mps,
            mig=mig,
            specs=self.specs,
            fault=fault_hook(self.settings.fault_point),
            suspender=Suspender(self.settings.suspender, self.settings.run_dir / "suspend.lock"),
            engines=engines,
            drains=Drains(rows[RowTable.DRAINS]),
            host_root=self.settings.host_root,
        )
        keeper = NodeKeeper(context)
        policies.changed.append(lambda old, new: preload.follow_rules())
        return keeper

    def _stop_helpers(self) -> None:
        """Stops the arbiter and the MPS daemons. Called when vgpud stops and there are no allocations, so
        that no tenant needs them.
        """
        names = [unit.name for unit in self.units.list(unit_name(""))]
        for name in (ARBITER_UNIT, *names):
            if self.units.running(name) is not None:
                self.units.stop(name, 5.0)


def fault_hook(point: str) -> Callable[[str], None]:
    """A hook for tests. It ends the daemon after the step named `point`, as kill -9 would."""
    if not point:
        return lambda _: None

    def cut(reached: str) -> None:
        if reached == point:
            os.kill(os.getpid(), signal.SIGKILL)

    return cut


def make_folders(settings: Settings) -> None:
    """Makes the daemon's folders. Raises VgpuError: LEDGER_READ_ONLY (the state folder) or BAD_SETTING."""
    wanted = ((settings.run_dir, 0o711), (settings.run_dir / "leases", 0o711), (settings.state_dir, 0o700))
    for folder, mode in wanted:
        try:
            if not folder.is_dir():
                folder.mkdir(parents=True)
                # the umask must not restrict these folders: tenants open their leases in them. Mode 711 keeps
                # users from listing them: getdents(2) could hold the folders' locks in the kernel
                # (vgpud/lease/pages.py)
                folder.chmod(mode)
        except OSError as error:
            raise VgpuError(
                ErrorCode.LEDGER_READ_ONLY if folder == settings.state_dir else ErrorCode.BAD_SETTING,
                f"folder {folder} cannot be made: {(error.strerror or str(error)).lower()}",
                "check its parent's rights, or set VGPUD_RUN_DIR and VGPUD_STATE_DIR",
            ) from None


def check_mount(settings: Settings) -> None:
    """As root: raises VgpuError(BAD_SETTING) if set-user-id programs or device files in the run directory
    would be effective on the host.

    Leases in this directory are mounted into containers, whose root can change the modes of their files.
    """
    if os.geteuid() != 0 or settings.any_run_dir:
        return
    flags = os.statvfs(settings.run_dir).f_flag
    missing = [name for name, flag in (("nosuid", os.ST_NOSUID), ("nodev", os.ST_NODEV)) if not flags & flag]
    if missing:
        raise VgpuError(
            ErrorCode.BAD_SETTING,
            f"{settings.run_dir} is mounted without {' and '.join(missing)}",
            f"mount -t tmpfs -o nosuid,nodev,mode=711 tmpfs {settings.run_dir}, or set VGPUD_RUN_DIR",
        )


def raise_file_limit() -> None:
    """Raises the limit of open descriptors (RLIMIT_NOFILE). Each tenant takes up to four descriptors of
    vgpud, and three of the arbiter, which inherits the limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(hard, _DESCRIPTORS)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
    except (PermissionError, ValueError):  # raising the limit above the hard limit needs CAP_SYS_RESOURCE
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def serve(settings: Settings, passed: Mapping[str, Untrusted]) -> None:
    """Serves until SIGTERM or SIGINT, on the sockets that systemd passed, or else on sockets that vgpud
    creates. SIGHUP reloads the policy. A background loop that fails is started again.
    """
    # reads /etc/subuid and looks up its names, so that the first caller does not wait for them
    SUBORDINATE.user_of(0)
    proc.count_users_by(SUBORDINATE.user_of)
    daemon = Daemon(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stopping.set)
    # The handler of SIGHUP is installed first, because the signal's default action would end the daemon.
    hung_up = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, hung_up.set)
    Untrusted.user_of = SUBORDINATE.user_of
    async with daemon.running() as keeper:
        # Up to ten thousand recovered allocations live as long as the daemon. They are frozen, so that the
        # garbage collector does not visit them.
        gc.freeze()
        gc.enable()
        server = Server(keeper, public_sockets(settings.run_dir, settings.group, passed))
        await server.start()
        assert daemon.ledger is not None
        assert daemon.containers is not None
        assert daemon.cdi_watch is not None
        doors = Doors(settings.run_dir, lambda: observe(keeper), Identities(Door.READ))
        await doors.start(keeper.policies.policy)
        keeper.policies.preparing.append(doors.prepare)
        door = runtime_socket(settings.run_dir, settings.group, passed)
        kubelet = kubelet_door(daemon, keeper)
        runtimes = RuntimeDoor(
            daemon.containers,
            door,
            cgroup_of,
            rules=lambda: keeper.policies.policy.runtime,
            pods=kubelet.allocator,
        )
        runtimes.start()
        keeper.policies.changed.append(lambda old, new: runtimes.follow_rules())
        watcher = watch_devices(daemon, keeper, loop)
        lasting = asyncio.ensure_future(
            run_all((*loops(daemon, keeper, kubelet, hung_up), doors.record), _RETRY_SECONDS)
        )
        await keeper.notices.started(__version__)
        status = keeper.listings.describe().status
        sd.notify("READY=1", f"STATUS={status}")
        log.info(LogEvent.READY, message_id=Message.READY, status=status, version=__version__)
        try:
            await daemon.stopping.wait()
        finally:
            sd.notify("STOPPING=1")
            lasting.cancel()
            await asyncio.gather(lasting, return_exceptions=True)
            watcher()
            doors.close()
            await asyncio.gather(server.stop(_STOP_SECONDS), runtimes.stop(_STOP_SECONDS))
    log.info(LogEvent.STOPPED, message_id=Message.STOPPED)


def loops(
    daemon: Daemon, keeper: NodeKeeper, kubelet: KubeletDoor, hung_up: asyncio.Event
) -> tuple[Callable[[], Coroutine[Any, Any, None]], ...]:
    """The background tasks of the daemon. Each runs until the daemon stops."""

    async def beat() -> None:
        assert daemon.ledger is not None
        await heartbeat(keeper, daemon.ledger)

    async def reloads() -> None:
        await reload(keeper, hung_up)

    assert daemon.cdi_watch is not None
    assert keeper.preload is not None
    return (
        *((beat,) if sd.watchdog_seconds() is not None else ()),
        reloads,
        kubelet.run,
        daemon.cdi_watch.run,
        dra_door(daemon, keeper).run,
        keeper.residency.run,
        keeper.bypasses.run,
        keeper.preload.watch,
        keeper.suspends.watch,
        keeper.moves.watch,
    )


class Restorer(Daemon):
    """A daemon whose policy opens no door and manages no device, so that its start restores the settings of
    all devices.
    """

    def load_policy(self) -> LoadedPolicy:
        unmanaged = Policy(device=(DeviceRule(mode="unmanaged"),))
        return replace(super().load_policy(), policy=unmanaged)


async def restore(settings: Settings) -> tuple[str, ...]:
    """Releases unused allocations, and restores the settings that vgpud changed on devices. Returns
    descriptions of what could not be undone.

    Called when vgpud is uninstalled. Raises VgpuError; LEDGER_LOCKED means that a vgpud is running.
    """
    daemon = Restorer(settings)
    left: list[str] = []
    audit.by_itself("vgpud is removed")
    async with daemon.running() as keeper:
        root = Caller(Door.ADMIN, os.geteuid(), os.getegid(), Lifetime())
        for allocation in tuple(daemon.book):
            try:
                await keeper.release(allocation.id, root, force=False)
            except VgpuError as error:
                left.append(f"allocation {allocation.id}: {error.sentence}")
        assert daemon.ledger is not None
        for device in daemon.inventory.node.devices:
            await keeper.operations.hand_back(device.uuid)
            left += [f"device {device.index}: {what}" for what in _recorded(daemon.ledger.rows, device.uuid)]
    return tuple(left)


def _recorded(rows: Mapping[RowTable, Rows], device_uuid: str) -> list[str]:
    """What the ledger still records of a device: the keys of settings that are not restored, and the names of
    the other tables that have a row of the device.
    """
    settings = [key for uuid, key, _ in rows[RowTable.ORIGINALS] if uuid == device_uuid]
    others = (RowTable.DRAINS, RowTable.MIG_INSTANCES, RowTable.MIG_LAYOUTS)
    return settings + [table for table in others if any(row[0] == device_uuid for row in rows[table])]


def kubelet_door(daemon: Daemon, keeper: NodeKeeper) -> KubeletDoor:
    """Makes the kubelet's device plugin server. It opens when the policy names a resource and the kubelet's
    socket exists.
    """
    room = Room(keeper, daemon.inventory, daemon.book)
    settings = daemon.settings
    kubelet = Kubelet(settings.kubelet_dir, settings.device_plugins_dir, settings.node)
    return KubeletDoor(
        keeper,
        room,
        kubelet,
        daemon.rows(RowTable.KUBELET_HOLDS),
        daemon.rows(RowTable.CONTAINERS),
        lambda: daemon.specs.driver,
        boot_id=sd.boot_id(),
    )


def dra_door(daemon: Daemon, keeper: NodeKeeper) -> DraDoor:
    """Makes the server of the DRA driver. It opens when the policy enables DRA."""
    settings = daemon.settings
    room = Room(keeper, daemon.inventory, daemon.book)
    return DraDoor(
        keeper,
        room,
        settings.kubelet_dir,
        daemon.rows(RowTable.PREPARED_CLAIMS),
        ApiServer(settings.kubeconfig),
        settings.node,
        Monitors(
            daemon.specs, lambda: room.devices, lambda device: monitor_nodes(device, settings.host_root)
        ),
    )


async def reload(keeper: NodeKeeper, hung_up: asyncio.Event) -> None:
    """Reloads the policy after each SIGHUP. Signals during a reload cause one more reload."""
    audit.by_itself("SIGHUP")
    while await hung_up.wait():
        hung_up.clear()
        await reload_once(keeper)


async def reload_once(keeper: NodeKeeper) -> None:
    with suppress(VgpuError):  # the reload has logged the error
        await keeper.policies.reload(dry_run=False)
        sd.notify(f"STATUS={keeper.listings.describe().status}")


def watch_devices(daemon: Daemon, keeper: NodeKeeper, loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    """Starts the watch of Xid events, which change the health of devices. Returns a function that stops the
    watch. When the watch begins, the inventory is read again, because a device may have become sick since the
    last reading.
    """

    def arrived(event: DeviceEvent) -> None:
        loop.call_soon_threadsafe(lambda: keeper.spawn(keeper.notices.event(event)))

    def registered() -> None:
        loop.call_soon_threadsafe(lambda: keeper.spawn(daemon.inventory.refresh()))

    stop = threading.Event()
    watch_events(daemon.gateway, arrived, stop, registered)
    return stop.set


async def heartbeat(keeper: NodeKeeper, ledger: Ledger) -> None:
    """Notifies systemd's watchdog from the event loop each time the ledger has answered, so that systemd
    restarts a hung daemon. A keeper that was killed is replaced meanwhile.

    The sockets are not checked: callers can delay them, and could so cause a restart.
    """
    period = sd.watchdog_seconds()
    while period is not None:
        # A ledger on a full disk answers with an error. That counts as an answer, because a restart would not
        # help.
        with suppress(VgpuError):
            await ledger.answer()
        renew_ended_keeper()
        sd.notify("WATCHDOG=1", f"STATUS={keeper.listings.describe().status}")
        await asyncio.sleep(period)


def main() -> int:
    parser = argparse.ArgumentParser(prog="vgpud", description="share this node's NVIDIA GPUs")
    parser.add_argument("--version", action="version", version=f"vgpud {__version__}")
    parser.add_argument("--check", action="store_true", help="check settings and policy, then leave")
    parser.add_argument(
        "--restore",
        action="store_true",
        help="with no vgpud running: release unused allocations, restore the original settings of devices, "
        "and leave; for the removal of vgpud",
    )
    arguments = parser.parse_args()
    passed: Mapping[str, Untrusted] = {}
    try:
        # The keeper's program is set before the settings are loaded: even if a setting is wrong, a keeper
        # must hold the sockets that systemd passed.
        Untrusted.program = Path(os.environ.get("VGPUD_ARBITER", Untrusted.program))
        passed = passed_sockets(os.environ)
        settings = load_settings()
        Untrusted.program = settings.arbiter
        logs.configure(settings.level)
        sys.stderr.writelines(f"vgpud: warning: {line}\n" for line in misspelt(os.environ))
        if arguments.check:
            digest = load(settings.policy_paths()).digest
            sys.stdout.write(f"settings and policy are valid, digest {digest[:8]}\n")
            return int(Exit.OK)
        raise_file_limit()
        if arguments.restore:
            left = asyncio.run(to_the_end(restore(settings)))
            sys.stderr.writelines(f"vgpud: not put back, {line}\n" for line in left)
            return int(Exit.DIFFERS if left else Exit.OK)
        gc.disable()  # The garbage collector is off until `serve` has frozen the recovered objects.
        uvloop.run(to_the_end(serve(settings, passed)))
    except VgpuError as error:
        # Waiting connections are closed: a caller that still waits would make systemd start vgpud over and
        # over.
        send_away(passed.values())
        complain(error)
        return int(error.code.exit_code)
    return int(Exit.OK)


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work`, then cancels the tasks that it left running (watches of helpers, reads of hardware) and
    waits for them.

    asyncio.run cancels tasks once only: a task that starts while others are being cancelled would be
    destroyed. A task of grpcio that is cancelled prints a traceback (grpcio 1.85, _schedule_rpc_coro), so
    such a task gets a second to end by itself: its call has ended, and its last steps are under way.
    """
    try:
        return await work
    finally:
        if ending := {each for each in asyncio.all_tasks() if not isinstance(each.get_coro(), CoroutineType)}:
            await asyncio.wait(ending, timeout=1.0)
        while left := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in left:
                task.cancel()
            for outcome in await asyncio.gather(*left, return_exceptions=True):
                if isinstance(outcome, Exception):
                    log.warning(LogEvent.CANCELLED_TASK_FAILED_AT_STOP, why=str(outcome))


def complain(error: VgpuError) -> None:
    is_said = len(error.details) == 1 and (
        error.sentence in error.details[0] or error.details[0] in error.sentence
    )
    lines = [f"vgpud: {error}", *(f"  {line}" for line in error.details if not is_said)]
    if error.hint:
        lines.append(f"hint: {error.hint}")
    sys.stderr.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
