"""All metrics. Names, types and labels are stable: a test compares them with a golden file.

Base units only (bytes, seconds, ratios from 0 to 1, watts, degrees Celsius), as Prometheus asks:
https://prometheus.io/docs/practices/naming/. The number of label values is bounded by devices and
allocations; no label has a pid or a command. `uid` is the allocation's owner, as the kernel identified it.
"""

from vgpud.serve.metrics.exposition import Family

_GPU = ("gpu_uuid", "gpu")
_SLICE = ("allocation", "gpu_uuid", "uid")


def _gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Family:
    return Family(f"vgpud_{name}", "gauge", text, labels)


def _counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Family:
    return Family(f"vgpud_{name}_total", "counter", text, labels)


# --- the daemon
BUILD_INFO = _gauge(
    "build_info",
    "Always 1; the labels have the versions of vgpud, driver and CUDA.",
    ("version", "driver_version", "cuda_version"),
)
SIMULATED = _gauge("simulated", "1 if the node is simulated.")
HARDWARE_UP = _gauge("hardware_up", "1 if NVML answers.")
UPTIME = _gauge("uptime_seconds", "Seconds since the daemon started.")
REVISION = _gauge("revision", "Revision of the last event; it never decreases.")
POLICY_INFO = _gauge("policy_info", "Always 1; the label has the digest of the policy in force.", ("digest",))
RELOAD_OK = _gauge("config_last_reload_successful", "1 if the last reload of the policy succeeded.")
RELOAD_TIME = _gauge(
    "config_last_reload_timestamp_seconds", "Time of the last successful reload of the policy."
)
WATCHERS = _gauge("watchers", "Current number of callers that watch events.")
NVML_ERRORS = _counter("nvml_errors", "Failed NVML calls, by NVML's status.", ("code",))
COLLECT = _gauge("collect_duration_seconds", "Time to collect these metrics.")

# --- devices
GPU_INFO = _gauge(
    "gpu_info", "Always 1; the labels describe a device.", (*_GPU, "name", "pci_bus_id", "policy_mode")
)
GPU_HEALTHY = _gauge("gpu_healthy", "0 if the device is lost, failed or sick.", _GPU)
GPU_DRAINED = _gauge(
    "gpu_drained", "1 if an operator closed the device (vgpuctl drain); a sick one is not healthy.", _GPU
)
GPU_MODE = _gauge("gpu_mode", "Always 1; the label has the device's current mode, or idle.", (*_GPU, "mode"))
GPU_ENGINE = _gauge(
    "gpu_engine",
    "Always 1; the labels have the engine of the device's time slices, and the reason.",
    (*_GPU, "engine", "reason"),
)
GPU_MEMORY_LIMIT = _gauge("gpu_memory_limit_bytes", "Memory of the device that allocations can use.", _GPU)
GPU_MEMORY_ALLOCATED = _gauge("gpu_memory_allocated_bytes", "Memory of the device that is allocated.", _GPU)
GPU_MEMORY_USED = _gauge("gpu_memory_used_bytes", "Memory in use on the device, by NVML.", _GPU)
GPU_COMPUTE_ALLOCATED = _gauge(
    "gpu_compute_allocated_ratio", "Sum of the requested compute shares of the device.", _GPU
)
GPU_BUSY = _gauge("gpu_busy_ratio", "Part of the driver's last sampling period in which a kernel ran.", _GPU)
GPU_TEMPERATURE = _gauge("gpu_temperature_celsius", "Temperature of the chip.", _GPU)
GPU_POWER = _gauge("gpu_power_watts", "Current power draw.", _GPU)
GPU_POWER_LIMIT = _gauge("gpu_power_limit_watts", "Power limit.", _GPU)
GPU_ALLOCATIONS = _gauge("gpu_allocations", "Slices allocated on the device.", _GPU)
GPU_PROCESSES = _gauge("gpu_processes", "Processes on the device, by NVML.", _GPU)
GPU_MIG_INSTANCES = _gauge("gpu_mig_instances", "GPU instances on the device.", _GPU)

