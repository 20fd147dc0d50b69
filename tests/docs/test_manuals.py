"""The manual pages are generated and complete, and man and mandoc read them without warnings."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.ctl.conftest import ROOT
from vgpud.ctl.parse import EVERYWHERE
from vgpud.ctl.verbs import VERBS, Group
from vgpud.model.errors import Exit
from vgpud.policy.model import TABLES
from vgpud.settings import Settings

PAGES = ("libvgpu.7", "vgpu-runtime.1", "vgpuctl.1", "vgpud-remote.8", "vgpud.8", "vgpud.toml.5")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manuals")
    subprocess.run([sys.executable, "packaging/manuals.py", str(folder)], cwd=ROOT, check=True, timeout=300)
    return folder


def text(made: Path, name: str) -> str:
    """The page's text without roff's markup."""
    raw = (made / "man" / name).read_text()
    return re.sub(r"\\f[BIR]", "", raw).replace("\\-", "-").replace("\\&", "").replace("\\e", "\\")


def test_the_listed_manual_pages_are_generated(made: Path) -> None:
    assert sorted(path.name for path in (made / "man").iterdir()) == sorted(PAGES)
    assert {path.name for path in (made / "completions").iterdir()} == {"vgpuctl", "_vgpuctl", "vgpuctl.fish"}


def test_the_manual_page_of_vgpuctl_has_every_verb_option_and_exit_code(made: Path) -> None:
    page = text(made, "vgpuctl.1")
    for entry in VERBS:
        for verb in entry.verbs if isinstance(entry, Group) else (entry,):
            words = f"{entry.name} {verb.name}" if isinstance(entry, Group) else verb.name
            assert f'.SS "{words}"' in page
            options = (flag for a in verb.arguments for flag in a.flags if flag.startswith("-"))
            assert all(flag in page for flag in options)
    assert all(flag in page for argument in EVERYWHERE for flag in argument.flags)
    codes = re.findall(r"^(\d+)$", page, re.MULTILINE)
    assert {str(code.value) for code in Exit} <= set(codes)


def test_the_manual_page_of_the_policy_has_every_key(made: Path) -> None:
    page = text(made, "vgpud.toml.5")
    sections = dict(re.findall(r'^\.SS "\[*([a-z.]+)\]*"\n((?:(?!^\.S).*\n)*)', page, re.MULTILINE))
    for table, model in TABLES.items():
        for name in model.model_fields:
            if table and f"{table}.{name}" not in TABLES:
                assert f"\n{name}\n" in sections[table], (table, name)


def test_the_manual_page_of_the_daemon_has_every_setting(made: Path) -> None:
    page = text(made, "vgpud.8")
    wanted = {f"VGPUD_{name.upper()}" for name in Settings.model_fields} - {"VGPUD_FAULT_POINT"}
    assert {name for name in wanted if name not in page} == set()
    assert "VGPUD_FAULT_POINT" not in page


@pytest.mark.parametrize(
    ("module", "name"), [("vgpud.daemon", "vgpud.8"), ("vgpud.remote.door", "vgpud-remote.8")]
)
def test_the_manual_page_of_a_service_has_each_of_its_options(made: Path, module: str, name: str) -> None:
    asked = [sys.executable, "-m", module, "--help"]
    shown = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300).stdout
    options = set(re.findall(r"--[a-z]+", shown)) - {"--help"}
    assert len(options) > 2
    synopsis, _, rest = text(made, name).partition("DESCRIPTION")
    assert {option for option in options if option not in synopsis} == set()
    assert {option for option in options - {"--version"} if option not in rest} == set()


def test_the_manual_page_of_vgpu_runtime_has_the_annotations_of_the_containers_page(made: Path) -> None:
    page = text(made, "vgpu-runtime.1")
    documented = set(
        re.findall(r"^\| `(vgpud\.io/[a-z-]+)` \| `VGPU", (ROOT / "docs" / "containers.md").read_text(), re.M)
    )
    assert len(documented) > 5
    assert {name for name in documented if name not in page} == set()


@needs("mandoc")
@pytest.mark.parametrize("name", PAGES)
def test_mandoc_reports_no_warning(made: Path, name: str) -> None:
    asked = ["mandoc", "-Tlint", "-Wwarning", str(made / "man" / name)]
    said = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=300).stdout
    # the pages have no date, so that each build is the same
    assert [line for line in said.splitlines() if "missing date" not in line] == []


@needs("man")
@pytest.mark.parametrize("name", PAGES)
def test_man_reports_no_warning(made: Path, name: str) -> None:
    asked = ["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z", str(made / "man" / name)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
