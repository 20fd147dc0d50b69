"""Changes of MIG mode, of GPU instances with their compute instances, and of the compute mode."""

import os
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hardware.fakenvml import H200_PROFILES, FakeNvml, process, uuid_of
from vgpud.hardware import change
from vgpud.hardware.gateway import Gateway
from vgpud.model.device import ComputeMode, Placement
from vgpud.model.errors import ErrorCode, VgpuError

GPU = uuid_of(0)
IN_USE = pynvml.NVML_ERROR_IN_USE

# a process that the node's /proc lists, even if the files of the driver are below another root
PID = os.getpid()
COMMAND = Path("/proc/self/comm").read_text().strip()
NAMED = f"process {PID} ({COMMAND})"
GONE = 2**22 + 1  # above the kernel's largest pid


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml(1)


@pytest.fixture
def gateway(nvml: FakeNvml, tmp_path: Path) -> Gateway:
    return Gateway(binding=nvml, host_root=tmp_path)


@pytest.fixture
def mig(nvml: FakeNvml, gateway: Gateway) -> Gateway:
    nvml.gpus[0].mig = [1, 1]
    return gateway


@pytest.fixture(autouse=True)
def _no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change, "SETTLE_SECONDS", 0.0)


def test_a_change_of_mig_mode_takes_effect_at_once(nvml: FakeNvml, gateway: Gateway) -> None:
    assert gateway.set_mig_mode(GPU, True) is True
    assert gateway.snapshot().devices[0].mig.current
    assert gateway.set_mig_mode(GPU, False) is True


def test_a_change_of_mig_mode_that_needs_a_reset_is_pending(nvml: FakeNvml, gateway: Gateway) -> None:
    nvml.activation = pynvml.NVML_ERROR_RESET_REQUIRED
    assert gateway.set_mig_mode(GPU, True) is False
    mig = gateway.snapshot().devices[0].mig
    assert (mig.current, mig.pending) == (False, True)


def test_a_change_of_mig_mode_that_waits_for_processes_is_undone(nvml: FakeNvml, gateway: Gateway) -> None:
    nvml.activation = IN_USE
    nvml.gpus[0].processes = [process(PID)]
    with pytest.raises(VgpuError) as caught:
        gateway.set_mig_mode(GPU, True)
    assert caught.value.code is ErrorCode.DEVICE_IN_USE
    assert NAMED in caught.value.sentence
    mig = gateway.snapshot().devices[0].mig
    assert (mig.current, mig.pending) == (False, False)


def test_a_change_of_mig_mode_that_nvml_refuses_is_an_error(nvml: FakeNvml, gateway: Gateway) -> None:
    nvml.answers["nvmlDeviceSetMigMode"] = IN_USE
    nvml.gpus[0].processes = [process(PID), process(GONE)]
    with pytest.raises(VgpuError) as caught:
        gateway.set_mig_mode(GPU, True)
    assert caught.value.code is ErrorCode.DEVICE_IN_USE
    assert f"2 processes {PID} ({COMMAND}), {GONE} (?)" in caught.value.sentence
    assert caught.value.details == (NAMED, f"process {GONE} (?)")


def test_a_refused_or_pending_change_of_mig_mode_is_an_error(nvml: FakeNvml, gateway: Gateway) -> None:
    nvml.__dict__["nvmlDeviceSetMigMode"] = lambda gpu, mode: IN_USE
    with pytest.raises(VgpuError, match="names no process") as caught:
        gateway.set_mig_mode(GPU, True)
    assert caught.value.code is ErrorCode.DEVICE_IN_USE
    nvml.__dict__["nvmlDeviceSetMigMode"] = lambda gpu, mode: 0
    with pytest.raises(VgpuError) as caught:
        gateway.set_mig_mode(GPU, True)
    assert caught.value.code is ErrorCode.RESET_NEEDED


@pytest.mark.parametrize(
    ("status", "code"), [(3, ErrorCode.UNSUPPORTED), (4, ErrorCode.NVML_FAILED), (15, ErrorCode.GPU_LOST)]
)
def test_a_device_without_mig_refuses_a_change_of_mig_mode(
    nvml: FakeNvml, gateway: Gateway, status: int, code: ErrorCode
) -> None:
    nvml.answers["nvmlDeviceSetMigMode"] = status
    with pytest.raises(VgpuError) as caught:
        gateway.set_mig_mode(GPU, True)
    assert caught.value.code is code
    assert GPU in caught.value.sentence


def test_a_new_gpu_instance_has_one_compute_instance_over_all_of_it(nvml: FakeNvml, mig: Gateway) -> None:
    instance = mig.create_gpu_instance(GPU, 9, Placement(4, 4))
    assert (instance.profile_id, instance.placement) == (9, Placement(4, 4))
    (compute,) = instance.compute_instances
    assert compute.profile_id == 2  # 2 is the id of the compute profile with three slices
    assert compute.uuid.startswith("MIG-")
    assert mig.gpu_instances(GPU) == (instance,)
    assert mig.snapshot().devices[0].mig.instances == (instance,)


