/* cuGetProcAddress: finds a symbol by name, CUDA version and kind of default stream. */
#include "internal.h"

struct entry {
    const char *base, *symbol;
    int version;
    void *function, *per_thread;
};

#define API(base, symbol, version) {#base, #symbol, version, (void *)symbol, NULL},
#define API_PT(base, symbol, version, per_thread) {#base, #symbol, version, (void *)symbol, (void *)per_thread},

static const struct entry entries[] = {
#include "api.def"
};

static const struct entry *find(const char *symbol, int version, bool *too_new)
{
    struct sim_state *s = sim_attach();
    const struct entry *best = NULL;
    *too_new = false;
    for (size_t i = 0; i < sizeof(entries) / sizeof(entries[0]); i++) {
        const struct entry *e = &entries[i];
        bool exact = strcmp(e->symbol, symbol) == 0 && strcmp(e->base, symbol) != 0;
        if (!exact && strcmp(e->base, symbol) != 0)
            continue;
        if (s != NULL && sim_fault_missing(s, e->symbol))
            continue;
        if (e->version > version) {
            *too_new = true;
            continue;
        }
        if (best == NULL || e->version > best->version)
            best = e;
    }
    return best;
}

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status)
{
    const cuuint64_t known = CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    bool too_new;
    CU_CHECK(symbol != NULL && function != NULL && (flags & ~known) == 0, CUDA_ERROR_INVALID_VALUE);
    const struct entry *e = find(symbol, version, &too_new);
    bool per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
    if (status != NULL)
        *status = e != NULL ? CU_GET_PROC_ADDRESS_SUCCESS
                  : too_new ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                            : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    *function = e == NULL ? NULL : per_thread && e->per_thread != NULL ? e->per_thread : e->function;
    /* Version 2 succeeds for an unknown symbol and reports it in the status. A call without a status fails. */
    return e != NULL || status != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags)
{
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