# --- allocations
ALLOCATIONS = _gauge("allocations", "Allocations, by state.", ("state",))
ALLOCATION_INFO = _gauge(
    "allocation_info",
    "Always 1; the labels describe an allocation.",
    ("allocation", "uid", "mode", "state", "label", "namespace", "pod", "container", "claim"),
)
MEMORY_LIMIT = _gauge("allocation_memory_limit_bytes", "Memory limit of the slice.", _SLICE)
MEMORY_USED = _gauge(
    "allocation_memory_used_bytes", "Memory in use by the slice, including contexts.", _SLICE
)
MEMORY_PEAK = _gauge(
    "allocation_memory_peak_bytes", "Highest memory use of a single process of the slice so far.", _SLICE
)
COMPUTE_LIMIT = _gauge("allocation_compute_limit_ratio", "Requested share of the device's compute.", _SLICE)
COMPUTE_USED = _counter(
    "allocation_compute_seconds",
    "Time in which the slice held the device; its rate is the achieved share.",
    _SLICE,
)
COMPUTE_WAITED = _counter(
    "allocation_compute_waited_seconds", "Time in which the slice waited for the device.", _SLICE
)
COMPUTE_GRANTED = _counter(
    "allocation_compute_granted_seconds", "Total length of the granted time slices.", _SLICE
)
COMPUTE_OVERRUN = _counter(
    "allocation_compute_overrun_seconds",
    "Time in which the slice held the device after the end of a time slice.",
    _SLICE,
)
COMPUTE_BYPASSED = _counter(
    "allocation_compute_bypassed",
    "Time slices that did not end in time, so that the next tenant started beside it.",
    _SLICE,
)
THROTTLED = _counter(
    "allocation_throttled_seconds", "Time by which launches were delayed to enforce the share.", _SLICE
)
MEMORY_REFUSED = _counter(
    "allocation_memory_refused",
    "Refused memory requests, because of the slice's limit or a full device.",
    (*_SLICE, "cause"),
)
PROCESSES = _gauge("allocation_processes", "Processes of the slice.", _SLICE)
ALLOCATION_MARKED = _gauge(
    "allocation_marked",
    "1 if the allocation has the mark: bypassed, tampered, gated, no-wall, unknown-calls.",
    ("allocation", "mark"),
)
BYPASSED_BYTES = _gauge(
    "allocation_bypassed_bytes",
    "Device memory that libvgpu did not count when the allocation was marked.",
    ("allocation", "gpu_uuid"),
)
UNKNOWN_CALLS = _gauge(
    "driver_unknown_calls", "Number of driver functions that libvgpu does not know.", ("driver_version",)
)

# --- requests and their decisions
MADE = _counter("allocations_made", "Allocations made, by mode.", ("mode",))
REFUSED = _counter("allocations_refused", "Requests refused, by the error's name.", ("reason",))
RELEASED = _counter("allocations_released", "Allocations released.")
RESIZED = _counter("allocations_resized", "Allocations resized.")
FAILED = _counter("allocations_failed", "Allocations that lost their device or helper.")
MARKED = _counter("allocations_marked", "Marks set on allocations, by kind.", ("mark",))
BYPASS_LOOKS = _counter("bypass_looks", "Comparisons of NVML's figures with the ledgers of preload tenants.")
STOPPED = _counter("allocations_stopped", "Marked allocations that the policy ended (on_bypass).")
MADE_SECONDS = Family(
    "vgpud_allocation_duration_seconds",
    "histogram",
    "Time from the planner's decision until the allocation is made.",
    ("le",),
)

# --- tenants that the policy suspends (idle_suspend, turn)
SUSPENDED = _counter("suspensions", "Tenants suspended by a rule of the policy, by cause.", ("cause",))
RESUMED = _counter(
    "resumptions", "Tenants resumed because they had work, by the cause of their suspension.", ("cause",)
)
RESUME_WAITED = _counter(
    "resume_waited_seconds", "Time in which suspended tenants with work waited until they were resumed."
)
MOVED = _counter(
    "moves", "Moves of tenants, by outcome: moved to another device, or moved back.", ("outcome",)
)
WAITING = _gauge("allocations_waiting", "Suspended tenants with work that are not resumed yet.")

# --- the process, by the standard names of Prometheus clients
RESIDENT = Family("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.")
CPU = Family("process_cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds.")
OPEN_FDS = Family("process_open_fds", "gauge", "Number of open file descriptors.")
START_TIME = Family("process_start_time_seconds", "gauge", "Start time of the process since unix epoch.")

ALL: tuple[Family, ...] = tuple(value for value in tuple(globals().values()) if isinstance(value, Family))