@pytest.mark.parametrize(
    ("profile", "placement", "code"),
    [
        (5, Placement(0, 4), ErrorCode.NO_CAPACITY),
        (9, Placement(1, 4), ErrorCode.BAD_REQUEST),
        (77, Placement(0, 1), ErrorCode.BAD_REQUEST),
    ],
)
def test_an_instance_in_a_taken_or_wrong_place_or_of_an_unknown_profile_is_refused(
    mig: Gateway, profile: int, placement: Placement, code: ErrorCode
) -> None:
    mig.create_gpu_instance(GPU, 19, Placement(2, 1))
    with pytest.raises(VgpuError) as caught:
        mig.create_gpu_instance(GPU, profile, placement)
    assert caught.value.code is code
    assert f"{placement.start}:{placement.size}" in caught.value.sentence
    assert len(mig.gpu_instances(GPU)) == 1


def test_no_instance_is_made_with_mig_mode_off(gateway: Gateway) -> None:
    with pytest.raises(VgpuError) as caught:
        gateway.create_gpu_instance(GPU, 19, Placement(0, 1))
    assert caught.value.code is ErrorCode.UNSUPPORTED
    gateway.destroy_gpu_instance(GPU, 1)


@pytest.mark.parametrize("name", ["nvmlGpuInstanceCreateComputeInstance", "nvmlGpuInstanceGetInfo"])
def test_a_half_made_gpu_instance_is_removed(nvml: FakeNvml, mig: Gateway, name: str) -> None:
    nvml.answers[name] = 23
    with pytest.raises(VgpuError):
        mig.create_gpu_instance(GPU, 19, Placement(0, 1))
    assert nvml.gpus[0].instances == {}


def test_destroying_an_instance_is_idempotent(mig: Gateway) -> None:
    instance = mig.create_gpu_instance(GPU, 14, Placement(0, 2))
    mig.destroy_gpu_instance(GPU, instance.id)
    mig.destroy_gpu_instance(GPU, instance.id)
    assert mig.gpu_instances(GPU) == ()


def test_destroying_an_instance_in_use_names_its_processes(nvml: FakeNvml, mig: Gateway) -> None:
    instance = mig.create_gpu_instance(GPU, 14, Placement(0, 2))
    nvml.gpus[0].processes = [process(PID, instance=instance.id), process(9, instance=instance.id + 1)]
    with pytest.raises(VgpuError) as caught:
        mig.destroy_gpu_instance(GPU, instance.id)
    assert caught.value.code is ErrorCode.DEVICE_IN_USE
    assert caught.value.details == (NAMED,)
    assert mig.gpu_instances(GPU) == (instance,)


def test_an_interrupted_destroy_can_be_repeated(nvml: FakeNvml, mig: Gateway) -> None:
    instance = mig.create_gpu_instance(GPU, 14, Placement(0, 2))
    nvml.answers["nvmlGpuInstanceDestroy"] = IN_USE
    with pytest.raises(VgpuError) as caught:
        mig.destroy_gpu_instance(GPU, instance.id)
    assert caught.value.code is ErrorCode.DEVICE_IN_USE
    assert mig.gpu_instances(GPU)[0].compute_instances == ()
    del nvml.answers["nvmlGpuInstanceDestroy"]
    mig.destroy_gpu_instance(GPU, instance.id)
    assert mig.gpu_instances(GPU) == ()


def test_destroy_waits_until_the_driver_has_released_the_instance(
    nvml: FakeNvml, mig: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change, "SETTLE_SECONDS", 30.0)
    instance = mig.create_gpu_instance(GPU, 14, Placement(0, 2))
    nvml.answers["nvmlGpuInstanceDestroy"] = IN_USE

    def settled(seconds: float) -> None:
        nvml.answers.clear()

    monkeypatch.setattr("vgpud.hardware.change.time.sleep", settled)
    mig.destroy_gpu_instance(GPU, instance.id)
    assert nvml.calls.count("nvmlGpuInstanceDestroy") == 2
    assert mig.gpu_instances(GPU) == ()


def test_an_instance_destroyed_during_the_listing_is_left_out(nvml: FakeNvml, mig: Gateway) -> None:
    first = mig.create_gpu_instance(GPU, 19, Placement(0, 1))
    mig.create_gpu_instance(GPU, 14, Placement(2, 2))
    nvml.answers["nvmlGpuInstanceGetInfo"] = 6
    assert mig.gpu_instances(GPU) == ()
    nvml.answers = {"nvmlComputeInstanceGetInfo_v2": 6}
    assert mig.gpu_instances(GPU)[0] == replace(first, compute_instances=())


@given(st.lists(st.sampled_from([(p[1], place) for p in H200_PROFILES for place in p[7]]), max_size=12))
def test_any_valid_layout_can_be_made_listed_and_destroyed(
    wanted: list[tuple[int, tuple[int, int]]],
) -> None:
    nvml = FakeNvml(1)
    nvml.gpus[0].mig = [1, 1]
    gateway = Gateway(binding=nvml)
    made = []
    for profile, (start, size) in wanted:
        try:
            made.append(gateway.create_gpu_instance(GPU, profile, Placement(start, size)))
        except VgpuError as error:
            assert error.code is ErrorCode.NO_CAPACITY
    assert gateway.gpu_instances(GPU) == tuple(sorted(made, key=lambda instance: instance.id))
    for instance in made:
        gateway.destroy_gpu_instance(GPU, instance.id)
    assert gateway.gpu_instances(GPU) == ()


