"""The compute engine of a device is chosen before its first preload tenant, and is kept until its last tenant
has left.
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.node.world import FakeGateway, inventory_of
from vgpud.lease.engines import EngineFiles
from vgpud.model.engine import Engine, EngineReason, EngineVerdict
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.node.devices.engines import Engines
from vgpud.node.devices.inventory import Inventory

UUID = "GPU-00000000"
PROVED = EngineVerdict(Engine.CUT, "it stood still", "boot 1", "580.1", off_us=449.0, on_us=275.0)


@dataclass
class FakeProbe:
    verdict: EngineVerdict = PROVED
    asked: list[tuple[str, str, str]] = field(default_factory=list)

    def ask(self, uuid: str, boot_id: str, driver_version: str) -> EngineVerdict:
        self.asked.append((uuid, boot_id, driver_version))
        return replace(self.verdict, boot_id=boot_id, driver_version=driver_version)


@dataclass
class Made:
    engines: Engines
    files: EngineFiles
    probe: FakeProbe
    told: list[tuple[str, str]]
    inventory: Inventory

    def word(self) -> str:
        """The engine in the file that the arbiter reads, or "absent"."""
        path = self.files.folder / UUID
        return path.read_text().split("\n")[0] if path.exists() else "absent"


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **named: Any) -> None:
        asyncio.run(test(*args, **named))

    return run


async def made(
    folder: Path, setting: str = "cut", boot: str = "boot 1", driver: str = "580.1", probe: Any = None
) -> Made:
    gateway = FakeGateway()
    gateway.node = replace(gateway.node, driver_version=driver)
    inventory = inventory_of(gateway)
    await inventory.refresh()
    files, probe = EngineFiles(folder), probe or FakeProbe()
    engines = Engines(files, probe, inventory, boot)
    told: list[tuple[str, str]] = []
    engines.setting = lambda device: setting
    engines.notice = lambda uuid, sentence: told.append((uuid, sentence))
    return Made(engines, files, probe, told, inventory)


@in_a_loop
async def test_the_engine_probe_runs_once_a_boot(tmp_path: Path) -> None:
    first = await made(tmp_path)
    await first.engines.settle(UUID)
    await first.engines.settle(UUID)
    assert first.word() == "cut"
    first.engines.forget(UUID)
    assert first.word() == "absent"
    await first.engines.settle(UUID)
    assert first.word() == "cut" and len(first.probe.asked) == 1
    assert first.told == []
    second = await made(tmp_path)
    second.engines.forget(UUID)
    await second.engines.settle(UUID)
    assert second.word() == "cut" and second.probe.asked == []


@pytest.mark.parametrize("change", [{"boot": "boot 2"}, {"driver": "590.2"}])
@in_a_loop
async def test_the_engine_probe_runs_again_after_a_boot_and_after_a_driver_change(
    tmp_path: Path, change: dict[str, str]
) -> None:
    first = await made(tmp_path)
    await first.engines.settle(UUID)
    first.engines.forget(UUID)
    second = await made(tmp_path, **change)
    await second.engines.settle(UUID)
    assert len(second.probe.asked) == 1


@in_a_loop
async def test_the_engine_of_a_device_does_not_change_while_it_has_tenants(tmp_path: Path) -> None:
    """The engine stays the same, even if vgpud starts again with another policy. The arbiter reads the engine
    when the first tenant comes.
    """
    first = await made(tmp_path)
    await first.engines.settle(UUID)
    second = await made(tmp_path, setting="gate")
    assert await second.engines.resume([UUID]) == frozenset()
    await second.engines.settle(UUID)
    assert second.word() == "cut"
    device, _ = second.inventory.node.devices
    assert second.engines.view(device).engine is Engine.CUT
    second.engines.forget(UUID)
    await second.engines.settle(UUID)
    assert second.word() == "gate"


@pytest.mark.parametrize("able", [True, False])
@in_a_loop
async def test_another_driver_version_is_probed_although_allocations_are_kept(
    tmp_path: Path, able: bool
) -> None:
    """A driver's modules cannot be replaced while a tenant's process lives, so the probe disturbs no
    process.
    """
    first = await made(tmp_path)
    await first.engines.settle(UUID)
    now = PROVED if able else replace(PROVED, engine=Engine.GATE, why="status 0x56")
    second = await made(tmp_path, driver="590.2", probe=FakeProbe(now))
    lost = await second.engines.resume([UUID])
    assert len(second.probe.asked) == 1
    assert lost == (frozenset() if able else {UUID})
    assert second.word() == ("cut" if able else "gate")


@in_a_loop
async def test_tenants_from_a_version_without_engines_keep_the_gate(tmp_path: Path) -> None:
    one = await made(tmp_path)
    assert await one.engines.resume([UUID]) == frozenset()
    await one.engines.settle(UUID)
    assert one.word() == "gate" and one.probe.asked == []
    chosen = one.files.chosen(UUID)
    assert chosen is not None and chosen.reason is EngineReason.TENANTS


@in_a_loop
async def test_the_engine_probe_does_not_run_if_the_policy_sets_engine_gate(tmp_path: Path) -> None:
    one = await made(tmp_path, "gate")
    await one.engines.settle(UUID)
    assert one.word() == "gate" and one.probe.asked == [] and one.told == []


@in_a_loop
async def test_an_engine_probe_that_selects_the_gate_is_reported_once(tmp_path: Path) -> None:
    refused = replace(PROVED, engine=Engine.GATE, why="status 0x56")
    one = await made(tmp_path, probe=FakeProbe(refused))
    for _ in range(2):
        await one.engines.settle(UUID)
        one.engines.forget(UUID)
    assert one.told == [(UUID, "its engine is gate: status 0x56")]
    assert len(one.probe.asked) == 1


@in_a_loop
async def test_an_engine_probe_that_could_not_start_runs_again(tmp_path: Path) -> None:
    failed = replace(PROVED, engine=Engine.GATE, failed=True, why="it does not start")
    one = await made(tmp_path, probe=FakeProbe(failed))
    for _ in range(2):
        await one.engines.settle(UUID)
        assert one.word() == "gate"
        one.engines.forget(UUID)
    assert len(one.probe.asked) == 2


@pytest.mark.parametrize(
    "text", ["", "cut", "cut\nnonsense\nwhy\n", "cut\x00\xff\n\n\n", "{}" * 9000], ids=range(5)
)
@in_a_loop
async def test_a_damaged_engine_file_counts_as_absent(tmp_path: Path, text: str) -> None:
    files = EngineFiles(tmp_path)
    files.folder.mkdir()
    (files.folder / UUID).write_text(text)
    (files.folder / f"{UUID}.probe").write_text(text)
    assert files.chosen(UUID) is None and files.verdict(UUID) is None
    one = await made(tmp_path)
    await one.engines.settle(UUID)
    assert one.word() == "cut" and len(one.probe.asked) == 1


@in_a_loop
async def test_a_run_folder_that_cannot_be_written_fails_the_allocation(tmp_path: Path) -> None:
    (tmp_path / "engines").write_text("in the way")
    one = await made(tmp_path, "gate")
    with pytest.raises(VgpuError) as raised:
        await one.engines.settle(UUID)
    assert raised.value.code is ErrorCode.HELPER_FAILED
    # the failed choice has left no engine, so the next allocation chooses again
    with pytest.raises(VgpuError):
        await one.engines.settle(UUID)
