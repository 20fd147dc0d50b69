"""Mode mps measured on a real GPU: prints one JSON object for each scene, whose `held` says whether the
scene's claim is true.

    python -m tests.gpu.mps_h200 [SCENE...]

It starts a vgpud of its own and ends all it started. The card's compute mode is never changed. Needs root,
nvidia-cuda-mps-control, and build/native; PyTorch where the machine's python3 has it.
"""

import json
import os
import pwd
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.demo.node import POLICY, ROOT, DemoNode
from tests.demo.scenes import PROBE, torch_python
from tests.e2e.support import GIB, MIB, allocate, client, helper_pids, release, states
from tests.gpu.scenes import say, started
from vgpud.api.gen import vgpud_pb2 as pb

RULES = "[device.mps]\ncheck_seconds = 1.0\nhang_seconds = 5.0\n"
WORKER = str(ROOT / "tests" / "gpu" / "mps_worker.py")
PYTHON = "/usr/bin/python3" if os.access("/usr/bin/python3", os.X_OK) else sys.executable
MANY, ITERATIONS, SECONDS = 132 * 64, 2000, 2.0
HALF = 64  # the number of blocks of a kernel, one on each multiprocessor: less than half of the device
FAMILIES = ("alloc", "pitch", "managed", "async", "vmm", "array")
TORCH = """
import json, time, torch
a = torch.randn(4096, 4096, device="cuda")
for _ in range(3): a @ a
torch.cuda.synchronize(); n = 0; t = time.time()
while time.time() - t < 3:
    a @ a; torch.cuda.synchronize(); n += 1
held = []
try:
    while True: held.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
except torch.cuda.OutOfMemoryError: pass
print(json.dumps({"rate": n / 3, "bytes": torch.cuda.memory_reserved()}))
"""


