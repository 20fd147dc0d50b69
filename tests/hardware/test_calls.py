"""The gateway to NVML and its worker threads: deadlines, abandoned calls, values for missing features."""

import gc
import threading
from collections.abc import Callable

import pynvml
import pytest
from structlog.testing import capture_logs

from tests.hardware.fakenvml import FakeNvml
from vgpud.hardware.gateway import Gateway
from vgpud.hardware.nvml import Nvml, NvmlRefusal
from vgpud.hardware.workers import MAX_STUCK, Workers, beat
from vgpud.model.errors import ErrorCode, VgpuError


def test_texts_that_nvml_returns_as_bytes_are_decoded() -> None:
    nvml = FakeNvml(1)
    gateway = Gateway(binding=nvml)
    assert gateway.call("nvmlSystemGetNVMLVersion") == "13.580.159.04"


def test_an_nvml_text_that_is_not_utf8_raises_no_error() -> None:
    nvml = FakeNvml(1)
    nvml.__dict__["nvmlDeviceGetName"] = lambda gpu: b"NVIDIA\xff"
    assert Gateway(binding=nvml).snapshot().devices[0].name == "NVIDIA\ufffd"
    # the binding itself decodes the name, and raises UnicodeDecodeError here
    nvml.__dict__["nvmlDeviceGetName"] = lambda gpu: b"\xff".decode()
    assert Gateway(binding=nvml).snapshot().devices[0].name == ""


@pytest.mark.parametrize("name", ["nvmlDeviceGetSomethingNew", "nvmlDeviceGetSerial"])
def test_a_call_of_an_nvml_function_that_the_binding_lacks_returns_none(name: str) -> None:
    assert Gateway(binding=FakeNvml(1)).call(name) is None


@pytest.mark.parametrize(("status", "level"), [(3, "debug"), (999, "warning")])
def test_an_unsupported_nvml_call_is_logged_once(status: int, level: str) -> None:
    fake = FakeNvml(1)
    fake.answers["nvmlSystemGetDriverVersion"] = status
    nvml = Nvml(fake)
    with capture_logs() as logs:
        assert [nvml.call("nvmlSystemGetDriverVersion") for _ in range(3)] == [None] * 3
    assert [(entry["log_level"], entry["function"], entry["status"]) for entry in logs] == [
        (level, "nvmlSystemGetDriverVersion", status)
    ]


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (pynvml.NVML_ERROR_GPU_IS_LOST, ErrorCode.GPU_LOST),
        (pynvml.NVML_ERROR_RESET_REQUIRED, ErrorCode.RESET_NEEDED),
        (pynvml.NVML_ERROR_TIMEOUT, ErrorCode.NVML_TIMEOUT),
        (pynvml.NVML_ERROR_MEMORY, ErrorCode.NVML_FAILED),
    ],
)
def test_nvml_errors_that_make_a_device_unusable_are_raised(status: int, code: ErrorCode) -> None:
    fake = FakeNvml(1)
    fake.answers["nvmlSystemGetDriverVersion"] = status
    with pytest.raises(NvmlRefusal) as caught:
        Gateway(binding=fake).call("nvmlSystemGetDriverVersion")
    assert (caught.value.code, caught.value.status) == (code, status)
    assert "nvmlSystemGetDriverVersion" in caught.value.sentence
    assert caught.value.sentence[0].islower()


def test_an_nvml_error_about_a_device_names_the_device() -> None:
    fake = FakeNvml(1)
    fake.answers["*", 0] = pynvml.NVML_ERROR_GPU_IS_LOST
    uuid = fake.gpus[0].uuid
    with pytest.raises(VgpuError) as caught:
        Gateway(binding=fake).processes(uuid)
    assert caught.value.code is ErrorCode.GPU_LOST
    assert caught.value.sentence.startswith(uuid)


def _hang(
    workers: Workers, subject: str, free: threading.Event, after: Callable[[], None], deadline: float = 0.05
) -> VgpuError:
    def job() -> None:
        beat("nvmlDeviceGetName")
        free.wait(30)
        beat("nvmlDeviceGetUUID")
        after()

    with pytest.raises(VgpuError) as caught:
        workers.run(subject, deadline, job)
    return caught.value


def _answers(workers: Workers, subject: str) -> bool:
    """Returns whether a call about the subject succeeds. It fails while an earlier call about it hangs."""
    try:
        return workers.run(subject, 5, lambda: 42) == 42
    except VgpuError:
        return False


def test_a_hanging_nvml_call_is_abandoned_and_named_in_the_error() -> None:
    workers, free, ran = Workers(), threading.Event(), threading.Event()
    error = _hang(workers, "gpu 3", free, ran.set, 0.5)
    assert error.code is ErrorCode.NVML_TIMEOUT
    assert "nvmlDeviceGetName about gpu 3 within 0.5 s" in error.sentence
    assert workers.run("gpu 4", 5, lambda: 42) == 42
    with pytest.raises(VgpuError, match="gpu 3"):
        workers.run("gpu 3", 5, lambda: 42)
    free.set()
    _until(lambda: _answers(workers, "gpu 3"))
    assert not ran.is_set(), "the rest of an abandoned job must not run"


def test_the_number_of_abandoned_workers_is_bounded() -> None:
    workers, free = Workers(), threading.Event()
    for number in range(MAX_STUCK):
        with pytest.raises(VgpuError, match="did not answer"):
            workers.run(f"gpu {number}", 0.01, lambda: free.wait(300))  # a call that begins late also hangs
    with pytest.raises(VgpuError, match=f"{MAX_STUCK} nvml calls hang"):
        workers.run("another", 5, lambda: None)
    free.set()
    _until(lambda: all(_answers(workers, f"gpu {number}") for number in range(MAX_STUCK)))


def test_the_deadline_applies_to_each_nvml_call_and_not_to_the_whole_job() -> None:
    step = threading.Event()

    def job() -> int:
        for _ in range(4):
            beat("nvmlDeviceGetName")
            step.wait(0.3)
        return 4

    assert Workers().run("gpu 0", 1.0, job) == 4


def test_an_error_raised_in_a_worker_reaches_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        Workers().run("gpu 0", 5, lambda: 1 // 0)


def test_the_deadline_of_nvml_calls_is_longer_while_a_change_is_under_way() -> None:
    fake = FakeNvml(1)
    gateway = Gateway(binding=fake)
    gateway.snapshot()
    free = fake.hangs["nvmlDeviceSetMigMode"] = threading.Event()
    changing = threading.Thread(target=gateway.set_mig_mode, args=(fake.gpus[0].uuid, True))
    changing.start()
    _until(lambda: "nvmlDeviceSetMigMode" in fake.calls)
    gateway.deadline_seconds = 0.2
    fake.hangs["nvmlDeviceGetMemoryInfo"] = free
    threading.Timer(0.5, free.set).start()
    assert gateway.snapshot().devices[0].health_reason == ""
    changing.join()


def test_the_threads_of_a_deleted_nvml_gateway_end() -> None:
    fake = FakeNvml(1)
    before = set(threading.enumerate())
    gc.disable()  # keeps the gateway's objects in the young generations, which are collected soon
    try:
        Gateway(binding=fake).snapshot()
    finally:
        gc.enable()
    gc.collect(1)
    _until(lambda: set(threading.enumerate()) <= before)


def _until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come about")
