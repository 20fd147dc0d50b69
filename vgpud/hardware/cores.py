"""Computes the number of streaming multiprocessors: NVML reports CUDA cores, not SMs."""

# FP32 cores of one multiprocessor (SM) by compute capability. Source: CUDA C++ Programming Guide, "Arithmetic
# Instructions", throughput of 32-bit floating-point add per clock cycle per SM.
_CORES_PER_SM: dict[tuple[int, int], int] = {
    (3, 0): 192,
    (3, 5): 192,
    (3, 7): 192,
    (5, 0): 128,
    (5, 2): 128,
    (5, 3): 128,
    (6, 0): 64,
    (6, 1): 128,
    (6, 2): 128,
    (7, 0): 64,
    (7, 2): 64,
    (7, 5): 64,
    (8, 0): 64,
    (8, 6): 128,
    (8, 7): 128,
    (8, 9): 128,
    (9, 0): 128,
    (10, 0): 128,
    (10, 3): 128,
    (12, 0): 128,
    (12, 1): 128,
}


def sm_count(
    cores: int | None, capability: tuple[int, int] | None, largest_profile: int | None
) -> int | None:
    """Number of SMs of the whole card, or None if it cannot be determined.

    The number of CUDA cores is used first, because the largest MIG profile can be smaller than the card
    (A100: 98 of 108 SMs).
    """
    per_sm = _CORES_PER_SM.get(capability) if capability is not None else None
    if cores and per_sm and cores % per_sm == 0:
        return cores // per_sm
    return largest_profile
