"""No parser of foreign bytes runs on the event loop, where all callers would wait: checked in the source.

The table has each use of a parser, with the reason why it is off the loop or its input is small. A new use
fails until the table has it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.lint.test_house import ROOT, imports_of, modules, room_of

PARSERS = {
    "json.loads",
    "json.load",
    "tomllib.loads",
    "tomllib.load",
    "yaml.safe_load",
    "get_close_matches",
    "FromString",
    "ParseFromString",
    "MergeFromString",
    "literal_eval",
    "fromstring",
}
# The rooms of the daemon. vgpuctl is left out, because it parses its own user's files in its own process.
ROOMS = {"api", "audit", "daemon", "hardware", "inject", "lease", "ledger", "logs",
         "model", "modes", "node", "planner", "policy", "serve", "settings", "units"}  # fmt: skip
THREAD, SMALL, OWN = "in a thread", "of a bounded input", "of root's or vgpud's own file, or the kubelet's"
WHERE = {
    "vgpud/hardware/engine_probe.py": OWN,  # reads the output of vgpu-engine-probe
    "vgpud/hardware/fatal.py": OWN,
    "vgpud/inject/cdi.py": OWN,
    "vgpud/inject/driver.py": OWN,
    "vgpud/inject/oci.py": THREAD,  # RuntimeDoor._aside calls this parser on a thread
    "vgpud/inject/wish.py": THREAD,  # it parses texts of at most 32 characters, on a thread
    "vgpud/planner/layouts.py": SMALL,  # the regular expression reads the first 32 characters of a word
    "vgpud/planner/refuse.py": SMALL,  # the profile's name has at most 256 characters
    "vgpud/planner/select.py": SMALL,  # the UUID has at most 256 characters
    "vgpud/policy/locate.py": OWN,
    "vgpud/policy/source.py": OWN,
    "vgpud/policy/words.py": OWN,
    "vgpud/lease/engines.py": OWN,
    "vgpud/serve/calls.py": SMALL,  # bounded by MAX_REQUEST_BYTES of serve/server.py
    "vgpud/serve/dra/plugin.py": OWN,
    "vgpud/serve/kubelet/plugin.py": OWN,
    "vgpud/serve/kubelet/wire.py": OWN,
    "vgpud/serve/old_files.py": OWN,
    "vgpud/settings.py": OWN,  # the names in vgpud's environment, before the event loop runs
}


def parsers_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            yield from (one for one in PARSERS if name == one or ("." not in one and node.attr == one))
        elif isinstance(node, ast.Name) and node.id in PARSERS:
            yield node.id


def test_each_parser_of_foreign_bytes_is_off_the_event_loop_or_bounded() -> None:
    daemons = [path for path in modules() if room_of(path) in ROOMS]
    found = {str(path.relative_to(ROOT)) for path in daemons if any(parsers_in(path))}
    assert found == WHERE.keys()


def test_the_runtime_door_reads_config_json_only_in_its_thread() -> None:
    """Only the part of the runtime door that runs on a thread may call functions that read config.json."""
    door = ast.parse((ROOT / "vgpud/serve/runtime.py").read_text())
    work = {"parsed", "wish_of", "ignored_by", "check_shape", "owner_of", "pod_of"}
    readers = {
        function.name
        for function in ast.walk(door)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and node.id in work
    }
    assert readers == {"understood", "_named_pod"}
    handed = [
        ast.unparse(call.args[1])
        for call in ast.walk(door)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "self._aside"
    ]
    assert "understood" in handed and {*handed} <= {"understood", "dumped", "_named_pod"}
    users = [path for path in modules() if "vgpud.inject.oci.parsed" in imports_of(path)]
    assert users == [ROOT / "vgpud/serve/runtime.py"]
