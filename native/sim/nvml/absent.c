/*
 * The rest of NVML's functions: each can be called, and returns NVML_ERROR_NOT_SUPPORTED unless it fails otherwise
 * (absent.h). They differ only in the kind of their first argument (a device, an instance, or none), and read no other.
 * Therefore this file does not include nvml.h, and declares them with that argument alone.
 */
#include "absent.h"

#define DEVICE(name)                               \
    int name(const void *device);                  \
    int name(const void *device)                   \
    {                                              \
        return nv_absent_of_device(#name, device); \
    }
#define INSTANCE(name)                                 \
    int name(const void *instance);                    \
    int name(const void *instance)                     \
    {                                                  \
        return nv_absent_of_instance(#name, instance); \
    }
#define SYSTEM(name)                       \
    int name(void);                        \
    int name(void)                         \
    {                                      \
        return nv_absent_of_system(#name); \
    }

#include "absent.def"