@pytest.mark.parametrize("mode", list(ComputeMode))
def test_the_compute_mode_is_set(gateway: Gateway, mode: ComputeMode) -> None:
    gateway.set_compute_mode(GPU, mode)
    assert gateway.snapshot().devices[0].compute_mode is mode


def test_a_compute_mode_that_the_driver_refuses_is_an_error(nvml: FakeNvml, gateway: Gateway) -> None:
    nvml.answers["nvmlDeviceSetComputeMode"] = IN_USE
    with pytest.raises(VgpuError) as caught:
        gateway.set_compute_mode(GPU, ComputeMode.DEFAULT)
    assert caught.value.code is ErrorCode.DEVICE_IN_USE
    nvml.answers["nvmlDeviceSetComputeMode"] = 3
    with pytest.raises(VgpuError) as caught:
        gateway.set_compute_mode(GPU, ComputeMode.EXCLUSIVE_THREAD)
    assert caught.value.code is ErrorCode.UNSUPPORTED


def test_a_change_of_an_unknown_device_has_an_error_of_its_own(gateway: Gateway) -> None:
    for work in (
        lambda: gateway.processes("GPU-none"),
        lambda: gateway.gpu_instances("GPU-none"),
        lambda: gateway.set_mig_mode("GPU-none", True),
    ):
        with pytest.raises(VgpuError) as caught:
            work()
        assert caught.value.code is ErrorCode.NO_SUCH_DEVICE


HALF = Placement(4, 4)
ONE, MIDDLE = (0, Placement(0, 1)), (0, Placement(1, 1))


def test_compute_instances_of_one_gpu_instance_are_created_and_destroyed(mig: Gateway) -> None:
    empty = mig.create_gpu_instance(GPU, 9, HALF, whole=False)
    assert empty.compute_instances == ()
    mig.create_compute_instance(GPU, empty.id, MIDDLE)
    made = mig.create_compute_instance(GPU, empty.id, ONE)
    assert {one.key for one in made.compute_instances} == {ONE, MIDDLE}
    assert len({one.uuid for one in made.compute_instances}) == 2
    assert made.is_divided
    with pytest.raises(VgpuError) as taken:
        mig.create_compute_instance(GPU, empty.id, (1, Placement(0, 2)))
    assert taken.value.code is ErrorCode.NO_CAPACITY
    gone = made.compute(ONE)
    assert gone is not None
    mig.destroy_compute_instance(GPU, empty.id, gone.id)
    mig.destroy_compute_instance(GPU, empty.id, gone.id)
    (left,) = mig.gpu_instances(GPU)
    assert [one.key for one in left.compute_instances] == [MIDDLE]
    assert left.is_divided, "one slice of three is not all of it"
    mig.destroy_gpu_instance(GPU, empty.id)
    assert mig.gpu_instances(GPU) == ()


def test_destroying_a_compute_instance_in_use_names_its_processes(nvml: FakeNvml, mig: Gateway) -> None:
    number = mig.create_gpu_instance(GPU, 9, HALF, whole=False).id
    for key in (ONE, MIDDLE):
        mig.create_compute_instance(GPU, number, key)
    nvml.gpus[0].processes = [
        process(41, instance=number, compute=0),
        process(42, instance=number, compute=1),
    ]
    made = mig.gpu_instances(GPU)[0].compute(MIDDLE)
    assert made is not None
    with pytest.raises(VgpuError) as held:
        mig.destroy_compute_instance(GPU, number, made.id)
    assert held.value.code is ErrorCode.DEVICE_IN_USE
    said = " ".join((held.value.sentence, *held.value.details))
    assert str(42 if made.id == 1 else 41) in said
    assert str(41 if made.id == 1 else 42) not in said


def test_compute_profiles_are_read_from_the_first_existing_gpu_instance(
    nvml: FakeNvml, mig: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU instance vgpud assumes the compute profiles. With one, it uses the driver's answer."""

    def compute() -> list[tuple[int, int, int]]:
        profile = mig.snapshot().devices[0].mig.profile(5)
        assert profile is not None
        return [(p.slice_count, p.instance_count, len(p.placements)) for p in profile.compute]

    assert compute() == [(1, 4, 4), (2, 2, 2), (3, 1, 1), (4, 1, 1)]
    number = mig.create_gpu_instance(GPU, 5, Placement(0, 4)).id
    real = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo

    def no_threes(handle: object, index: int, engine: int, version: int) -> object:
        if index == 2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return real(handle, index, engine, version)

    monkeypatch.setattr(nvml, "nvmlGpuInstanceGetComputeInstanceProfileInfo", no_threes)
    assert compute() == [(1, 4, 4), (2, 2, 2), (4, 1, 1)]
    mig.destroy_gpu_instance(GPU, number)
    assert compute() == [(1, 4, 4), (2, 2, 2), (4, 1, 1)], "it is remembered"
