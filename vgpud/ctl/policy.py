"""The verbs of `vgpuctl policy`. With a file argument, check and show work without a daemon."""

import json
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vgpud.ctl.connect import connect
from vgpud.ctl.document import plain
from vgpud.ctl.table import Column, Table, clean
from vgpud.ctl.terminal import Terminal, View
from vgpud.model.errors import Exit, VgpuError

if TYPE_CHECKING:
    from vgpud.policy.compare import Change
    from vgpud.policy.load import LoadedPolicy

BUILT_IN = "built-in"
UNCOMPARED = " (not compared with the devices of this node: vgpud does not answer)"


def check(arguments: Namespace, terminal: Terminal) -> int:
    """Checks a policy file. The exit code is Exit.CONFIG if it has mistakes; each is printed on its own
    line.
    """
    from vgpud.ctl.policy_files import one_file

    loaded = one_file(arguments.file, terminal)
    compared = _check_devices(loaded, arguments)
    document = _document(loaded)
    if terminal.output in ("table", "wide"):
        terminal.say(f"{arguments.file} is a valid policy" + ("" if compared else UNCOMPARED))
    else:
        terminal.show(_view(document, origins=True, kind="PolicyCheck"))
    return Exit.OK.value


def show(arguments: Namespace, terminal: Terminal) -> int:
    if arguments.file:
        from vgpud.ctl.policy_files import one_file

        document = _document(one_file(arguments.file, terminal))
    else:
        document = _online(arguments)
    terminal.show(_view(document, arguments.origin, "Policy"))
    return Exit.OK.value


def reload(arguments: Namespace, terminal: Terminal) -> int:
    """Reloads the policy. With --dry-run, the exit code is Exit.DIFFERS if a reload would change anything."""
    with connect(arguments) as client:
        reply = client.reload_policy(arguments.dry_run)
    if not terminal.is_text:
        terminal.show(View("PolicyReload", {"dryRun": arguments.dry_run, **plain(reply)}, [reply.digest], []))
    else:
        would = "would be " if arguments.dry_run else ""
        terminal.say(f"policy {would}{'changed' if reply.changed else 'unchanged'}, digest {reply.digest}")
        done = "at a reload" if arguments.dry_run else "done"
        for word, sentences in ((done, reply.done), ("waiting", reply.waiting)):
            for sentence in sentences:
                print(f"{word}: {clean(sentence)}")
    differs = arguments.dry_run and reply.changed
    return Exit.DIFFERS.value if differs else Exit.OK.value


def diff(arguments: Namespace, terminal: Terminal) -> int:
    """Compares policy files with the policy in force. The exit code is Exit.DIFFERS if they differ."""
    from vgpud.ctl.policy_files import on_disk, one_file
    from vgpud.policy.compare import compare
    from vgpud.policy.effective import as_toml

    now = _online(arguments)
    new = _document(one_file(arguments.file, terminal) if arguments.file else on_disk())
    changes = [change for change in compare(now["policy"], new["policy"]) if _is_given(change, now, new)]
    lines = []
    for key, before, after in changes:
        for sign, value, origins in (("-", before, now["origins"]), ("+", after, new["origins"])):
            if value is not None:
                lines.append((sign, f"{key} = {as_toml(value)}", origins.get(key, BUILT_IN)))
    document = {
        "differs": bool(changes),
        "changes": [{"key": key, "inForce": before, "onDisk": after} for key, before, after in changes],
    }
    columns = (Column("", styles={"-": "red", "+": "green"}), Column(""), Column(""))
    terminal.show(View("PolicyDiff", document, [change.key for change in changes], [Table(columns, lines)]))
    if not changes:
        terminal.say(f"nothing differs, digest {now['digest'][:8]}")
    return Exit.DIFFERS.value if changes else Exit.OK.value


def _is_given(change: "Change", now: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Is this difference between two policies worth showing? If a rule is in one of the policies only, keys
    that have their built-in value there are not shown.
    """
    if None not in (change.before, change.after):
        return True
    side = new if change.before is None else now
    return change.key in side["origins"] and side["origins"][change.key] != BUILT_IN


def _online(arguments: Namespace) -> dict[str, Any]:
    with connect(arguments) as client:
        reply = client.get_policy()
    return {
        "digest": reply.digest,
        "files": list(reply.files),
        "policy": json.loads(reply.json),
        "origins": dict(reply.origins),
    }


def _check_devices(loaded: "LoadedPolicy", arguments: Namespace) -> bool:
    """Checks the policy's rules against the host's users and the node's devices. Returns False if vgpud does
    not list its devices. Raises VgpuError(BAD_POLICY) if a rule names an unknown user or group, or does not
    fit the devices.
    """
    from vgpud.ctl.policy_cases import node_of
    from vgpud.directory import has_group, has_user
    from vgpud.planner.misfits import misfits
    from vgpud.policy.accounts import unknown_names
    from vgpud.policy.load import bad_policy

    problems = [*unknown_names(loaded, has_user, has_group)]
    answers = True
    try:
        with connect(arguments) as client:
            problems += misfits(loaded, node_of(client.list_devices().devices))
    except VgpuError:
        answers = False
    if problems:
        raise bad_policy(problems)
    return answers


def _document(loaded: "LoadedPolicy") -> dict[str, Any]:
    from vgpud.policy.effective import effective

    return {
        "digest": loaded.digest,
        "files": [str(file) for file in loaded.files],
        "policy": effective(loaded.policy),
        "origins": {key: str(origin) for key, origin in loaded.origins.items()},
    }


def _view(document: Mapping[str, Any], origins: bool, kind: str) -> View:
    """The policy as TOML lines, one for each key with its full path; with `origins`, also the file and line
    of each.
    """
    from vgpud.policy.effective import as_toml, leaves
    from vgpud.policy.locate import spell

    rows = [(spell(path), as_toml(value)) for path, value in leaves(document["policy"])]
    if origins:
        columns = (Column("KEY"), Column("VALUE"), Column("ORIGIN"))
        known = document["origins"]
        table = Table(columns, [(key, value, known.get(key, BUILT_IN)) for key, value in rows])
    else:
        table = Table((Column(""),), [(f"{key} = {value}",) for key, value in rows])
    return View(kind, document, document["files"], [table])
