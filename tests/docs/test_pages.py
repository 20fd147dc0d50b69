"""A test runs every command of every page, or a list has the reason why not, and every link has a target."""

import importlib.util
import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import (
    PAGES,
    PLACES,
    QUIET,
    blocks,
    commands,
    is_command,
    name_of,
    plain,
    prose,
    spans,
)
from tests.docs.spans import MENTIONS, NOT_RUN, ON_MACHINE, ON_NODE
from tests.simnode import ROOT
from vgpud.model.errors import VgpuError
from vgpud.policy.layers import PolicyPaths
from vgpud.policy.load import check, load

MANUALS = sorted((ROOT / "docs" / "man").glob("*.md"))
TABLES = (ON_NODE, ON_MACHINE, NOT_RUN, MENTIONS)


def typed() -> set[str]:
    """Every command in blocks that are run, also in the middle of a pipe or a list."""
    found = set()
    for page in PAGES:
        for block in blocks(page):
            if block.language == "console" and block.place != "checkout":
                for command in map(plain, (command.line for command in commands(block))):
                    found |= {command, *re.split(r" && | \|\| | \| |; |\$\(|\)", command)}
    return found


def begins(span: str, run: set[str]) -> bool:
    return any(command == span or command.startswith(f"{span} ") for command in run)


def named() -> Iterator[tuple[Path, str]]:
    """The commands that sentences name, and those of `checkout` blocks."""
    for page in PAGES:
        yield from ((page, plain(span).replace("\\|", "|")) for span in spans(page))
        for block in blocks(page):
            if block.place == "checkout":
                yield from ((page, plain(command.line)) for command in commands(block))


def test_policy_digests_shown_in_the_pages_are_those_of_the_present_policies() -> None:
    """Some answers on the pages depend on the machine and are not compared, so policy digests in
    them could become stale. install.md shows the digest of the packaged policy. All other pages show the same
    digest as quickstart.md, whose output is compared.
    """
    found = [(page.name, re.findall(r"\bpolicy ([0-9a-f]{8})\b", page.read_text())) for page in PAGES]
    shown = {name: set(digests) for name, digests in found if digests}
    packaged = load(PolicyPaths(ROOT / "configs" / "vgpud.toml", None, None, None))
    assert shown.pop("install.md") == {packaged.digest[:8]}
    assert all(digests == shown["quickstart.md"] for digests in shown.values()), shown


def test_each_command_of_a_page_is_run_or_listed_with_the_reason_why_not() -> None:
    run = typed()
    assert len(run) > 150
    unknown = [
        f"{page.name}: {span}"
        for page, span in named()
        if not begins(span, run) and not any(span in table for table in TABLES)
    ]
    assert unknown == []


def test_each_command_listed_as_not_run_is_on_a_page() -> None:
    for command, why in NOT_RUN.items():
        print(f"not run: {command}: {why}")
    have = {span for _, span in named()}
    run = typed()
    for table in TABLES:
        assert sorted(set(table) - have) == []
        assert sorted(span for span in table if begins(span, run)) == [], "run already"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_code_block_names_its_language(page: Path) -> None:
    for block in blocks(page):
        assert block.language in (*QUIET, "console"), block
        assert block.place in (PLACES if block.language == "console" else ("",)), block
        if block.language != "console":
            at_start = [line for line in block.text.splitlines() if line.startswith("$ ") or is_command(line)]
            assert block.language == "text" or at_start == [], (
                f"to be typed, but in no console block: {block}"
            )
    # four spaces would also make a code block, and no test would run it
    assert [line for line in prose(page).splitlines() if line.startswith("    ")] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_content_of_each_code_block_parses_in_its_language(page: Path, tmp_path: Path) -> None:
    """vgpud itself checks a `toml` block, which is a policy or part of one."""
    for block in blocks(page):
        if block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            assert list(yaml.safe_load_all(block.text))
        elif block.language == "python":
            compile(block.text, page.name, "exec")
        elif block.language == "toml":
            tables = tomllib.loads(block.text)
            # the block is neither a configuration of containerd nor a file of policy cases
            if not {"plugins", "node"} & tables.keys():
                whole = block.text if "version" in tables else f"version = 1\n{block.text}"
                (tmp_path / "policy.toml").write_text(whole)
                try:
                    check(tmp_path / "policy.toml")
                except VgpuError as error:
                    raise AssertionError(f"{page.name}: {error}: {error.details}\n{block.text}") from None


@pytest.mark.parametrize("page", MANUALS, ids=lambda page: page.stem)
def test_commands_of_manual_pages_are_tested_too(page: Path, tmp_path: Path) -> None:
    indented = [line[4:] for line in page.read_text().splitlines() if line.startswith("    ")]
    run = typed()
    assert [line for line in indented if is_command(line) and plain(line) not in run] == []
    if any(line.startswith("version = 1") for line in indented):
        (tmp_path / "policy.toml").write_text("\n".join(indented))
        check(tmp_path / "policy.toml")


def checkout() -> list[str]:
    return sorted(c for c in NOT_RUN if c.startswith(("./dev ", "python ", "pytest ")) and "NAME" not in c)


@pytest.mark.parametrize("command", checkout())
def test_commands_that_are_not_run_name_existing_files_and_verbs(command: str) -> None:
    program, *words = command.split()
    if program == "./dev":
        usage = subprocess.run([ROOT / "dev"], capture_output=True, text=True, check=False).stdout
        assert re.search(rf"^  {words[0]} ", usage, re.MULTILINE)
        if words[0] == "bench":
            assert f'"{words[1]}"' in (ROOT / "tests" / "bench" / "__main__.py").read_text()
    elif words[0] == "-m":
        found = importlib.util.find_spec(words[1])
        assert found is not None and found.origin is not None
        assert '__name__ == "__main__"' in Path(found.origin).read_text()
    else:
        assert (ROOT / words[0]).exists()


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes from headings."""
    heads = re.findall(
        r"^#+ +(.*?) *$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M
    )
    bare = (re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head).lower()) for head in heads)
    return {head.replace(" ", "-") for head in bare}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_every_link_leads_to_an_existing_page_and_heading(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^) ]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{page.name} names {target}"
        assert not anchor or anchor in anchors(other), f"{page.name} names {target}"


def test_every_page_can_be_found_from_the_first() -> None:
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)\)", (ROOT / "README.md").read_text()))
    assert linked == {f"docs/{page.name}" for page in PAGES if page.name != "README.md"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_answers_that_a_page_shows_are_not_shortened(page: Path) -> None:
    """A line of dots would stand for lines that were cut out."""
    shown = [
        line for block in blocks(page) if block.language == "console" for line in block.text.splitlines()
    ]
    assert not [line for line in shown if line.strip() == "..."]
