#include "digest.h"

#include <linux/random.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "clock.h"
#include "functions.h"
#include "in_child.h"

#define BLOCKS 512u
#define THREADS 512u
#define UNIT_BYTES 16u
#define SUMS_BYTES (sizeof(struct vgpu_digest) * BLOCKS * VGPU_DIGESTS)

/*
 * A unit has two words. Of N threads, thread n reads the units n, n + N, n + 2N and so on. Word w at index i adds
 * mix(w ^ (seed_a + i * G)) to the first sum, and mix(w + (seed_b + i * H)) to the second. G and H are odd constants. A
 * mix is a bijection of 64 bits (shifts and odd factors, as in splitmix64 and murmur3). The threads of a warp add their
 * sums by exchanges, and the warps of a block by shared memory. Each block writes its sums to host memory, and the host
 * adds them. The kernel therefore needs no device memory except for its code.
 */
#define MIX(one, two)                \
    " shr.u64 %m, %x, 32;\n"         \
    " xor.b64 %x, %x, %m;\n"         \
    " mul.lo.u64 %x, %x, " one ";\n" \
    " shr.u64 %m, %x, 29;\n"         \
    " xor.b64 %x, %x, %m;\n"         \
    " mul.lo.u64 %x, %x, " two ";\n" \
    " shr.u64 %m, %x, 32;\n"         \
    " xor.b64 %x, %x, %m;\n"
#define FIRST(word) \
    " xor.b64 %x, " word ", %ka;\n" MIX("0xbf58476d1ce4e5b9", "0x94d049bb133111eb") " add.u64 %a, %a, %x;\n"
#define SECOND(word) \
    " add.u64 %x, " word ", %kb;\n" MIX("0xff51afd7ed558ccd", "0xc4ceb9fe1a85ec53") " add.u64 %b, %b, %x;\n"
#define NEXT_KEYS " add.u64 %ka, %ka, 0x9e3779b97f4a7c15;\n add.u64 %kb, %kb, 0xd1342543de82ef95;\n"
#define WORD(word) FIRST(word) SECOND(word) NEXT_KEYS
#define SUM(sum, lanes)                                        \
    " mov.b64 {%low, %high}, " sum ";\n"                       \
    " shfl.sync.bfly.b32 %low, %low, " lanes ", 0x1f, -1;\n"   \
    " shfl.sync.bfly.b32 %high, %high, " lanes ", 0x1f, -1;\n" \
    " mov.b64 %x, {%low, %high};\n"                            \
    " add.u64 " sum ", " sum ", %x;\n"
#define SUMS(lanes) SUM("%a", lanes) SUM("%b", lanes)

static const char kernel[] =
    ".version 6.0\n.target sm_50\n.address_size 64\n// vgpu-sim-digest\n"
    ".visible .entry digest(.param .u64 from, .param .u64 count, .param .u64 one,"
    " .param .u64 two, .param .u64 to)\n"
    "{\n"
    " .reg .pred %p;\n"
    " .reg .b32 %r<4>, %low, %high, %s;\n"
    " .shared .align 16 .b8 warps[256];\n"
    " .reg .b64 %at, %units, %out, %i, %stride, %step, %sa, %sb, %ka, %kb, %a, %b, %x, %m, %v, %w;\n"
    " ld.param.u64 %at, [from];\n"
    " ld.param.u64 %units, [count];\n"
    " ld.param.u64 %ka, [one];\n"
    " ld.param.u64 %kb, [two];\n"
    " ld.param.u64 %out, [to];\n"
    " cvta.to.global.u64 %at, %at;\n"
    " cvta.to.global.u64 %out, %out;\n"
    " mov.u32 %r0, %ctaid.x;\n"
    " mov.u32 %r1, %ntid.x;\n"
    " mov.u32 %r2, %tid.x;\n"
    " mov.u32 %r3, %nctaid.x;\n"
    " mul.wide.u32 %stride, %r3, %r1;\n"
    " mul.wide.u32 %i, %r0, %r1;\n"
    " cvt.u64.u32 %x, %r2;\n"
    " add.u64 %i, %i, %x;\n"
    " shl.b64 %x, %i, 1;\n"
    " mul.lo.u64 %m, %x, 0x9e3779b97f4a7c15;\n"
    " add.u64 %ka, %ka, %m;\n"
    " mul.lo.u64 %m, %x, 0xd1342543de82ef95;\n"
    " add.u64 %kb, %kb, %m;\n"
    /*
     * WORD has already added one G and one H for each of the two words, so the step to the next unit is smaller by two
     */
    " shl.b64 %x, %stride, 1;\n"
    " sub.u64 %x, %x, 2;\n"
    " mul.lo.u64 %sa, %x, 0x9e3779b97f4a7c15;\n"
    " mul.lo.u64 %sb, %x, 0xd1342543de82ef95;\n"
    " shl.b64 %x, %i, 4;\n"
    " add.u64 %at, %at, %x;\n"
    " shl.b64 %step, %stride, 4;\n"
    " mov.u64 %a, 0;\n"
    " mov.u64 %b, 0;\n"
    " setp.ge.u64 %p, %i, %units;\n"
    " @%p bra ADD;\n"
    "NEXT:\n"
    " ld.global.v2.u64 {%v, %w}, [%at];\n" WORD("%v")
        WORD("%w") " add.u64 %ka, %ka, %sa;\n"
                   " add.u64 %kb, %kb, %sb;\n"
                   " add.u64 %at, %at, %step;\n"
                   " add.u64 %i, %i, %stride;\n"
                   " setp.lt.u64 %p, %i, %units;\n"
                   " @%p bra NEXT;\n"
                   "ADD:\n" SUMS("16") SUMS("8") SUMS("4") SUMS("2")
                       SUMS("1") " mov.u32 %s, warps;\n"
                                 " shr.u32 %r3, %r2, 5;\n"
                                 " mad.lo.u32 %s, %r3, 16, %s;\n"
                                 " and.b32 %r3, %r2, 31;\n"
                                 " setp.ne.u32 %p, %r3, 0;\n"
                                 " @%p bra WAIT;\n"
                                 " st.shared.v2.u64 [%s], {%a, %b};\n"
                                 "WAIT:\n"
                                 " bar.sync 0;\n"
                                 " setp.ne.u32 %p, %r2, 0;\n"
                                 " @%p ret;\n"
                                 /* thread 0 has the sums of the first warp */
                                 " mov.u32 %r3, 15;\n"
                                 "WARP:\n"
                                 " add.u32 %s, %s, 16;\n"
                                 " ld.shared.v2.u64 {%v, %w}, [%s];\n"
                                 " add.u64 %a, %a, %v;\n"
                                 " add.u64 %b, %b, %w;\n"
                                 " sub.u32 %r3, %r3, 1;\n"
                                 " setp.ne.u32 %p, %r3, 0;\n"
                                 " @%p bra WARP;\n"
                                 " mul.wide.u32 %x, %r0, 16;\n"
                                 " add.u64 %out, %out, %x;\n"
                                 " st.global.v2.u64 [%out], {%a, %b};\n"
                                 " ret;\n"
                                 "}\n";

