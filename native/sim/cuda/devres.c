/*
 * SMs as a CUDA resource: queries, splits and descriptors. A resource is a value in the caller's hands; the field
 * reserved for the driver says which SMs the resource stands for. The rules are those of NVIDIA's driver API manual
 * 13.0, and of an H200 (driver 580) where the H200 accepts more.
 */
#include "green.h"

#define SET_MAGIC 0x534d5331u

enum { GPC_SMS = 18 }; /* the most SMs of one graphics processing cluster, from the H100 white paper */

struct sm_set {
    uint32_t magic, ordinal;
    uint64_t split; /* number of the split that made this set; 0: no split made it */
    struct cu_sms sms;
};
_Static_assert(sizeof(struct sm_set) <= sizeof(((CUdevResource *)NULL)->_internal_padding), "it has room");

static atomic_ullong g_splits;

static bool has(const struct cu_sms *sms, uint32_t sm)
{
    return (sms->bits[sm / 64] >> sm % 64 & 1) != 0;
}

static void put(struct cu_sms *sms, uint32_t sm)
{
    sms->bits[sm / 64] |= UINT64_C(1) << sm % 64;
}

static uint32_t count(const struct cu_sms *sms)
{
    uint32_t n = 0;
    for (int i = 0; i < CU_SM_WORDS; i++)
        n += (uint32_t)__builtin_popcountll(sms->bits[i]);
    return n;
}

/* Returns the least size of a part and the granularity of its size, in SMs. */
static void grain(int ordinal, bool independent, uint32_t *least, uint32_t *multiple)
{
    uint32_t major = cu_sim_device(ordinal)->cc_major;
    *least = independent || major < 8 ? 2 : major < 9 ? 4 : 8;
    *multiple = independent || major < 9 ? 2 : 8;
}

static void fill(CUdevResource *out, int ordinal, const struct cu_sms *sms, uint64_t split)
{
    struct sm_set set = {.magic = SET_MAGIC, .ordinal = (uint32_t)ordinal, .split = split, .sms = *sms};
    uint32_t least, multiple;
    grain(ordinal, false, &least, &multiple);
    memset(out, 0, sizeof(*out));
    out->type = count(sms) > 0 ? CU_DEV_RESOURCE_TYPE_SM : CU_DEV_RESOURCE_TYPE_INVALID;
    out->sm.smCount = count(sms);
    out->sm.minSmPartitionSize = least;
    out->sm.smCoscheduledAlignment = multiple;
    memcpy(out->_internal_padding, &set, sizeof(set));
}

static CUresult read_set(const CUdevResource *resource, struct sm_set *set)
{
    CU_CHECK(resource->type == CU_DEV_RESOURCE_TYPE_SM, CUDA_ERROR_INVALID_RESOURCE_TYPE);
    memcpy(set, resource->_internal_padding, sizeof(*set));
    return set->magic == SET_MAGIC && set->ordinal < (uint32_t)cu.device_count ? CUDA_SUCCESS
                                                                               : CUDA_ERROR_INVALID_VALUE;
}

CUresult cu_resource_of(int ordinal, const struct cu_sms *sms, CUdevResource *out, CUdevResourceType type)
{
    struct cu_sms all = {0};
    CU_CHECK(out != NULL, CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(type == CU_DEV_RESOURCE_TYPE_SM, CUDA_ERROR_INVALID_RESOURCE_TYPE);
    for (uint32_t sm = 0; sm < (uint32_t)cu_multiprocessors(ordinal); sm++)
        put(&all, sm);
    fill(out, ordinal, sms != NULL ? sms : &all, 0);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetDevResource(CUdevice dev, CUdevResource *out, CUdevResourceType type)
{
    CU_TRY(cu_enter_device("cuDeviceGetDevResource", dev));
    return cu_resource_of(dev, NULL, out, type);
}

/*
 * Returns how many groups of `size` SMs there are. An H200 had one group of the least size fewer than would fit (15
 * with 132 SMs), and as many larger groups as fit. The assumed reason is a GPC with too few SMs for a second group.
 */
static uint32_t groups_of(uint32_t sms, uint32_t size, uint32_t least)
{
    return sms / size - (size == least && least >= 8 && sms > GPC_SMS);
}

/* Takes `groups` groups of `size` SMs each, in the order of the SMs; `remainder` gets the other SMs. */
static void deal(const struct sm_set *from, CUdevResource *result, unsigned int groups, uint32_t size,
                 CUdevResource *remainder)
{
    uint64_t split = atomic_fetch_add(&g_splits, 1) + 1;
    struct cu_sms part = {0};
    uint32_t dealt = 0, all = groups * size;
    for (uint32_t sm = 0; sm < CU_SM_WORDS * 64; sm++) {
        if (!has(&from->sms, sm))
            continue;
        put(&part, sm);
        if (++dealt > all || dealt % size != 0)
            continue;
        fill(&result[dealt / size - 1], (int)from->ordinal, &part, split);
        part = (struct cu_sms){0};
    }
    if (remainder != NULL)
        fill(remainder, (int)from->ordinal, &part, split);
}

CUresult cuDevSmResourceSplitByCount(CUdevResource *result, unsigned int *groups, const CUdevResource *input,
                                     CUdevResource *remainder, unsigned int flags, unsigned int least_sms)
{
    struct sm_set from;
    uint32_t least, multiple;
    CU_TRY(cu_enter("cuDevSmResourceSplitByCount"));
    CU_CHECK(groups != NULL && input != NULL, CUDA_ERROR_INVALID_VALUE); /* unknown flags are ignored */
    CU_TRY(read_set(input, &from));
    /* the result of a split cannot be split again */
    CU_CHECK(from.split == 0, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
    uint32_t sms = count(&from.sms);
    CU_CHECK(result == NULL || *groups > 0, CUDA_ERROR_INVALID_VALUE);
    grain((int)from.ordinal, (flags & CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING) != 0, &least, &multiple);
    CU_CHECK(least_sms <= sms && least <= sms, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
    uint32_t size = least_sms < least ? least : (least_sms + multiple - 1) / multiple * multiple;
    if (size > sms)
        size = sms;
    uint32_t most = groups_of(sms, size, least);
    if (result == NULL || *groups > most)
        *groups = most;
    if (result != NULL)
        deal(&from, result, *groups, size, remainder);
    return CUDA_SUCCESS;
}

CUresult cuDevResourceGenerateDesc(CUdevResourceDesc *out, CUdevResource *resources, unsigned int n)
{
    struct sm_set one, first;
    CU_TRY(cu_enter("cuDevResourceGenerateDesc"));
    CU_CHECK(out != NULL && resources != NULL && n > 0, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(read_set(&resources[0], &first));
    struct cu_sms sms = {0};
    for (unsigned int i = 0; i < n; i++) {
        CU_TRY(read_set(&resources[i], &one));
        CU_CHECK(one.ordinal == first.ordinal, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
        for (int w = 0; w < CU_SM_WORDS; w++)
            sms.bits[w] |= one.sms.bits[w];
    }
    CUdevResourceDesc desc = calloc(1, sizeof(*desc)); /* the descriptor is never freed */
    CU_CHECK(desc != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    *desc = (struct CUdevResourceDesc_st){CU_DESCRIPTION, (int)first.ordinal, sms};
    *out = desc;
    return CUDA_SUCCESS;
}
