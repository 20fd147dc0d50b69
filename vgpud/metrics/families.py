"""All metrics. Names, types and labels are stable: a test compares them with a golden file.

Base units only (bytes, seconds, ratios from 0 to 1, watts, degrees Celsius), as Prometheus asks:
https://prometheus.io/docs/practices/naming/. The number of label values is bounded by devices and
allocations; no label has a pid or a command. `uid` is the allocation's owner, as the kernel named it.
"""

from vgpud.metrics.exposition import Family

_GPU = ("gpu_uuid", "gpu")
_SLICE = ("allocation", "gpu_uuid", "uid")


def _gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Family:
    return Family(f"vgpud_{name}", "gauge", text, labels)


def _counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Family:
    return Family(f"vgpud_{name}_total", "counter", text, labels)


# the daemon
BUILD_INFO = _gauge("build_info", "Versions: 1.", ("version", "driver_version", "cuda_version"))
SIMULATED = _gauge("simulated", "1 where no real GPU is behind this daemon.")
HARDWARE_UP = _gauge("hardware_up", "1 where NVML answers.")
UPTIME = _gauge("uptime_seconds", "Since the daemon started.")
REVISION = _gauge("revision", "Of the last event; it never falls.")
POLICY_INFO = _gauge("policy_info", "The digest of the policy in force: 1.", ("digest",))
RELOAD_OK = _gauge("config_last_reload_successful", "1 if the last reload of the policy was taken.")
RELOAD_TIME = _gauge("config_last_reload_timestamp_seconds", "When a policy was last taken.")
WATCHERS = _gauge("watchers", "Callers that watch events now.")
NVML_ERRORS = _counter("nvml_errors", "NVML calls that failed, by NVML's status.", ("code",))
COLLECT = _gauge("collect_duration_seconds", "What it took to gather these figures.")

# devices
GPU_INFO = _gauge("gpu_info", "A device: 1.", (*_GPU, "name", "pci_bus_id", "policy_mode"))
GPU_HEALTHY = _gauge("gpu_healthy", "0 for a device that is lost, failed or sick.", _GPU)
GPU_DRAINED = _gauge("gpu_drained", "1 for a device that takes no new tenants.", _GPU)
GPU_MODE = _gauge("gpu_mode", "How the device is shared now, idle where it is not: 1.", (*_GPU, "mode"))
GPU_ENGINE = _gauge(
    "gpu_engine",
    "What keeps the time slices of its preload tenants, and why: 1.",
    (*_GPU, "engine", "reason"),
)
GPU_MEMORY_LIMIT = _gauge("gpu_memory_limit_bytes", "What allocations can share of it.", _GPU)
GPU_MEMORY_ALLOCATED = _gauge("gpu_memory_allocated_bytes", "What allocations have of it.", _GPU)
GPU_MEMORY_USED = _gauge("gpu_memory_used_bytes", "In use, as NVML says.", _GPU)
GPU_COMPUTE_ALLOCATED = _gauge("gpu_compute_allocated_ratio", "Sum of the shares asked for.", _GPU)
GPU_BUSY = _gauge("gpu_busy_ratio", "Of the driver's last sampling period, some kernel ran.", _GPU)
GPU_TEMPERATURE = _gauge("gpu_temperature_celsius", "Of the chip.", _GPU)
GPU_POWER = _gauge("gpu_power_watts", "Drawn now.", _GPU)
GPU_POWER_LIMIT = _gauge("gpu_power_limit_watts", "At most drawn.", _GPU)
GPU_ALLOCATIONS = _gauge("gpu_allocations", "Slices held on it.", _GPU)
GPU_PROCESSES = _gauge("gpu_processes", "Processes that NVML lists on it.", _GPU)
GPU_MIG_INSTANCES = _gauge("gpu_mig_instances", "GPU instances that stand on it.", _GPU)

