"""Command lines of vgpuctl: what is accepted, what is refused with which hint, and that --help loads few
modules.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ctl.conftest import ROOT, Ctl, environment
from vgpud.ctl.parse import EVERYWHERE, SYNONYMS, parse
from vgpud.ctl.verbs import ANY_OUTPUT, ISOLATIONS, VERBS, Group, Verb
from vgpud.model.errors import Exit, VgpuError
from vgpud.model.tenancy import MODE_OF, Isolation

LINES = [(v.name, v) for v in VERBS if isinstance(v, Verb)] + [
    (f"{g.name} {v.name}", v) for g in VERBS if isinstance(g, Group) for v in g.verbs
]
HEAVY = (
    "grpc",
    "google.protobuf",
    "pydantic",
    "asyncio",
    "yaml",
    "dataclasses",
    "vgpud.api",
    "vgpud.model",
    "vgpud.policy",
)


@pytest.mark.parametrize("line", [["--help"], ["run", "--help"], ["policy", "--help"], ["--version"]])
def test_help_is_printed_without_costly_imports(line: list[str]) -> None:
    program = (
        "import json, sys\n"
        "from vgpud.ctl.main import main\n"
        f"code = main({line!r})\n"
        "print('\\n' + json.dumps([code, sorted(sys.modules)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )
    code, loaded = json.loads(done.stdout.splitlines()[-1])
    assert code == 0
    assert [name for name in HEAVY if name in loaded] == []
    assert "vgpud.ctl.verbs" in loaded


@pytest.mark.parametrize(("line", "verb"), LINES, ids=[line for line, _ in LINES])
def test_each_verb_has_help(line: str, verb: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse([*line.split(), "--help"])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: vgpuctl {line} [OPTIONS]")
    for argument in (*verb.arguments, *EVERYWHERE):
        assert all(flag in said for flag in argument.flags if flag.startswith("-"))
        assert argument.options["help"].split()[0] in said


@pytest.mark.parametrize(("line", "verb"), LINES, ids=[line for line, _ in LINES])
def test_each_verb_of_the_parser_has_a_function(line: str, verb: Verb) -> None:
    from importlib import import_module

    module, name = verb.function.split(":")
    assert callable(getattr(import_module(f"vgpud.ctl.{module}"), name))
    assert verb.default_output in verb.outputs


def test_the_main_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    said = capsys.readouterr().out
    for entry in VERBS:
        assert re.search(rf"^  {entry.name} +{re.escape(entry.help)}$", said, re.MULTILINE)


def test_the_isolations_of_vgpuctl_are_those_of_the_model() -> None:
    assert set(ISOLATIONS) == {isolation.value for isolation in Isolation}


@pytest.mark.parametrize(
    "line",
    [
        "-o json --socket /s --timeout 3 -q -v --no-headers --color never devices",
        "devices -o json --socket /s --timeout 3 -q -v --no-headers --color never",
        "-o json -q --no-headers devices --socket=/s --timeout=3 --color=never --verbose",
        "-o yaml --color always devices -o json --socket /s --timeout 3 -qv --no-headers --color never",
    ],
)
def test_options_may_stand_before_or_after_the_verb(line: str) -> None:
    verb, arguments = parse(line.split())
    assert verb.name == "devices"
    got = vars(arguments)
    assert (got["output"], got["socket"], got["timeout"]) == ("json", "/s", 3.0)
    assert (got["quiet"], got["verbose"], got["no_headers"], got["color"]) == (True, True, True, "never")


def test_options_may_stand_before_between_and_after_the_words_of_verb_policy() -> None:
    verb, arguments = parse(["-q", "policy", "-o", "json", "show", "--origin", "--socket", "/s"])
    assert verb.function == "policy:show"
    assert (arguments.quiet, arguments.output, arguments.origin, arguments.socket) == (
        True,
        "json",
        True,
        "/s",
    )


def test_a_double_dash_ends_the_options_of_verbs_other_than_run() -> None:
    _, arguments = parse(["release", "-q", "--", "-odd", "--force"])
    assert (arguments.allocation, arguments.force) == (["-odd", "--force"], False)


def test_options_have_their_defaults() -> None:
    _, arguments = parse(["devices"])
    assert (arguments.output, arguments.timeout, arguments.color) == ("table", 30.0, "auto")
    _, arguments = parse(["alloc"])
    assert arguments.output == "name"


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("run -- sh -c x", ["sh", "-c", "x"]),
        ("run --memory 1GiB -- a --memory 2 -- b", ["a", "--memory", "2", "--", "b"]),
        ("run a --memory 2 -o json -- b", ["a", "--memory", "2", "-o", "json", "--", "b"]),
        ("run -- --memory 10G", ["--memory", "10G"]),
        ("-v run -q -- -- x", ["--", "x"]),
    ],
)
def test_arguments_after_the_command_belong_to_the_command(line: str, command: list[str]) -> None:
    _, arguments = parse(line.split())
    assert arguments.command == command


REFUSED = [
    ("stats", "unknown verb 'stats'", "did you mean 'vgpuctl status'"),
    ("relese x", "unknown verb 'relese'", "did you mean 'vgpuctl release'"),
    ("rm x", "unknown verb 'rm'", "did you mean 'vgpuctl release'"),
    ("describe x", "unknown verb 'describe'", "did you mean 'vgpuctl show'"),
    ("gpus", "unknown verb 'gpus'", "did you mean 'vgpuctl devices'"),
    ("logs", "unknown verb 'logs'", "did you mean 'vgpuctl events'"),
    ("release --all", "vgpuctl release has no option --all", "vgpuctl release --help"),
    ("run --cors 5 -- true", "vgpuctl run has no option --cors", "did you mean --cores"),
    ("xyzzy", "unknown verb 'xyzzy'", "one of status, devices"),
    ("policy relaod", "unknown verb 'relaod'", "did you mean 'vgpuctl policy reload'"),
    ("-q", "required: VERB", "vgpuctl --help"),
    ("show", "required: ALLOCATION", "vgpuctl show --help"),
    ("release", "required: ALLOCATION", "vgpuctl release --help"),
    ("devices extra", "unrecognized arguments: extra", "vgpuctl devices --help"),
    ("alloc --memroy 1GiB", "vgpuctl alloc has no option --memroy", "did you mean --memory"),
    ("alloc --mem 1GiB", "vgpuctl alloc has no option --mem", "did you mean --memory"),
    ("alloc -m 1GiB", "vgpuctl alloc has no option -m", "did you mean --memory"),
    ("devices -o xml", "vgpuctl devices has no output format 'xml'", "table, wide, json, yaml, name"),
    ("ls -o env", "vgpuctl ls has no output format 'env'", "table, wide, json, yaml, name"),
    ("watch -o yaml", "has no output format 'yaml'", "use one of table, json"),
    ("run -o json -- true", "has no output format 'json'", "leave -o out"),
    ("ls --color red", "argument --color", "vgpuctl ls --help"),
    ("ls --timeout nan", "'nan' is not a number of seconds", "vgpuctl ls --help"),
    ("ls --timeout inf", "'inf' is not a number of seconds", "vgpuctl ls --help"),
    ("ls --timeout 0", "'0' is not a number of seconds", "vgpuctl ls --help"),
    ("alloc --isolation none", "argument --isolation", "vgpuctl alloc --help"),
    ("alloc --count 0", "'0' is not a number of devices", "vgpuctl alloc --help"),
    ("alloc --count 1.5", "'1.5' is not a number of devices", "vgpuctl alloc --help"),
    ("alloc --count ²", "'²' is not a number of devices", "vgpuctl alloc --help"),
    ("alloc --owner bob", "'bob' is not UID:GID", "vgpuctl alloc --help"),
    ("alloc --owner 1:4294967295", "is not UID:GID", "vgpuctl alloc --help"),
    ("watch --after x", "'x' is not a revision", "vgpuctl watch --help"),
    ("watch --after 18446744073709551616", "is not a revision", "vgpuctl watch --help"),
    ("alloc --memory 10G", "bad amount of memory '10G'", "say 10GiB (1024s) or 10GB (1000s)"),
    ("alloc --memory 10g", "bad amount of memory '10g'", "say 10GiB (1024s) or 10GB (1000s)"),
    ("alloc --memory 1.5g", "bad amount of memory '1.5g'", "say 1.5GiB"),
    ("alloc --memory 10", "it has no unit", "say 10MiB, 10GiB or 10B"),
    ("alloc --memory 0GiB", "it must be more than 0", "ask for at least 1MiB"),
    ("alloc --memory 8m", "'m' can mean 1000s or 1024s", "say 8MiB"),
    ("alloc --memory=-4GiB", "bad amount of memory '-4GiB'", ""),
    ("run --memory abc -- true", "bad amount of memory 'abc'", "write it as in 4GiB"),
    ("plan --memory NaN", "bad amount of memory 'NaN'", "write it as in 4GiB"),
    ("resize x --memory 0.3B", "bad amount of memory '0.3B'", "whole bytes"),
    ("alloc --cores 0", "bad share '0'", "leave the share out"),
    ("alloc --cores 101", "bad share '101'", "leave the share out"),
    ("alloc --cores 12.345", "more than two decimals", "hundredths of a percent"),
    ("alloc --cores nan", "it is not a percentage", "write it as in 30 or 12.5"),
    ("run --cores=-1 -- true", "it is not a percentage", "write it as in 30 or 12.5"),
]


@pytest.mark.parametrize(("line", "sentence", "hint"), REFUSED, ids=[line or "-" for line, _, _ in REFUSED])
def test_a_wrong_command_line_is_refused(line: str, sentence: str, hint: str) -> None:
    with pytest.raises(VgpuError) as refused:
        parse(line.split())
    assert sentence in refused.value.sentence
    assert hint in refused.value.hint
    assert refused.value.code.exit_code is Exit.BAD_ARGUMENT


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("", "usage: vgpuctl [OPTIONS] VERB"),
        ("help", "usage: vgpuctl [OPTIONS] VERB"),
        ("mig", "usage: vgpuctl mig [OPTIONS] VERB"),
        ("help run", "usage: vgpuctl run [OPTIONS]"),
        ("help mig ls", "usage: vgpuctl mig ls [OPTIONS]"),
        ("-v help run", "usage: vgpuctl run [OPTIONS]"),
        ("version", "vgpuctl "),
        ("-v version", "vgpuctl "),
        ("version -o json", "vgpuctl "),
        ("-V", "vgpuctl "),
    ],
)
def test_help_and_version_are_also_verbs(line: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(line.split())
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(printed)


EXAMPLES = [(line, verb) for _, verb in LINES for line in verb.examples]


@pytest.mark.parametrize(("line", "verb"), EXAMPLES, ids=[line for line, _ in EXAMPLES])
def test_each_example_parses_as_its_verb(line: str, verb: Verb) -> None:
    assert parse(shlex.split(line)[1:])[0] is verb


def test_each_verb_has_an_example() -> None:
    assert [line for line, verb in LINES if not verb.examples] == []


def test_each_synonym_names_an_existing_verb() -> None:
    lines = {line for line, _ in LINES}
    assert {meant for meant in SYNONYMS.values() if meant not in lines} == set()
    assert not SYNONYMS.keys() & {entry.name for entry in VERBS}


@pytest.mark.parametrize("mode", ["mig", "mps", "preload", "exclusive"])
def test_a_mode_is_accepted_as_the_isolation_that_it_provides(mode: str) -> None:
    _, arguments = parse(["alloc", "--isolation", mode])
    assert MODE_OF[Isolation(arguments.isolation)] == mode


def test_a_refusal_is_printed_as_sentence_and_hint(ctl: Ctl) -> None:
    done = ctl("alloc", "--memory", "10G")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "vgpuctl: bad amount of memory '10G': 'G' can mean 1000s or 1024s (E101)\n"
        "hint: say 10GiB (1024s) or 10GB (1000s)\n"
    )


def test_the_manual_names_every_verb_option_and_exit_code() -> None:
    manual = (ROOT / "docs" / "vgpuctl.md").read_text()
    for line, verb in LINES:
        assert f"`{line}" in manual, line
        for argument in verb.arguments:
            assert all(f"`{flag}" in manual for flag in argument.flags if flag.startswith("-")), (
                argument.flags
            )
    for argument in EVERYWHERE:
        assert all(f"`{flag}" in manual for flag in argument.flags), argument.flags
    for output in (*ANY_OUTPUT, "env"):
        assert f"`{output}`" in manual
    for code in (*(exit_.value for exit_ in Exit), 126, 127, 130, 141):
        assert re.search(rf"^\| {code} \|", manual, re.MULTILINE), code


def test_the_entry_point_of_vgpuctl_is_the_function_main() -> None:
    import tomllib

    project = tomllib.loads((Path(ROOT) / "pyproject.toml").read_text())
    assert project["project"]["scripts"]["vgpuctl"] == "vgpud.ctl.main:main"
