"""The policy files that are read, their order, and which file hides which."""

import os
from pathlib import Path

import pytest

from tests.policy.conftest import Etc
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.policy.layers import PolicyPaths
from vgpud.policy.load import load

SPREAD = '[planner]\nstrategy = "spread"\n'
PACK = '[planner]\nstrategy = "pack"\n'


def test_without_any_policy_file_the_built_in_policy_applies(etc: Etc) -> None:
    loaded = etc.load()
    assert loaded.files == ()
    assert loaded.policy.device == ()
    assert {str(origin) for origin in loaded.origins.values()} == {"built-in"}


def test_the_policy_paths_of_an_installed_daemon_are_the_documented_ones() -> None:
    paths = PolicyPaths()
    assert str(paths.main) == "/etc/vgpud/vgpud.toml"
    assert [str(d) for d in (paths.vendor_dir, paths.run_dir, paths.admin_dir)] == [
        "/usr/lib/vgpud/conf.d",
        "/run/vgpud/conf.d",
        "/etc/vgpud/conf.d",
    ]


def test_policy_layers_are_vendor_then_main_then_run_and_etc_by_file_name(etc: Etc) -> None:
    for name in (
        "lib/conf.d/90-z.toml",
        "lib/conf.d/10-a.toml",
        "run/conf.d/50-b.toml",
        "run/conf.d/70-d.toml",
    ):
        etc.write(name, "")
    for name in ("etc/conf.d/60-c.toml", "etc/conf.d/40-a.toml", "etc/conf.d/80-e.toml"):
        etc.write(name, "")
    etc.write("etc/vgpud.toml", "version = 1")
    assert etc.names(etc.load()) == [
        "lib/conf.d/10-a.toml",
        "lib/conf.d/90-z.toml",
        "etc/vgpud.toml",
        "etc/conf.d/40-a.toml",
        "run/conf.d/50-b.toml",
        "etc/conf.d/60-c.toml",
        "run/conf.d/70-d.toml",
        "etc/conf.d/80-e.toml",
    ]


@pytest.mark.parametrize(
    ("files", "winner"),
    [
        ({"lib/conf.d/50-x.toml": SPREAD}, "lib/conf.d/50-x.toml:2"),
        ({"lib/conf.d/50-x.toml": SPREAD, "etc/vgpud.toml": "version = 1\n" + PACK}, "etc/vgpud.toml:3"),
        (
            {"etc/vgpud.toml": "version = 1\n" + PACK, "run/conf.d/50-x.toml": SPREAD},
            "run/conf.d/50-x.toml:2",
        ),
        ({"run/conf.d/50-x.toml": SPREAD, "etc/conf.d/40-x.toml": PACK}, "run/conf.d/50-x.toml:2"),
        ({"run/conf.d/50-x.toml": SPREAD, "etc/conf.d/60-x.toml": PACK}, "etc/conf.d/60-x.toml:2"),
        ({"run/conf.d/50-x.toml": SPREAD, "etc/conf.d/50-x.toml": PACK}, "etc/conf.d/50-x.toml:2"),
        ({"lib/conf.d/50-x.toml": SPREAD, "run/conf.d/50-x.toml": PACK}, "run/conf.d/50-x.toml:2"),
        ({"lib/conf.d/50-x.toml": SPREAD, "etc/conf.d/50-x.toml": ""}, "built-in"),
    ],
)
def test_the_highest_policy_layer_wins_and_a_drop_in_hides_lower_ones_of_its_name(
    etc: Etc, files: dict[str, str], winner: str
) -> None:
    for name, text in files.items():
        etc.write(name, text)
    loaded = etc.load()
    assert etc.origin(loaded, "planner.strategy") == winner
    name = winner.partition(":")[0]
    expected = "spread" if SPREAD in files.get(name, "") else "pack"
    assert loaded.policy.planner.strategy == expected


@pytest.mark.parametrize("hider", ["run", "etc"])
def test_a_drop_in_that_links_to_dev_null_hides_lower_ones_of_its_name(etc: Etc, hider: str) -> None:
    etc.write("lib/conf.d/50-x.toml", SPREAD)
    link = etc.write(f"{hider}/conf.d/50-x.toml", "")
    link.unlink()
    link.symlink_to("/dev/null")
    loaded = etc.load()
    assert loaded.files == ()
    assert loaded.policy.planner.strategy == "pack"


def test_a_drop_in_in_etc_hides_a_mask_of_the_same_name_in_run(etc: Etc) -> None:
    etc.write("etc/conf.d/50-x.toml", SPREAD)
    (etc.root / "run/conf.d").mkdir(parents=True)
    (etc.root / "run/conf.d/50-x.toml").symlink_to("/dev/null")
    assert etc.load().policy.planner.strategy == "spread"


