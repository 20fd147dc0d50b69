/* stub.c: a libcuda.so.1 to link against. It is never run, because the loader finds the driver's own. */
#define SYMBOL(name) int name(void);
#include "symbols.def"
#undef SYMBOL
#define SYMBOL(name)                                      \
    __attribute__((visibility("default"))) int name(void) \
    {                                                     \
        return 34;                                        \
    } /* CUDA_ERROR_STUB_LIBRARY */
#include "symbols.def"
#undef SYMBOL
