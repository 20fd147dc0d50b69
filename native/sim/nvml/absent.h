/*
 * The body of the functions in absent.def: enters the call with its errors and faults, as any function does, and
 * returns NVML_ERROR_NOT_SUPPORTED.
 */
#ifndef VGPU_SIM_NVML_ABSENT_H
#define VGPU_SIM_NVML_ABSENT_H

int nv_absent_of_device(const char *function, const void *device);
int nv_absent_of_instance(const char *function, const void *instance);
int nv_absent_of_system(const char *function);

#endif