# allocations
ALLOCATIONS = _gauge("allocations", "Allocations, by state.", ("state",))
ALLOCATION_INFO = _gauge(
    "allocation_info",
    "An allocation: 1.",
    ("allocation", "uid", "mode", "state", "label", "namespace", "pod", "container", "claim"),
)
MEMORY_LIMIT = _gauge("allocation_memory_limit_bytes", "What a slice may have.", _SLICE)
MEMORY_USED = _gauge("allocation_memory_used_bytes", "What it has, contexts included.", _SLICE)
MEMORY_PEAK = _gauge("allocation_memory_peak_bytes", "The most one process of it ever had.", _SLICE)
COMPUTE_LIMIT = _gauge("allocation_compute_limit_ratio", "The share of the device asked for.", _SLICE)
COMPUTE_USED = _counter("allocation_compute_seconds", "Held the device; its rate is the share had.", _SLICE)
COMPUTE_WAITED = _counter("allocation_compute_waited_seconds", "Wanted the device, had it not.", _SLICE)
COMPUTE_GRANTED = _counter("allocation_compute_granted_seconds", "Length of the turns it got.", _SLICE)
COMPUTE_OVERRUN = _counter("allocation_compute_overrun_seconds", "Held it after a turn's end.", _SLICE)
COMPUTE_BYPASSED = _counter(
    "allocation_compute_bypassed", "Turns that did not end: the next was let in beside.", _SLICE
)
THROTTLED = _counter("allocation_throttled_seconds", "Launches held back to keep to the share.", _SLICE)
MEMORY_REFUSED = _counter(
    "allocation_memory_refused", "Memory refused: over its own limit, or the card full.", (*_SLICE, "cause")
)
PROCESSES = _gauge("allocation_processes", "Processes in it.", _SLICE)
ALLOCATION_MARKED = _gauge(
    "allocation_marked",
    "1 for what was noticed of it: bypassed, tampered, gated, unknown-calls.",
    ("allocation", "mark"),
)
BYPASSED_BYTES = _gauge(
    "allocation_bypassed_bytes",
    "Device memory that libvgpu did not count, when it was noticed.",
    ("allocation", "gpu_uuid"),
)
UNKNOWN_CALLS = _gauge(
    "driver_unknown_calls", "Functions of the driver that libvgpu does not know.", ("driver_version",)
)

# requests and their decisions
MADE = _counter("allocations_made", "Allocations made, by mode.", ("mode",))
REFUSED = _counter("allocations_refused", "Requests refused, by the error's name.", ("reason",))
RELEASED = _counter("allocations_released", "Allocations given back.")
RESIZED = _counter("allocations_resized", "Changes of limits.")
FAILED = _counter("allocations_failed", "Allocations that lost their device or helper.")
MARKED = _counter("allocations_marked", "Marks made, by kind.", ("mark",))
BYPASS_LOOKS = _counter("bypass_looks", "Comparisons of NVML's figures with the ledgers of preload tenants.")
STOPPED = _counter("allocations_stopped", "Marked allocations that the policy ended (on_bypass).")
MADE_SECONDS = Family("vgpud_allocation_duration_seconds", "histogram", "From decision to made.", ("le",))

# tenants that the policy suspends (idle_suspend, turn)
SUSPENDED = _counter("suspensions", "Tenants suspended by a rule of the policy, by cause.", ("cause",))
RESUMED = _counter("resumptions", "Tenants resumed as they wanted to work, by cause.", ("cause",))
RESUME_WAITED = _counter("resume_waited_seconds", "Spent by tenants from wanting to work until they could.")
MOVED = _counter("moves", "Tenants moved to other devices, or back where they were.", ("outcome",))
WAITING = _gauge("allocations_waiting", "Suspended tenants that want to work and are not resumed yet.")

# the process, by the standard names of Prometheus clients
RESIDENT = Family("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.")
CPU = Family("process_cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds.")
OPEN_FDS = Family("process_open_fds", "gauge", "Number of open file descriptors.")
START_TIME = Family("process_start_time_seconds", "gauge", "Start time of the process since unix epoch.")

ALL: tuple[Family, ...] = tuple(value for value in tuple(globals().values()) if isinstance(value, Family))
