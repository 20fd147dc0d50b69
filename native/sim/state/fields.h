/*
 * The device fields that a profile sets, with their types: one list for reading and printing them. U: uint32_t, L:
 * uint64_t, D: double, T: text.
 */
/* clang-format off */
#define SIM_DEVICE_FIELDS(U, L, D, T)                                                              \
    T(name) T(uuid) T(serial) T(vbios) T(board_part) T(gpu_part) T(inforom_image)                  \
    U(brand) U(architecture) U(cc_major) U(cc_minor) U(sm_count) U(core_count) U(minor)            \
    U(board_id) U(pci_domain) U(pci_bus) U(pci_device) U(pci_device_id) U(pci_subsystem_id)        \
    U(numa_node) U(numa_node_reported) U(virtualization_mode) U(module_id)                         \
    U(memory_bus_width_bits) U(pcie_generation) U(pcie_width) U(power_limit_mw) U(power_min_mw)    \
    U(power_max_mw) U(power_idle_mw) U(temperature_c) U(temperature_shutdown_c)                    \
    U(temperature_slowdown_c) U(temperature_max_c) U(clock_idle_mhz) U(clock_graphics_mhz)         \
    U(clock_memory_mhz) U(clock_video_mhz) U(ecc) U(nvlink_count) U(nvlink_version)                \
    U(l2_cache_bytes) U(multi_processor_threads) U(shared_memory_per_sm_bytes)                     \
    U(shared_memory_optin_bytes) U(async_engines) U(persistence) U(compute_mode)                   \
    L(memory_total) L(memory_reserved) L(bar1_total) L(context_bytes) L(context_mps_bytes)         \
    L(green_context_bytes) D(kernel_us) D(timeslice_us) D(context_switch_us)                       \
    D(channels_stop_us) D(channels_off_us) D(channels_on_us)                                       \
    U(mig_capable) U(mig_needs_reset) U(mig_persists_reboot) U(memory_slices) U(sm_per_slice)
/* clang-format on */

#define SIM_GI_FIELDS(U, L, D, T) \
    T(name)                       \
    U(nvml_profile)               \
    U(id)                         \
    U(slice_count)                \
    U(instance_count) U(sm_count) U(copy_engines) U(decoders) U(encoders) U(jpegs) U(ofas) U(capabilities) L(memory_mib)