_Static_assert(THREADS / 32 * sizeof(struct vgpu_digest) == 256, "the kernel's text has the size of its shared memory");

static struct {
    bool tried; /* whether loading the kernel was tried in the present context */
    CUfunction function;
    /* the sums of the blocks, in host memory of the context, by number of the digest */
    struct vgpu_digest (*sums)[BLOCKS];
    CUdeviceptr to; /* address of `sums` on the device */
    uint64_t seeds[2];
} digest;

static bool load(void)
{
    CUmodule module;
    void *sums;
    if (CALL(cuModuleLoadData, &module, kernel) != CUDA_SUCCESS ||
        CALL(cuModuleGetFunction, &digest.function, module, "digest") != CUDA_SUCCESS ||
        CALL(cuMemHostAlloc, &sums, SUMS_BYTES, CU_MEMHOSTALLOC_DEVICEMAP) != CUDA_SUCCESS)
        return false;
    digest.sums = sums;
    return CALL(cuMemHostGetDevicePointer_v2, &digest.to, sums, 0) == CUDA_SUCCESS;
}

bool vgpu_digest_begin(void)
{
    if (!digest.tried) {
        digest.tried = true;
        if (digest.seeds[0] == 0 &&
            /* getrandom(3) of the C library is newer than 2.17 */
            syscall(SYS_getrandom, digest.seeds, sizeof(digest.seeds), GRND_NONBLOCK) != (long)sizeof(digest.seeds))
            digest.seeds[0] = now_ns() | 1;
        if (!load())
            digest.function = NULL;
    }
    if (digest.function != NULL)
        memset(digest.sums, 0, SUMS_BYTES);
    return digest.function != NULL;
}

CUresult vgpu_digest_add(unsigned place, CUdeviceptr base, uint64_t bytes, CUstream stream)
{
    uint64_t units = bytes / UNIT_BYTES;
    CUdeviceptr to = digest.to + place * sizeof(digest.sums[0]);
    void *parameters[] = {&base, &units, &digest.seeds[0], &digest.seeds[1], &to};
    return CALL(cuLaunchKernel, digest.function, BLOCKS, 1, 1, THREADS, 1, 1, 0, stream, parameters, NULL);
}

CUresult vgpu_digest_read(struct vgpu_digest *digests, unsigned count, CUstream stream)
{
    CUresult result = CALL(cuStreamSynchronize, stream);
    for (unsigned i = 0; i < count && result == CUDA_SUCCESS; i++) {
        digests[i] = (struct vgpu_digest){0, 0};
        for (unsigned j = 0; j < BLOCKS; j++) {
            digests[i].a += digest.sums[i][j].a;
            digests[i].b += digest.sums[i][j].b;
        }
        if (digests[i].a == 0 && digests[i].b == 0)
            return CUDA_ERROR_UNKNOWN; /* both sums are still 0, so the kernel has not written them */
    }
    return result;
}

void vgpu_digest_forget(void)
{
    digest.tried = false;
    digest.function = NULL;
}

VGPU_IN_CHILD(vgpu_digest_forget);
