"""The content of the packages, without installing them."""

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.docs.pages import PAGES
from tests.packaging.debs import NAMES, field, files, one
from tests.simnode import ROOT
from vgpud import __version__
from vgpud.ledger.schema import MIGRATIONS
from vgpud.settings import Settings

pytestmark = [pytest.mark.xdist_group("packaging")]
LIBRARIES = Path("/usr/lib/vgpud")
DEBIAN = ROOT / "packaging" / "deb" / "debian"


def test_all_files_that_state_the_packages_version_state_the_same_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    changelog = (DEBIAN / "changelog").read_text().split("(", 1)[1].split(")", 1)[0]
    assert (project, changelog) == (__version__, __version__)


@needs("lintian", "debhelper")
def test_lintian_finds_no_error(debs: Path) -> None:
    """lintian finds no error in the packages, and no override that does not match."""
    argv = ["lintian", "--allow-root", "--fail-on", "error", *(str(one(debs, name)) for name in NAMES)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mismatched-override" not in done.stdout


def content(deb: Path, path: str) -> str:
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE) as archive:
        words = ["tar", "--extract", "--to-stdout", "--file=-", f".{path}"]
        return subprocess.check_output(words, stdin=archive.stdout, text=True)


@needs("debhelper")
def test_bundled_software_is_in_the_bill_of_materials_and_in_the_copyright_file(debs: Path) -> None:
    deb = one(debs, "vgpud")
    pattern = re.compile(r"site-packages/([\w.]+)-([^/-]*)\.dist-info/$")
    found = (pattern.search(path) for path in files(deb))
    bundled = {(match[1].lower().replace("_", "-"), match[2]) for match in found if match} - {
        ("vgpud", __version__)
    }
    document = json.loads(content(deb, "/usr/share/vgpud/sbom.cdx.json"))
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
    listed = {(part["name"], part["version"]) for part in document["components"]}
    assert bundled <= listed
    assert {"glibc", "BoringSSL"} <= {name for name, _ in listed}
    assert all(part["licenses"][0]["license"]["name"] for part in document["components"])
    text = content(deb, "/usr/share/doc/vgpud/copyright")
    assert all(f"  {name} ({version}): " in text for name, version in bundled)


@needs("debhelper")
def test_vgpuds_python_environment_has_compiled_run_time_packages_and_no_development_tools(
    debs: Path,
) -> None:
    names = files(one(debs, "vgpud"))
    packages = {
        match[1].lower()
        for path in names
        if (match := re.search(r"site-packages/([\w.]+)-[^/]*\.dist-info/$", path))
    }
    assert {"vgpud", "grpcio", "pydantic", "uvloop"} <= packages
    assert not packages & {
        "pip",
        "setuptools",
        "pytest",
        "hypothesis",
        "ruff",
        "mypy",
        "grpcio_tools",
        "hatchling",
    }
    assert any(path.endswith("vgpud/api/gen/vgpud_pb2_grpc.py") for path in names)
    assert any(path.endswith("vgpud/lease_layout.py") for path in names)
    modules = {p for p in names if "site-packages" in p and p.endswith(".py")}
    compiled = {
        re.sub(r"__pycache__/([^/]+)\.cpython-\d+\.pyc", r"\1.py", p) for p in names if p.endswith(".pyc")
    }
    assert modules - compiled == set()


@needs("debhelper")
def test_the_packages_contain_programs_completions_and_manuals(debs: Path) -> None:
    names = {path.split(" ")[0] for path in files(one(debs, "vgpud"))}
    programs = ("/usr/sbin/vgpud", "/usr/bin/vgpuctl", "/usr/bin/vgpu-runtime")
    helpers = ("/usr/lib/vgpud/vgpu-arbiter", "/usr/lib/vgpud/vgpu-hook", "/usr/lib/vgpud/bin/vgpuctl")
    completions = ("bash-completion/completions/vgpuctl", "zsh/vendor-completions/_vgpuctl")
    wanted = {*programs, *helpers, *(f"/usr/share/{name}" for name in completions)}
    wanted |= {"/usr/share/fish/vendor_completions.d/vgpuctl.fish", "/usr/share/vgpud/vgpud.schema.json"}
    pages = {path.stem for path in (ROOT / "docs" / "man").glob("*.[1-8].md")}
    assert "vgpuctl.1" in pages
    wanted |= {f"/usr/share/man/man{page[-1]}/{page}.gz" for page in pages}
    assert wanted - names == set()


@needs("debhelper")
def test_the_package_for_machines_without_a_gpu_needs_only_python_and_has_the_manual(debs: Path) -> None:
    deb = one(debs, "vgpud-remote-client")
    assert field(deb, "Depends") == "python3 (>= 3.11)"
    assert field(deb, "Architecture") == "all"
    names = {path.split(" ")[0] for path in files(deb)}
    assert {"/usr/bin/vgpuctl", "/usr/share/man/man1/vgpuctl.1.gz"} <= names
    assert not any(name.endswith((".service", ".socket", ".so")) for name in names)


