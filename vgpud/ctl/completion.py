"""`vgpuctl completion`: generates completions for bash, zsh and fish from the table of verbs."""

from argparse import Namespace
from collections.abc import Iterator
from typing import NamedTuple

from vgpud.ctl.parse import EVERYWHERE
from vgpud.ctl.terminal import Terminal
from vgpud.ctl.verbs import VERBS, Group, Verb

# Candidates that only the daemon (as shell code) or the file system knows.
DEVICES = "$(vgpuctl devices -o name 2>/dev/null)"
ALLOCATIONS = "$(vgpuctl ls -o name 2>/dev/null)"
FILES = "FILE"


class Option(NamedTuple):
    """An option in a completion. `values` are its choices, one of the constants for shell code, or "" for any
    text.
    """

    flags: tuple[str, ...]
    help: str
    takes_value: bool
    values: str


class Line(NamedTuple):
    """One verb for the completion: its words, its options, and the candidates for its positional
    arguments.
    """

    words: tuple[str, ...]
    help: str
    options: tuple[Option, ...]
    values: str


def completion(arguments: Namespace, terminal: Terminal) -> int:
    print({"bash": bash, "zsh": zsh, "fish": fish}[arguments.shell](), end="")
    return 0


def table() -> tuple[Line, ...]:
    return tuple(_lines())


def _lines() -> Iterator[Line]:
    for entry in VERBS:
        if isinstance(entry, Group):
            for verb in entry.verbs:
                yield _line((entry.name, verb.name), verb)
        else:
            yield _line((entry.name,), entry)


def _line(words: tuple[str, ...], verb: Verb) -> Line:
    options = []
    values = ""
    for flags, settings in (*verb.arguments, *EVERYWHERE):
        if flags[0].startswith("-"):
            takes = settings.get("action") != "store_true"
            choices = " ".join(settings.get("choices", ())) or _known(settings.get("metavar", ""))
            if flags[-1] == "--output":
                choices = " ".join(verb.outputs)
            options.append(Option(flags, settings["help"], takes, choices if takes else ""))
        else:
            values = " ".join(settings.get("choices", ())) or _known(settings.get("metavar", ""))
    return Line(words, verb.help, tuple(options), values)


def _known(metavar: str) -> str:
    if metavar in ("ALLOCATION", "ALLOCATION|PID"):
        return ALLOCATIONS
    if metavar == "UUID|INDEX":
        return DEVICES
    return FILES if metavar in ("FILE", "PATH") else ""


def _second_words() -> dict[str, list[str]]:
    return {entry.name: [v.name for v in entry.verbs] for entry in VERBS if isinstance(entry, Group)}


def bash() -> str:
    """The completion for bash 4 and later; it does not need the package bash-completion."""
    cases = []
    for line in table():
        flags = " ".join(flag for option in line.options for flag in option.flags)
        values = [
            f"      {'|'.join(option.flags)}) {_bash_reply(option.values)}; return ;;"
            for option in line.options
            if option.takes_value
        ]
        cases.append(
            f"  '{' '.join(line.words)}')\n    case $previous in\n" + "\n".join(values) + "\n    esac\n"
            f"    if [[ $word == -* ]]; then COMPREPLY=($(compgen -W '{flags}' -- \"$word\")); else "
            f"{_bash_reply(line.values)}; fi ;;"
        )
    groups = _second_words()
    firsts = " ".join(entry.name for entry in VERBS)
    seconds = "\n".join(
        f"  {name}) COMPREPLY=($(compgen -W '{' '.join(words)}' -- \"$word\")) ;;"
        for name, words in groups.items()
    )
    return f"""# bash completion of vgpuctl; made by 'vgpuctl completion bash'
_vgpuctl() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} verb='' i part
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    part=${{COMP_WORDS[i]}}
    case $part in
    --) return ;;
    -o|--output|--socket|--timeout|--color) ((i++)) ;;
    -*) ;;
    *) verb="${{verb:+$verb }}$part"; case " {" ".join(groups)} " in *" $verb "*) ;; *) break ;; esac ;;
    esac
  done
  case $verb in
  '') COMPREPLY=($(compgen -W '{firsts}' -- "$word")) ;;
{seconds}
{chr(10).join(cases)}
  esac
}}
complete -F _vgpuctl vgpuctl
"""


