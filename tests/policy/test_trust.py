"""vgpud running as root refuses a policy that another user can change, because that user would get the rights
of an administrator.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.policy.conftest import Etc
from vgpud.model.errors import ErrorCode, Exit, VgpuError
from vgpud.policy.load import LoadedPolicy, load
from vgpud.policy.trust import distrust

pytestmark = needs("root")  # root is needed to give files to another user

STRANGER = 65533
MAIN, DROP_IN = "etc/vgpud.toml", "etc/conf.d/60-a.toml"


def give(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def linked(etc: Etc, target: Path) -> None:
    """Makes the drop-in a link to `target`, which another user can change."""
    target.write_text("")
    give(target)
    (etc.root / DROP_IN).unlink()
    (etc.root / DROP_IN).symlink_to(target)


def linked_beside(etc: Etc) -> None:
    linked(etc, etc.root / "draft")


def linked_by_a_folder(etc: Etc) -> None:
    """Makes the folder a link. Another user owns a folder above its target."""
    home = etc.root / "home"
    (etc.root / "etc/conf.d").rename(etc.root / "rules")
    (home / "alice").mkdir(parents=True)
    (etc.root / "rules").rename(home / "alice/rules")
    (etc.root / "etc/conf.d").symlink_to("../home/alice/../alice/rules")
    give(home / "alice")


def masked(etc: Etc) -> None:
    """Gives a user write permission to the folder, with which the user can hide a vendor's drop-in, even in a
    sticky folder.
    """
    (etc.root / "etc/conf.d").chmod(0o1777)
    (etc.root / DROP_IN).unlink()
    (etc.root / "etc/conf.d/10-vendor.toml").symlink_to("/dev/null")


ATTACKS: dict[str, Callable[[Etc], None]] = {
    "main file is the user's": lambda etc: give(etc.root / MAIN),
    "main file is writable": lambda etc: (etc.root / MAIN).chmod(0o666),
    "main file is writable by a group": lambda etc: (etc.root / MAIN).chmod(0o664),
    "drop-in is the user's": lambda etc: give(etc.root / DROP_IN),
    "drop-in is writable": lambda etc: (etc.root / DROP_IN).chmod(0o646),
    "folder of drop-ins is the user's": lambda etc: give(etc.root / "etc/conf.d"),
    "folder of drop-ins is writable": lambda etc: (etc.root / "etc/conf.d").chmod(0o777),
    "empty folder of drop-ins is writable": lambda etc: (etc.root / "run/conf.d").chmod(0o777),
    "folder above is writable": lambda etc: (etc.root / "etc").chmod(0o775),
    "link to a file of the user's": linked_beside,
    "folder is a link below a folder of the user's": linked_by_a_folder,
    "drop-in of the vendor's is hidden": masked,
}


def made(etc: Etc) -> Etc:
    etc.write(MAIN, "version = 1")
    etc.write(DROP_IN, '[planner]\nstrategy = "spread"\n')
    etc.write("lib/conf.d/10-vendor.toml", "")
    (etc.root / "run/conf.d").mkdir(parents=True)
    for path in (etc.root, *etc.root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return etc


def load_as_root(etc: Etc) -> LoadedPolicy:
    return load(replace(etc.paths, is_roots=True))


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_a_policy_that_a_user_can_change_is_refused(etc: Etc, attack: Callable[[Etc], None]) -> None:
    made(etc)
    assert load_as_root(etc).policy.planner.strategy == "spread"
    attack(etc)
    with pytest.raises(VgpuError) as caught:
        load_as_root(etc)
    assert caught.value.code is ErrorCode.BAD_POLICY
    assert caught.value.code.exit_code is Exit.CONFIG
    told = "\n".join((caught.value.sentence, *caught.value.details))
    assert f"uid {STRANGER} owns" in told or "others can write to" in told
    assert "chown root" in told or "chmod go-w" in told


def test_a_folder_with_the_sticky_bit_above_the_policy_is_accepted(etc: Etc) -> None:
    made(etc)
    etc.root.chmod(0o1777)
    assert load_as_root(etc).policy.planner.strategy == "spread"


def test_symbolic_links_that_only_root_can_change_are_followed(etc: Etc) -> None:
    made(etc)
    (etc.root / "store").mkdir(mode=0o755)
    (etc.root / MAIN).rename(etc.root / "store/policy")
    (etc.root / MAIN).symlink_to("../store/policy")
    assert load_as_root(etc).policy.planner.strategy == "spread"


def test_a_vgpud_without_root_reads_the_files_of_its_user(etc: Etc) -> None:
    """A vgpud that does not run as root has only its user's permissions, so it may read that user's
    files.
    """
    made(etc)
    give(etc.root / MAIN)
    assert etc.load().policy.planner.strategy == "spread"


def test_a_policy_check_by_a_user_accepts_a_file_of_that_user(tmp_path: Path) -> None:
    draft = tmp_path / "draft.toml"
    draft.write_text("version = 1")
    give(draft)
    assert distrust(draft, STRANGER) is None
    assert distrust(draft) is not None


def test_a_circle_of_symbolic_links_is_not_followed_without_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert distrust(tmp_path / "a") is None