@needs("debhelper")
def test_the_package_does_not_start_or_enable_the_service_for_remote_slices(debs: Path) -> None:
    script = subprocess.check_output(["dpkg-deb", "-I", one(debs, "vgpud"), "postinst"], text=True)
    lines = [line for line in script.splitlines() if "vgpud-remote" in line]
    assert lines
    (restart,) = (line for line in lines if "deb-systemd-invoke" in line)
    assert "deb-systemd-invoke try-restart " in restart  # a door that runs, after an upgrade
    (enabled,) = (number for number, line in enumerate(lines) if "helper enable" in line)
    assert "was-enabled 'vgpud-remote.service'; then" in lines[enabled - 1]  # an upgrade of one that was on


@needs("debhelper")
def test_each_installed_path_that_a_page_names_exists(debs: Path) -> None:
    """The paths are those of examples to copy, of scripts, and of pictures."""
    names = {path.split(" ")[0].removesuffix(".gz") for path in files(one(debs, "vgpud"))}
    text = "".join(page.read_text() for page in PAGES)
    named = {path.rstrip("/.") for path in re.findall(r"/usr/(?:share|lib)/(?:doc/)?vgpud/[\w./-]+", text)}
    pictures = {f"/usr/share/doc/vgpud/{path}" for path in re.findall(r"\]\((images/[^)]+)\)", text)}
    assert len(named) > 5 and len(pictures) > 2
    assert {path for path in named | pictures if not any(name.startswith(path) for name in names)} == set()


@needs("debhelper")
def test_each_file_that_the_daemon_looks_for_is_installed(debs: Path) -> None:
    names = {path.split(" ")[0] for path in files(one(debs, "vgpud"))}
    wanted = [known.default for known in Settings.model_fields.values()]
    programs = {str(path) for path in wanted if isinstance(path, Path) and path.parent == LIBRARIES}
    assert len(programs) >= 3
    assert programs - names == set()


@needs("debhelper")
def test_only_root_can_change_installed_files(debs: Path) -> None:
    for name in NAMES:
        writable = {
            path for path, rights in files(one(debs, name)).items() if "w" in rights[4:] and rights[0] != "l"
        }
        assert writable == set()


@needs("debhelper")
def test_libvgpu_is_installed_under_its_version(debs: Path) -> None:
    deb = one(debs, "libvgpu")
    version = field(deb, "Version")
    paths = {path for path in files(deb) if "libvgpu" in Path(path.split(" ")[0]).name}
    for name in ("libvgpu.so", "libvgpu-guard.so"):
        assert [p for p in paths if re.fullmatch(rf"/usr/lib/[^/]+/vgpud/{re.escape(version)}/{name}", p)]
        assert [
            p
            for p in paths
            if re.fullmatch(rf"/usr/lib/[^/]+/vgpud/{name} -> {re.escape(version)}/{name}", p)
        ]
    assert field(deb, "Multi-Arch") == "same"
    assert f"libvgpu (= {version})" in field(one(debs, "vgpud"), "Depends")


@needs("debhelper")
def test_the_only_conffiles_are_the_policy_and_the_settings_of_vgpud_sim(debs: Path) -> None:
    shown = {name: conffiles(one(debs, name)) for name in NAMES}
    assert shown == {
        "vgpud": ["/etc/vgpud/vgpud.toml"],
        "libvgpu": [],
        "vgpud-sim": ["/etc/default/vgpud-sim"],
    }


def conffiles(deb: Path) -> list[str]:
    done = subprocess.run(
        ["dpkg-deb", "--info", str(deb), "conffiles"], capture_output=True, text=True, check=False
    )
    return done.stdout.split()


@needs("debhelper")
def test_the_preinst_script_knows_the_version_of_the_ledger(debs: Path) -> None:
    done = subprocess.run(
        ["dpkg-deb", "--info", str(one(debs, "vgpud")), "preinst"], capture_output=True, text=True, check=True
    )
    assert f"\nKNOWN={len(MIGRATIONS)} " in done.stdout


@needs("debhelper")
@pytest.mark.parametrize("unit", ["vgpud-arbiter.service", "vgpud-mps@"])
def test_no_maintainer_script_stops_units_that_tenants_need(debs: Path, unit: str) -> None:
    """Only a purge stops the units that tenants need."""
    for script in ("preinst", "postinst", "prerm"):
        done = subprocess.run(
            ["dpkg-deb", "--info", str(one(debs, "vgpud")), script],
            capture_output=True,
            text=True,
            check=True,
        )
        acting = [line for line in done.stdout.splitlines() if unit in line and "list-units" not in line]
        assert acting == [], script


@needs("debhelper")
def test_the_hooks_of_container_runtimes_and_slurm_are_installed(debs: Path) -> None:
    """The hooks are under the paths that CDI specs and the manuals name."""
    found = {name.removeprefix(".").partition(" -> ")[0] for name in files(one(debs, "vgpud"))}
    wanted = ["/usr/lib/vgpud/vgpu-hook", "/usr/bin/vgpu-runtime"]
    wanted += [
        f"/usr/lib/vgpud/slurm/{name}" for name in ("prolog", "task-prolog", "epilog", "vgpud-slurm.sh")
    ]
    assert [path for path in wanted if path not in found] == []