def _bash_reply(values: str) -> str:
    if values == FILES:
        return 'COMPREPLY=($(compgen -f -- "$word"))'
    return f'COMPREPLY=($(compgen -W "{values}" -- "$word"))' if values else ":"


def zsh() -> str:
    firsts = "\n".join(f"    '{entry.name}:{_quoted(entry.help)}'" for entry in VERBS)
    groups = []
    for entry in VERBS:
        if isinstance(entry, Group):
            words = " ".join(f"'{verb.name}:{_quoted(verb.help)}'" for verb in entry.verbs)
            groups.append(f"    {entry.name}) verbs=({words}); _describe verb verbs ;;")
    cases = []
    for line in table():
        specs = [f"'*:::{line.words[-1]}: '"] if not line.values else [f"'*: :{_zsh_values(line.values)}'"]
        for option in line.options:
            value = f": :{_zsh_values(option.values)}" if option.takes_value else ""
            specs += [f"'{flag}[{_quoted(option.help)}]{value}'" for flag in option.flags]
        inner = " \\\n        ".join(specs)
        cases.append(f"    '{' '.join(line.words)}') _arguments -s \\\n        {inner} ;;")
    return f"""#compdef vgpuctl
# zsh completion of vgpuctl; made by 'vgpuctl completion zsh'
_vgpuctl() {{
  local -a verbs
  local verb=${{words[2]-}}
  if ((CURRENT == 2)); then
    verbs=(
{firsts}
    )
    _describe verb verbs
    return
  fi
  case $verb in
  {"|".join(_second_words())})
    if ((CURRENT == 3)); then
      case $verb in
{chr(10).join(groups)}
      esac
      return
    fi
    verb="$verb ${{words[3]}}"
    shift 2 words; ((CURRENT -= 2)) ;;
  *) shift words; ((CURRENT--)) ;;
  esac
  case $verb in
{chr(10).join(cases)}
  esac
}}
if [[ $funcstack[1] == _vgpuctl ]]; then _vgpuctl "$@"; else compdef _vgpuctl vgpuctl; fi
"""


def _zsh_values(values: str) -> str:
    if values == FILES:
        return "_files"
    return f"({values})" if values and not values.startswith("$") else _zsh_asked(values)


def _zsh_asked(values: str) -> str:
    return f'($\u007b(f)"{values}"\u007d)' if values else " "


def _quoted(text: str) -> str:
    return text.replace("'", "").replace("[", "(").replace("]", ")").replace(":", ",")


def fish() -> str:
    groups = _second_words()
    lines = [
        "# fish completion of vgpuctl; made by 'vgpuctl completion fish'",
        "complete -c vgpuctl -f",
    ]
    for entry in VERBS:
        lines.append(
            f"complete -c vgpuctl -n __fish_use_subcommand -a {entry.name} -d '{_quoted(entry.help)}'"
        )
        if isinstance(entry, Group):
            names = " ".join(groups[entry.name])
            seen = f"__fish_seen_subcommand_from {entry.name}; and not __fish_seen_subcommand_from {names}"
            lines += [
                f"complete -c vgpuctl -n '{seen}' -a {verb.name} -d '{_quoted(verb.help)}'"
                for verb in entry.verbs
            ]
    for line in table():
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in line.words)
        if line.values:
            files = " -F" if line.values == FILES else f" -a '{_fish_values(line.values)}'"
            lines.append(f"complete -c vgpuctl -n '{seen}'{files}")
        for option in line.options:
            names = "".join(
                f" -l {flag[2:]}" if flag.startswith("--") else f" -s {flag[1:]}" for flag in option.flags
            )
            takes = ""
            if option.takes_value:
                known = option.values not in ("", FILES)
                takes = f" -x -a '{_fish_values(option.values)}'" if known else " -r"
            lines.append(f"complete -c vgpuctl -n '{seen}'{names}{takes} -d '{_quoted(option.help)}'")
    return "\n".join(lines) + "\n"


def _fish_values(values: str) -> str:
    return values.removeprefix("$") if values.startswith("$") else values
