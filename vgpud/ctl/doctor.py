"""`vgpuctl doctor`: checks this host for problems of vgpud, each with a fix."""

import os
import time
from argparse import Namespace

from vgpud.ctl import checks
from vgpud.ctl.checks import FAIL, OK, WARN, Finding, Host, Node
from vgpud.ctl.connect import connect
from vgpud.ctl.table import Column, Table
from vgpud.ctl.terminal import Terminal, View
from vgpud.model.errors import Exit, VgpuError
from vgpud.model.quantity import counted

STYLES = {OK: "green", WARN: "yellow", FAIL: "red"}
COLUMNS = (Column("STATE", styles=STYLES), Column("CHECK"), Column("WHAT"), Column("FIX"))


def doctor(arguments: Namespace, terminal: Terminal) -> int:
    """Prints the findings. The exit code is Exit.DEGRADED if a check has failed; a warning is no failure."""
    found = examine(arguments)
    shown = found if terminal.verbose or terminal.is_machine else [f for f in found if f.state != OK]
    rows = [(item.state, item.check, item.sentence, item.fix) for item in shown]
    document = {"items": [item._asdict() for item in found]}
    terminal.show(View("Diagnosis", document, [item.check for item in shown], [Table(COLUMNS, rows)]))
    count = {state: sum(item.state == state for item in found) for state in (OK, WARN, FAIL)}
    terminal.say(f"{count[FAIL]} failed, {counted(count[WARN], 'warning')}, {count[OK]} ok" + _more(terminal))
    return Exit.DEGRADED.value if count[FAIL] else Exit.OK.value


def _more(terminal: Terminal) -> str:
    return "" if terminal.verbose else "; -v shows all"


def examine(arguments: Namespace) -> list[Finding]:
    """Makes all checks that are possible on this host, in the order in which problems should be repaired."""
    host = Host.of(os.environ)
    found = [*checks.kernel(), *checks.folders(host), *checks.programs(host), *checks.units()]
    found += [*checks.sockets(host), *checks.specs(host), *checks.subordinate_uids(), *_remote()]
    try:
        node = _ask(arguments)
    except VgpuError as error:
        # Causes that prevent the daemon's start come first, because restarting it would not help.
        return [
            *found,
            *checks.mps(host, False),
            *_files(),
            Finding("daemon", FAIL, error.sentence, error.hint),
        ]
    found.append(Finding("daemon", OK, node.node.status))
    held = frozenset(item.id for item in node.allocations)
    found += [
        *checks.driver(node.node),
        *checks.mps(host, node.node.simulated),
        *checks.devices(node.devices),
        *checks.engines(node.devices),
        *checks.tenants(node),
    ]
    found += [*checks.leases(host, held), *checks.leftovers(host, held), *checks.clock(node, time.time_ns())]
    found.append(_policy(node))
    return found


def _ask(arguments: Namespace) -> Node:
    with connect(arguments) as client:
        node = client.get_node()
        devices = [] if node.hardware_error else list(client.list_devices().devices)
        return Node(
            node,
            devices,
            list(client.list_allocations().allocations),
            list(client.list_processes().processes),
            list(client.list_events(1).events),
        )


def _files() -> list[Finding]:
    """Findings about the policy files alone, for a node on which the daemon does not answer."""
    from vgpud.ctl.policy_files import on_disk

    try:
        on_disk()
    except VgpuError as error:
        fix = "vgpuctl policy check FILE tells every mistake; then start vgpud"
        return [Finding("policy", FAIL, error.sentence, fix)]
    return [Finding("policy", OK, "the files are valid")]


def _remote() -> list[Finding]:
    from vgpud.ctl.policy_files import on_disk
    from vgpud.remote.grants import of_this_node

    try:
        settings = on_disk().policy.remote
    except VgpuError:
        return []  # the policy is wrong, which another finding reports
    grants, certificate = of_this_node()
    return [*checks.remote(settings, certificate), *(checks.grants(grants) if settings.server else ())]


def _policy(node: Node) -> Finding:
    from vgpud.ctl.policy_cases import node_of
    from vgpud.ctl.policy_files import on_disk
    from vgpud.directory import has_group, has_user
    from vgpud.planner.misfits import misfits
    from vgpud.policy.accounts import unknown_names

    try:
        loaded = on_disk()
    except VgpuError as error:
        return Finding("policy", FAIL, error.sentence, error.hint)
    problems = (*misfits(loaded, node_of(node.devices)), *unknown_names(loaded, has_user, has_group))
    if problems:
        first = problems[0]
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        return Finding("policy", FAIL, f"{first.origin}: {first.key}: {first.sentence}{more}", first.hint)
    digest = node.node.policy_digest
    if loaded.digest == digest:
        return Finding("policy", OK, f"{digest[:8]}, as on disk")
    return Finding(
        "policy",
        WARN,
        "the policy files differ from the policy in force",
        "see 'vgpuctl policy diff', then 'vgpuctl policy reload'",
    )