class Program:
    """A worker process under an allocation, or (None) directly on the device."""

    def __init__(self, node: DemoNode, held: pb.Allocation | None, uid: int | None = None) -> None:
        edits = {} if held is None else {**held.edits.env, **held.edits.host_env}
        bare = {k: v for k, v in node.environment.items() if not k.startswith("CUDA_MPS")}
        nowhere = {} if held is not None else {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}
        self.process = subprocess.Popen(
            [PYTHON, WORKER],
            env={**bare, **nowhere, **edits},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            user=uid,
            cwd="/",
        )
        self.first = self.line()

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text:
            return {"state": "ended", "code": self.process.wait()}
        found: dict[str, Any] = json.loads(text)
        return found

    def tell(self, words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()

    def work(self, blocks: int = MANY, seconds: float = SECONDS) -> None:
        self.tell(f"work {seconds} {blocks} {ITERATIONS}")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def rates(programs: list[Program], blocks: int = MANY, seconds: float = SECONDS) -> list[float]:
    """Blocks per second of each program while all run at the same time, as the median of three rounds."""
    rounds = []
    for _ in range(3):
        for one in programs:
            one.work(blocks, seconds)
        rounds.append([float(one.line().get("blocks_per_second", 0)) for one in programs])
    return [statistics.median(values) for values in zip(*rounds, strict=True)]


@contextmanager
def running(rules: str = RULES) -> Iterator[DemoNode]:
    with started(DemoNode(POLICY + rules)) as node:
        try:
            yield node
        finally:
            if node.daemon is not None and node.daemon.poll() is None:
                for held in states(node):
                    release(node, held, force=True)


def share(node: DemoNode, gib: int, percent: float, **asked: Any) -> pb.Allocation:
    return allocate(
        node,
        isolation="compute",
        memory_bytes=gib * GIB,
        share_percent=percent,
        selector=pb.Selector(indices=[0]),
        **asked,
    )


def probe(
    node: DemoNode, held: pb.Allocation, *words: str, seconds: float = 60, **extra: str
) -> dict[str, Any]:
    env = {**node.environment, **held.edits.env, **held.edits.host_env, **extra}
    try:
        done = subprocess.run(
            [PROBE, *words], env=env, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"result": f"still going after {seconds:g} s"}
    lines = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {"result": done.stderr[-200:]}
    return found


def control_pid(node: DemoNode) -> int:
    return next(iter(helper_pids(node, "vgpud-mps@").values()), 0)


# --- the scenes


def recorded() -> None:
    """Records the output of this driver's MPS daemon, as input for the parsers' tests."""
    with running() as node:
        one, two = share(node, 2, 25), share(node, 4, 50)
        programs = [Program(node, one), Program(node, two)]
        pipe = one.edits.host_env["CUDA_MPS_PIPE_DIRECTORY"]
        env = {**node.environment, "CUDA_MPS_PIPE_DIRECTORY": pipe}

        def ask(command: str) -> str:
            done = subprocess.run(
                ["nvidia-cuda-mps-control"],
                check=False,
                input=command + "\n",
                env=env,
                capture_output=True,
                text=True,
                timeout=20,
            )
            return f"rc {done.returncode}: {done.stdout}{done.stderr}"

        servers = ask("get_server_list").split()
        server = servers[2] if len(servers) > 2 else "0"
        commands = (
            "get_server_list",
            f"get_server_status {server}",
            f"get_client_list {server}",
            "ps",
            "device_query",
            "get_device_client_list",
            f"get_device_pinned_mem_limit {server} 0",
            f"get_active_thread_percentage {server}",
            "get_default_device_pinned_mem_limit 0",
            "get_default_active_thread_percentage",
            "get_default_client_priority",
        )
        version = subprocess.run(
            ["nvidia-cuda-mps-control", "-v"],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
        )
        with client(node) as calls:
            listed = calls.list_mps().daemons
        clients = sorted(c.pid for d in listed for c in d.clients)
        held = clients == sorted(p.process.pid for p in programs)
        say(
            "recorded",
            held=held,
            ready=[p.first for p in programs],
            version=version.stdout,
            answers={command: ask(command) for command in commands},
            mps_ls=node.ctl("mps", "ls", check=False).stdout,
        )
        for program in programs:
            program.end()


def shares() -> None:
    """Tenants of 10, 30 and 60 % at the same time, and each alone, compared with one tenant that has all of
    the device.
    """
    with running() as node:
        bare = Program(node, None)
        bare.tell("launch 20000")
        bare_launch = bare.line()["microseconds"]
        (bare_rate,) = rates([bare])
        bare.end()
        whole = share(node, 100, 100)
        one = Program(node, whole)
        one.tell("launch 20000")
        launch = one.line()["microseconds"]
        (full,) = rates([one])
        one.end()
        release(node, whole.id, force=True)
        asked = (10, 30, 60)
        programs = [Program(node, share(node, 8, percent)) for percent in asked]
        alone = [100 * rates([program])[0] / full for program in programs]
        together = [100 * rate / full for rate in rates(programs)]
        points = [abs(got - percent) for got, percent in zip(together, asked, strict=True)]
        say(
            "shares",
            held=max(points) <= 3,
            asked=asked,
            alone_percent=alone,
            together_percent=together,
            worst_points=max(points),
            multiprocessors=[p.first.get("multiprocessors") for p in programs],
            init_milliseconds={
                "bare": bare.first["init_milliseconds"],
                "mps": one.first["init_milliseconds"],
            },
            context_milliseconds={
                "bare": bare.first["context_milliseconds"],
                "mps": one.first["context_milliseconds"],
            },
            launch_microseconds={"bare": bare_launch, "mps": launch},
            solo_rate_of_bare=full / bare_rate,
        )
        for program in programs:
            program.end()


def halves() -> None:
    """Two tenants with half of the device each, compared with two programs that the driver time-slices."""
    with running() as node:
        sliced = [Program(node, None) for _ in range(2)]
        before = {"small": sum(rates(sliced, HALF)), "many": sum(rates(sliced))}
        for program in sliced:
            program.end()
        tenants = [Program(node, share(node, 32, 50)) for _ in range(2)]
        after = {"small": sum(rates(tenants, HALF)), "many": sum(rates(tenants))}
        for program in tenants:
            program.end()
        ratio = {kind: after[kind] / before[kind] for kind in before}
        say("halves", held=ratio["small"] > 1, sum_of_time_slicing=ratio)


def memory() -> None:
    """Allocates in each family up to a limit of 4 GiB, with a larger tenant beside it."""
    with running() as node:
        held, _ = share(node, 4, 20), share(node, 16, 40)
        filled = {
            family: probe(node, held, "--family", family, "fill", "--piece", str(64 * MIB), seconds=40)
            for family in FAMILIES
        }
        totals = {family: int(found.get("total_bytes", -1)) for family, found in filled.items()}
        raised = probe(
            node,
            held,
            "fill",
            "--piece",
            str(64 * MIB),
            CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=64G",
            CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="100",
        )
        first = Program(node, held)
        second = probe(node, held, "hold", "1MiB")
        first.end()
        say(
            "memory",
            held=all(0 < total <= 4 * GIB for total in totals.values())
            and raised.get("total_bytes") == totals["alloc"],
            limit_bytes=4 * GIB,
            filled_bytes=totals,
            results={family: found.get("result") for family, found in filled.items()},
            raised_bytes=raised.get("total_bytes"),
            second_process_of_the_tenant=second.get("result"),
        )


def death() -> None:
    """Kills the MPS control daemon three times under load, while programs keep starting."""
    rounds, open_windows, tried = [], 0, 0
    with running() as node:
        for _ in range(3):
            loaded, other = share(node, 8, 40), share(node, 2, 10)
            victim = Program(node, loaded)
            victim.work(seconds=30)
            time.sleep(0.5)
            first = control_pid(node)
            began = time.time()
            os.kill(first, signal.SIGKILL)
            marked = restored = 0.0
            refusals: dict[str, int] = {}
            while time.time() - began < 20 and not restored:
                found = probe(node, other, "fill", "--piece", str(256 * MIB))
                tried += 1
                total = int(found.get("total_bytes", 0))
                open_windows += total > 2 * GIB
                result = str(found.get("result"))
                refusals[result] = refusals.get(result, 0) + 1
                marked = marked or (time.time() - began if set(states(node).values()) == {"failed"} else 0.0)
                if 0 < total <= 2 * GIB:
                    restored = time.time() - began
            lost = victim.line()
            victim.end()
            rounds.append(
                {
                    "failed_after_seconds": marked,
                    "restored_after_seconds": restored,
                    "victim": lost,
                    "victim_lost_after_seconds": float(lost.get("at", 0)) - began,
                    "seen_meanwhile": refusals,
                }
            )
            for name in list(states(node)):
                release(node, name, force=True)
    held = open_windows == 0 and all(0 < r["restored_after_seconds"] < 2 for r in rounds)  # type: ignore[operator]
    say("death", held=held, fail_open_windows=open_windows, programs_started=tried, rounds=rounds)


def restart() -> None:
    """Kills vgpud under load: no client is affected."""
    with running() as node:
        held = share(node, 8, 50)
        program = Program(node, held)
        pid = control_pid(node)
        (before,) = rates([program])
        program.work(seconds=4)
        time.sleep(0.5)
        node.kill()
        seconds = node.start()
        during = program.line()
        same = control_pid(node) == pid and states(node) == {held.id: "active"}
        program.end()
        ratio = float(during.get("blocks_per_second", 0)) / before
        say(
            "restart", held=same and ratio > 0.9, rate_of_before=ratio, back_in_seconds=seconds, during=during
        )


def users() -> None:
    """Clients of two uids at the same time: one server for all if the driver supports it; otherwise the
    second is refused.
    """
    names = [entry.pw_uid for entry in pwd.getpwall() if entry.pw_name in ("nobody", "daemon")]
    with running(RULES + 'users = "multi"\n') as node:
        node.folder.chmod(0o755)
        held = [share(node, 4, 40, owner_uid=uid, owner_gid=uid) for uid in names]
        programs = [Program(node, one, uid) for one, uid in zip(held, names, strict=True)]
        got = rates(programs) if all(p.first.get("state") == "ready" for p in programs) else []
        with client(node) as calls:
            daemons = calls.list_mps().daemons
        say(
            "users",
            held=len(got) == 2 and min(got) > 0,
            uids=names,
            first_lines=[p.first for p in programs],
            rates=got,
            multi_user=[d.multi_user for d in daemons],
            servers=[[s.uid for s in d.servers] for d in daemons],
            clients=[[(c.uid, c.allocation_id) for c in d.clients] for d in daemons],
        )
        for program in programs:
            program.end()
    with running() as node:
        share(node, 4, 40, owner_uid=names[0], owner_gid=names[0])
        try:
            share(node, 4, 40, owner_uid=names[1], owner_gid=names[1])
            said: tuple[str, ...] = ("was let in",)
        except Exception as refusal:
            said = getattr(refusal, "details", (str(refusal),))
        say("second user", held=any("would wait" in line for line in said), said=said)


def silent() -> None:
    """A process connects to the MPS daemon and sends nothing. Finds out whether it blocks the daemon, and
    whether the daemon disconnects it.
    """
    with running() as node:
        held = share(node, 4, 40)
        program = Program(node, held)
        code = (
            "import socket, sys\n"
            "for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):\n"
            "    s = socket.socket(socket.AF_UNIX, kind)\n"
            "    try: s.connect(sys.argv[1])\n"
            "    except OSError as error: continue\n"
            "    else:\n"
            "        print('connected', kind, flush=True)\n"
            "        while s.recv(4096): pass\n"
            "        break\n"
        )
        pipe = held.edits.host_env["CUDA_MPS_PIPE_DIRECTORY"]
        holder = subprocess.Popen([PYTHON, "-c", code, f"{pipe}/control"], stdout=subprocess.PIPE, text=True)
        assert holder.stdout is not None
        kind = holder.stdout.readline().strip()
        pid, began = control_pid(node), time.time()
        while holder.poll() is None and time.time() - began < 25:
            time.sleep(0.1)
        ended = holder.poll()
        holder.kill()
        (rate,) = rates([program], seconds=1.0)
        say(
            "silent",
            held=rate > 0 and control_pid(node) == pid,
            socket=kind,
            connection_cut_by_vgpud=ended == 0,
            after_seconds=time.time() - began,
            log=[line for line in node.log.read_text().splitlines() if "kept" in line or "answer" in line][
                -4:
            ],
        )
        program.end()


def pytorch() -> None:
    python = torch_python()
    if python is None:
        say("pytorch", held=None, why="no PyTorch here")
        return
    with running() as node:
        held = [share(node, 8, 50), share(node, 16, 50)]
        programs = [
            subprocess.Popen(
                [python, "-c", TORCH],
                env={**node.environment, **one.edits.env, **one.edits.host_env},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for one in held
        ]
        outputs = [one.communicate(timeout=120) for one in programs]
        found: list[dict[str, Any]] = [
            json.loads(out) if out.strip() else {"error": err[-400:]} for out, err in outputs
        ]
        fine = [0 < f.get("bytes", 0) <= gib * GIB for f, gib in zip(found, (8, 16), strict=True)]
        say("pytorch", held=all(fine), tenants=found)


def pooled() -> None:
    """libvgpu with MPS: two processes of one tenant share one limit, of which either may use all."""
    with running(RULES + 'processes_per_tenant = 2\nmemory = "libvgpu"\n') as node:
        held, beside = share(node, 4, 40), share(node, 8, 40)
        alone = probe(node, held, "fill", "--piece", str(32 * MIB))
        first = Program(node, held)
        both = probe(node, held, "fill", "--piece", str(32 * MIB))
        other = probe(node, beside, "fill", "--piece", str(32 * MIB))
        with client(node) as calls:
            use = calls.get_allocation(held.id).use[0]
        totals = [int(found.get("total_bytes", -1)) for found in (alone, both, other)]
        say(
            "pooled",
            held=3 * GIB < totals[0] < 4 * GIB
            and 0 < totals[1] < totals[0]
            and 7 * GIB < totals[2] < 8 * GIB,
            ready=first.first,
            filled_alone=totals[0],
            filled_beside_a_context=totals[1],
            other_tenant=totals[2],
            results=[found.get("result") for found in (alone, both, other)],
            used_bytes=use.memory_used_bytes,
            refusals=use.refusals_limit,
        )
        first.end()


def fault() -> None:
    """One tenant makes an invalid write: the effect on the other tenant, vgpud's report, and when the device
    serves again.
    """
    with running() as node:
        one, two = share(node, 4, 40), share(node, 4, 40)
        stray, beside = Program(node, one), Program(node, two)
        beside.work(seconds=4)
        time.sleep(0.5)
        stray.tell("fault")
        said = stray.line()
        seen = node.ctl("mps", "ls", check=False).stdout
        felt = beside.line()
        time.sleep(1.5)  # vgpud checks the MPS daemons once a second
        shown = node.ctl("mps", "ls", check=False).stdout
        newcomer = probe(node, one, "hold", "1MiB", seconds=10)
        stray.end()
        beside.end()
        began, after = time.time(), {}
        while time.time() - began < 15:
            after = probe(node, one, "fill", "--piece", str(256 * MIB), seconds=10)
            if int(after.get("total_bytes", 0)) > 0:
                break
        say(
            "fault",
            held=int(after.get("total_bytes", 0)) > 0,
            stray=said,
            beside=felt,
            mps_ls_at_once=seen,
            mps_ls_later=shown,
            newcomer=newcomer.get("result", newcomer),
            serves_again_after_seconds=time.time() - began,
            states=states(node),
            log=[line for line in node.log.read_text().splitlines() if "FAULT" in line][-4:],
        )


SCENES: tuple[Callable[[], None], ...] = (
    recorded,
    shares,
    halves,
    memory,
    death,
    restart,
    users,
    silent,
    pytorch,
    pooled,
    fault,
)


def main() -> int:
    if shutil.which("nvidia-cuda-mps-control") is None:
        say("start", held=None, why="no nvidia-cuda-mps-control here")
        return 0
    wanted = set(sys.argv[1:])
    for scene in SCENES:
        if wanted and scene.__name__ not in wanted:
            continue
        began = time.time()
        try:
            scene()
        except Exception as error:
            say(scene.__name__, held=False, error=str(error), trace=traceback.format_exc().splitlines()[-6:])
        say("time", of=scene.__name__, seconds=round(time.time() - began, 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