def test_a_masked_policy_file_is_not_read(etc: Etc) -> None:
    etc.write("lib/conf.d/50-x.toml", "not toml")
    etc.write("etc/conf.d/50-x.toml", "")
    assert etc.names(etc.load()) == ["etc/conf.d/50-x.toml"]


def test_symbolic_links_to_policy_files_are_followed(etc: Etc) -> None:
    target = etc.write("elsewhere", SPREAD)
    (etc.root / "etc/conf.d").mkdir(parents=True)
    (etc.root / "etc/conf.d/10-x.toml").symlink_to(target)
    assert etc.load().policy.planner.strategy == "spread"


def test_only_policy_files_with_suffix_toml_that_are_not_hidden_are_read(etc: Etc) -> None:
    for name in (".hidden.toml", "50-x.toml~", "50-x.toml.dpkg-new", "README", "50-x.TOML"):
        etc.write(f"etc/conf.d/{name}", "not toml")
    assert etc.load().files == ()


def test_a_main_policy_file_that_is_required_must_exist(etc: Etc) -> None:
    missing = etc.root / "given.toml"
    assert load(PolicyPaths(missing, None, None, None)).files == ()
    with pytest.raises(VgpuError) as caught:
        load(PolicyPaths(missing, None, None, None, main_required=True))
    assert caught.value.code is ErrorCode.BAD_POLICY
    assert caught.value.sentence == f"{missing}: cannot be read: no such file or directory"


def only_detail(etc: Etc) -> str:
    with pytest.raises(VgpuError) as caught:
        etc.load()
    assert caught.value.code is ErrorCode.BAD_POLICY
    (detail,) = caught.value.details
    return detail.removeprefix(f"{etc.root}/")


def test_an_unreadable_policy_file_is_an_error(etc: Etc) -> None:
    link = etc.root / "etc/conf.d/10-x.toml"
    link.parent.mkdir(parents=True)
    link.symlink_to("nowhere")
    assert only_detail(etc).startswith("etc/conf.d/10-x.toml: cannot be read: no such file or directory")
    link.unlink()
    link.symlink_to(link.name)
    assert only_detail(etc).startswith("etc/conf.d/10-x.toml: cannot be read: too many levels of symbolic")
    link.unlink()
    link.mkdir()
    assert (
        only_detail(etc)
        == "etc/conf.d/10-x.toml: is not a regular file; put a regular file there, or remove it"
    )
    link.rmdir()
    os.mkfifo(link)  # an open(2) of this FIFO would wait for ever
    assert (
        only_detail(etc)
        == "etc/conf.d/10-x.toml: is not a regular file; put a regular file there, or remove it"
    )


def test_a_broken_link_as_main_file_is_an_error(etc: Etc) -> None:
    (etc.root / "etc").mkdir()
    (etc.root / "etc/vgpud.toml").symlink_to("nowhere")
    assert only_detail(etc).startswith("etc/vgpud.toml: cannot be read: no such file")


def test_a_drop_in_directory_that_is_a_file_is_an_error(etc: Etc) -> None:
    etc.write("run/conf.d", "")
    assert only_detail(etc) == (
        "run/conf.d: the drop-in directory cannot be read: not a directory; "
        "make it readable to vgpud, or remove it"
    )


def test_a_file_without_read_permission_is_an_error(etc: Etc, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read every file, so the test simulates the kernel's refusal."""
    main = etc.write("etc/vgpud.toml", "version = 1")
    real_open = os.open

    def refuse(path: Path, flags: int) -> int:
        if path == main:
            raise PermissionError(13, "Permission denied")
        return real_open(path, flags)

    monkeypatch.setattr(os, "open", refuse)
    assert (
        only_detail(etc) == "etc/vgpud.toml: cannot be read: permission denied; check the path and its mode"
    )


def test_a_huge_policy_file_is_refused_before_it_is_parsed(etc: Etc) -> None:
    etc.write("etc/vgpud.toml", "version = 1\n" + "#" * 300_000)
    assert only_detail(etc).startswith("etc/vgpud.toml: is larger than 256KiB")


def test_the_name_of_a_policy_file_that_is_not_utf8_can_be_reported(etc: Etc) -> None:
    directory = etc.root / "etc/conf.d"
    directory.mkdir(parents=True)
    (directory / os.fsdecode(b"\xff\n.toml")).write_text("planner = 3")
    detail = only_detail(etc)
    assert detail.startswith("etc/conf.d/\ufffd\ufffd.toml:1: planner: 3 is not a table")
    detail.encode()
