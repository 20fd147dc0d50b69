"""`vgpu-sim`: makes a simulated node, runs programs inside it, prints its state, injects faults."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vgpu_sim.node import Node, NodeError, find_tree
from vgpu_sim.profile import ProfileError

DEFAULT_PROFILE = "h200x8"
DEFAULT_STATE = "VGPU_SIM_STATE"
#: Faults that make a card need repair; each has a number: an nvmlDeviceGpuRecoveryAction_t, rows or banks.
SICK = ("recovery", "rows-pending", "rows-failed", "banks-pending")
NVML_FUNCTION_NOT_FOUND, CUDA_NOT_FOUND = 13, 500


def _node(args: argparse.Namespace) -> Node:
    state = args.state or os.environ.get(DEFAULT_STATE)
    if not state:
        raise NodeError(f"no node given: use --state FILE or set {DEFAULT_STATE}")
    return Node(Path(state).absolute(), find_tree())


def _create(args: argparse.Namespace) -> int:
    node = _node(args)
    node.create(args.profile, args.seed, args.driver)
    print(node.state)
    return 0


def _run(args: argparse.Namespace) -> int:
    """Runs a command inside the node that --state names, which is made if the file does not exist, and stays.
    Without --state: inside a new node that is removed afterwards.
    """
    command = [os.environ.get("SHELL", "/bin/sh")] if args.verb == "shell" else args.command
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise NodeError("no command given after --")
    with tempfile.TemporaryDirectory(prefix="vgpu-sim-") as scratch:
        state = Path(args.state).absolute() if args.state else Path(scratch) / "node"
        node = Node(state, find_tree())
        if not state.exists():
            node.create(args.profile, args.seed, args.driver)
        env = node.environment(os.environ)
        try:
            done = subprocess.run(
                command, env=env, executable=shutil.which(command[0], path=env["PATH"]), check=False
            )
        except OSError as exc:
            raise NodeError(f"cannot run {command[0]}: {exc.strerror}") from exc
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def _state(args: argparse.Namespace) -> int:
    state = _node(args).dump()
    if args.json:
        print(json.dumps(state, indent=2))
        return 0
    print(f"{state['profile']}  driver {state['driver_version']}  boots {state['boot_count']}")
    for d in state["devices"]:
        mig = f"mig {d['mig_current']}/{d['mig_pending']}"
        gone = "  LOST" if d["lost"] else ""
        used, total = d["memory_used"] >> 20, d["memory_total"] >> 20
        print(
            d["index"],
            d["uuid"],
            d["name"],
            f"{used}/{total} MiB",
            f"mode {d['compute_mode']}",
            mig + gone,
            sep="  ",
        )
        for g in d["gpu_instances"]:
            ids = ",".join(str(c["id"]) for c in g["compute_instances"])
            print(f"   gi {g['id']}  {g['profile']}  {g['start']}:{g['size']}  ci [{ids}]")
    for p in state["processes"]:
        for u in p["uses"]:
            print(f"pid {p['pid']}  device {u['device']}  gi {u['gi']}  {u['bytes'] >> 20} MiB")
    return 0


def _fault(args: argparse.Namespace) -> int:
    node, device = _node(args), str(args.device)
    if args.what == "clear":
        node.control("clear-faults", *([device] if args.device >= 0 else []))
        for index, found in enumerate(node.dump()["devices"]):
            if args.device not in (-1, index):
                continue
            if found["lost"]:
                node.control("lost", str(index), "0")
            for what in ("hide", *SICK):
                node.control(what, str(index), "0")
    elif args.what in ("fail", "hang", "missing", "slow"):
        if not args.function:
            raise NodeError(f"fault {args.what} needs --function NAME (a trailing * matches a prefix)")
        action = "error" if args.what == "fail" else args.what
        value = args.microseconds if action == "slow" else args.code
        if action == "missing":
            value = NVML_FUNCTION_NOT_FOUND if args.function.startswith("nvml") else CUDA_NOT_FOUND
        node.control("fault", args.function, action, str(value), str(args.count), device)
    elif args.device < 0:
        raise NodeError(f"fault {args.what} needs --device N")
    elif args.what == "gpu-lost":
        node.control("lost", device, "1")
    elif args.what == "memory":
        node.control("hide", device, str(args.bytes))
    elif args.what in ("xid", *SICK):
        node.control(args.what, device, str(args.code))
    return 0


def _root(args: argparse.Namespace) -> int:
    print(_node(args).driver_root())
    return 0


def _reboot(args: argparse.Namespace) -> int:
    _node(args).control("reboot")
    return 0


def _reset(args: argparse.Namespace) -> int:
    _node(args).control("reset", str(args.device))
    return 0


def _driver(args: argparse.Namespace) -> int:
    _node(args).control("driver", args.driver_version)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vgpu-sim", description="a simulated NVIDIA node")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    state = argparse.ArgumentParser(add_help=False)
    state.add_argument("--state", metavar="FILE", help="the node's state file (default: $VGPU_SIM_STATE)")
    make = argparse.ArgumentParser(add_help=False, parents=[state])
    make.add_argument(
        "--profile", default=DEFAULT_PROFILE, help=f"name or TOML file (default: {DEFAULT_PROFILE})"
    )
    make.add_argument(
        "--driver", default="", metavar="BRANCH", help="another driver than the profile's: 535 to 615"
    )
    make.add_argument("--seed", default="", help="other UUIDs and serial numbers")
    verbs.add_parser("create", parents=[make], help="make a node").set_defaults(act=_create)
    for verb in ("run", "shell"):
        sub = verbs.add_parser(verb, parents=[make], help="run a program (or a shell) inside a node")
        if verb == "run":
            sub.add_argument("command", nargs=argparse.REMAINDER)
        sub.set_defaults(act=_run)
    show = verbs.add_parser("state", parents=[state], help="devices, instances, processes")
    show.add_argument("--json", action="store_true")
    show.set_defaults(act=_state)
    fault = verbs.add_parser(
        "fault", parents=[state], help="break something, or `clear` all faults, or those of a device"
    )
    faults = ["fail", "hang", "missing", "slow", "gpu-lost", "memory", "xid", *SICK, "clear"]
    fault.add_argument("what", choices=faults)
    fault.add_argument("--function", help="an NVML or CUDA function; a trailing * matches a prefix")
    fault.add_argument(
        "--code", type=int, default=999, help="nvmlReturn_t, CUresult, Xid, action or number (default 999)"
    )
    fault.add_argument("--count", type=int, default=-1, help="calls to hit (default: every one)")
    fault.add_argument("--device", type=int, default=-1, help="device index (default: all)")
    fault.add_argument("--microseconds", type=int, default=1000000, help="delay of `slow`")
    fault.add_argument("--bytes", type=int, default=0, help="memory that `memory` takes away")
    fault.set_defaults(act=_fault)
    verbs.add_parser(
        "root", parents=[state], help="complete the node's root for tools with --driver-root, and print it"
    ).set_defaults(act=_root)
    verbs.add_parser("reboot", parents=[state], help="what a reboot keeps and loses").set_defaults(
        act=_reboot
    )
    reset = verbs.add_parser("reset", parents=[state], help="reset one idle device")
    reset.add_argument("device", type=int)
    reset.set_defaults(act=_reset)
    driver = verbs.add_parser("driver", parents=[state], help="upgrade the driver under running programs")
    driver.add_argument("driver_version", metavar="VERSION")
    driver.set_defaults(act=_driver)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: that of the program that ran, 1 for a refusal, 2 for bad arguments."""
    args = _parser().parse_args(argv)
    try:
        act: int = args.act(args)
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(141)  # the reader closed the pipe: exits as a program that SIGPIPE killed
    except (NodeError, ProfileError) as exc:
        print(f"vgpu-sim: {exc}", file=sys.stderr)
        return 1
    return act
