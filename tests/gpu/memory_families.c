/*
 * memory_families.c: allocates device memory in every way, to check the ledger's exactness.
 *
 *   memory_families fill FAMILY [MIB [COUNT]]   pieces of 32 or MIB MiB until refused, or COUNT of them; says how
 *                                  much, then waits for a line
 *   memory_families walk SEED      steps through everything; after each step says what, and waits for a line
 *   memory_families race SEED COUNT [FAMILY]     random operations, of all families but managed memory and graphs
 *                                  or of one; says how many were refused
 *   memory_families relay FAMILY FAMILY MIB SECONDS     two processes that hand one piece on: a family each, and
 *                                  never both at a time (the next one begins when the last one's free has returned)
 *
 * With MEMORY_WORDS (a file) and MEMORY_WORD (an index) a process writes its current operation into its 32-bit word of
 * that file: 0 none, 1 + 2 * family allocating, 2 + 2 * family freeing, 100 making its context, 101 ending. A reader of
 * the device's use then knows which operations were in flight.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MIB (1ull << 20)
#define PIECES 4096

static CUcontext context;
static CUstream stream;
static unsigned long long managed_bytes; /* NVML does not count managed memory as the process's memory */

static void fail(const char *what, CUresult result)
{
    fprintf(stderr, "%s: %d\n", what, result);
    exit(1);
}
#define CHECK(call)                  \
    do {                             \
        CUresult result_ = (call);   \
        if (result_ != CUDA_SUCCESS) \
            fail(#call, result_);    \
    } while (0)

enum { NOTHING, BEGINNING = 100, ENDING };
static unsigned unseen_word;
static unsigned *word = &unseen_word;

static void doing(unsigned what)
{
    __atomic_store_n(word, what, __ATOMIC_SEQ_CST);
}

static void find_word(void)
{
    const char *path = getenv("MEMORY_WORDS");
    const char *index = getenv("MEMORY_WORD");
    int fd = path != NULL && index != NULL ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *words = fd >= 0 ? mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (words != MAP_FAILED)
        word = (unsigned *)words + atoi(index) % 1024;
    if (fd >= 0)
        close(fd);
}

static void checkpoint(const char *what)
{
    char line[64];
    printf("{\"at\": \"%s\", \"managed_bytes\": %llu}\n", what, managed_bytes);
    fflush(stdout);
    if (fgets(line, sizeof(line), stdin) == NULL)
        exit(0);
}

struct piece {
    int family;
    size_t bytes;
    CUdeviceptr pointer;
    CUarray array;
    CUmipmappedArray mipmap;
    CUmemGenericAllocationHandle handle;
    CUgraph graph;
    CUgraphExec exec;
};

static const char *const families[] = {"alloc", "pitch", "managed", "vmm",    "async",
                                       "pool",  "array", "array3d", "mipmap", "graph"};
enum { ALLOC, PITCH, MANAGED, VMM, ASYNC, POOL, ARRAY, ARRAY3D, MIPMAP, GRAPH, FAMILIES };
static CUmemoryPool own_pool;

static const CUmemLocation here = {.type = CU_MEM_LOCATION_TYPE_DEVICE};

static CUresult make_graph(struct piece *piece)
{
    CUDA_MEM_ALLOC_NODE_PARAMS parameters;
    CUgraphNode node;
    memset(&parameters, 0, sizeof(parameters));
    parameters.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    parameters.poolProps.location = here;
    parameters.bytesize = piece->bytes;
    CHECK(cuGraphCreate(&piece->graph, 0));
    CHECK(cuGraphAddMemAllocNode(&node, piece->graph, NULL, 0, &parameters));
    piece->pointer = parameters.dptr;
    CHECK(cuGraphInstantiateWithFlags(&piece->exec, piece->graph, 0));
    CUresult result = cuGraphLaunch(piece->exec, stream);
    if (result != CUDA_SUCCESS) {
        CHECK(cuGraphExecDestroy(piece->exec));
        CHECK(cuGraphDestroy(piece->graph));
    }
    return result;
}

static CUresult make(struct piece *piece, int family, size_t bytes)
{
    size_t pitch;
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = here};
    CUDA_ARRAY_DESCRIPTOR flat = {bytes / 16384 > 0 ? 4096 : bytes / 4 + 1, bytes / 16384, CU_AD_FORMAT_FLOAT, 1};
    CUDA_ARRAY3D_DESCRIPTOR deep = {256, 256, bytes / (256 * 256 * 4) + 1, CU_AD_FORMAT_FLOAT, 1, 0};
    CUDA_ARRAY3D_DESCRIPTOR levels = {2048, bytes / 4 * 3 / (2048 * 4) + 1, 0, CU_AD_FORMAT_FLOAT, 1,
                                      0}; /* smaller mipmap levels add a third */
    piece->family = family;
    piece->bytes = bytes;
    switch (family) {
    case ALLOC:
        return cuMemAlloc(&piece->pointer, bytes);
    case PITCH:
        return cuMemAllocPitch(&piece->pointer, &pitch, 65536, (bytes + 65535) / 65536, 4);
    case MANAGED:
        return cuMemAllocManaged(&piece->pointer, bytes, CU_MEM_ATTACH_GLOBAL);
    case VMM:
        piece->bytes = (bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
        return cuMemCreate(&piece->handle, piece->bytes, &properties, 0);
    case ASYNC:
        return cuMemAllocAsync(&piece->pointer, bytes, stream);
    case POOL:
        return cuMemAllocFromPoolAsync(&piece->pointer, bytes, own_pool, stream);
    case ARRAY:
        return cuArrayCreate(&piece->array, &flat);
    case ARRAY3D:
        return cuArray3DCreate(&piece->array, &deep);
    case MIPMAP:
        return cuMipmappedArrayCreate(&piece->mipmap, &levels, 12);
    default:
        return make_graph(piece);
    }
}

static void drop(struct piece *piece)
{
    switch (piece->family) {
    case VMM:
        CHECK(cuMemRelease(piece->handle));
        break;
    case ASYNC:
    case POOL:
        CHECK(cuMemFreeAsync(piece->pointer, stream));
        break;
    case ARRAY:
    case ARRAY3D:
        CHECK(cuArrayDestroy(piece->array));
        break;
    case MIPMAP:
        CHECK(cuMipmappedArrayDestroy(piece->mipmap));
        break;
    case GRAPH:
        CHECK(cuMemFreeAsync(piece->pointer, stream));
        CHECK(cuStreamSynchronize(stream));
        CHECK(cuGraphExecDestroy(piece->exec));
        CHECK(cuGraphDestroy(piece->graph));
        CHECK(cuDeviceGraphMemTrim(0));
        break;
    default:
        CHECK(cuMemFree(piece->pointer));
    }
    piece->family = -1;
}

static void begin(void)
{
    CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = here};
    find_word();
    doing(BEGINNING);
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuMemPoolCreate(&own_pool, &properties));
    doing(NOTHING);
}

static int family_of(const char *name)
{
    int family = 0;
    while (family < FAMILIES && strcmp(families[family], name) != 0)
        family++;
    return family;
}

static void fill(const char *name, size_t piece_bytes, int most)
{
    static struct piece pieces[PIECES];
    int family = family_of(name);
    int count = 0;
    CUresult result = CUDA_SUCCESS;
    begin();
    while (count < most && (result = make(&pieces[count], family, piece_bytes)) == CUDA_SUCCESS)
        count++;
    if (family == MANAGED)
        managed_bytes = (unsigned long long)count * piece_bytes;
    printf("{\"family\": \"%s\", \"total_mib\": %llu, \"result\": %d}\n", name, count * piece_bytes / MIB, result);
    checkpoint(name);
    for (int i = 0; i < count; i++)
        drop(&pieces[i]);
    CHECK(cuCtxSynchronize());
    managed_bytes = 0;
    checkpoint("freed");
}

/* 16 KiB of local memory for each thread, and 64 MiB of global variables. */
static const char *const module_text =
    ".version 6.0\n.target sm_50\n.address_size 64\n.global .align 8 .b8 big[67108864];\n"
    ".visible .entry k(.param .u64 p){ .local .align 16 .b8 l[16384]; .reg .u64 %a,%b,%c; .reg .u32 %t; "
    "cvta.local.u64 %a, l; mov.u32 %t,%tid.x; cvt.u64.u32 %b,%t; and.b64 %b,%b,4095; add.u64 %a,%a,%b; "
    "st.u8 [%a],%t; ld.u8 %t,[%a]; ld.param.u64 %c,[p]; cvta.to.global.u64 %c,%c; st.global.u32 [%c],%t; ret; }\n";

/* Two green contexts of 16 SMs, with a stream each. */
static void walk_green(void)
{
    CUdevResource whole, parts[2];
    CUdevResourceDesc description;
    CUgreenCtx greens[2];
    CUstream streams[2];
    unsigned count = 2;
    CHECK(cuDeviceGetDevResource(0, &whole, CU_DEV_RESOURCE_TYPE_SM));
    CHECK(cuDevSmResourceSplitByCount(parts, &count, &whole, NULL, 0, 16));
    for (int i = 0; i < 2; i++) {
        CHECK(cuDevResourceGenerateDesc(&description, &parts[i], 1));
        CHECK(cuGreenCtxCreate(&greens[i], description, 0, CU_GREEN_CTX_DEFAULT_STREAM));
        checkpoint(i == 0 ? "green context" : "second green context");
    }
    for (int i = 0; i < 2; i++)
        CHECK(cuGreenCtxStreamCreate(&streams[i], greens[i], CU_STREAM_NON_BLOCKING, 0));
    checkpoint("a stream in each");
    for (int i = 0; i < 2; i++) {
        CHECK(cuStreamDestroy(streams[i]));
        CHECK(cuGreenCtxDestroy(greens[i]));
        checkpoint(i == 0 ? "one green context gone" : "both gone");
    }
}

static void walk_driver(void)
{
    CUmodule module;
    CUfunction kernel;
    CUstream streams[64];
    CUdeviceptr pointer;
    void *arguments[] = {&pointer};
    CHECK(cuMemAlloc(&pointer, 4));
    checkpoint("4 bytes");
    CHECK(cuModuleLoadData(&module, module_text));
    checkpoint("module with 64 MiB of globals");
    CUresult result = cuModuleGetFunction(&kernel, module, "k");
    checkpoint(result == CUDA_SUCCESS ? "function with 16 KiB of local memory" : "function refused");
    if (result == CUDA_SUCCESS) {
        CHECK(cuLaunchKernel(kernel, 132, 1, 1, 256, 1, 1, 0, stream, arguments, NULL));
        CHECK(cuCtxSynchronize());
        checkpoint("launched");
        CHECK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 1024));
        checkpoint("small stack again");
    }
    CHECK(cuModuleUnload(module));
    CHECK(cuMemFree(pointer));
    checkpoint("unloaded");
    for (int i = 0; i < 64; i++)
        CHECK(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
    checkpoint("64 streams");
    for (int i = 0; i < 64; i++)
        CHECK(cuStreamDestroy(streams[i]));
    checkpoint("streams destroyed");
}

static size_t random_size(unsigned *seed)
{
    static const size_t most[] = {4096, 300000, 3 * MIB, 40 * MIB};
    return 1 + (size_t)rand_r(seed) % most[rand_r(seed) % 4];
}

/* values of `only` in random_step(): all families, or all families but managed memory and graphs */
enum { ANY = -1, ON_THE_CARD = -2 };

/* Makes one random operation. Returns true unless it was refused. */
static int random_step(struct piece *pieces, int count, unsigned *seed, int only)
{
    struct piece *piece = &pieces[rand_r(seed) % (unsigned)count];
    if (piece->family >= 0) {
        if (piece->family == MANAGED)
            managed_bytes -= (piece->bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
        doing(2 + 2 * (unsigned)piece->family);
        drop(piece);
        doing(NOTHING);
        return 1;
    }
    int family = rand_r(seed) % FAMILIES;
    if (only == ON_THE_CARD && (family == MANAGED || family == GRAPH))
        family = ALLOC;
    if (only >= 0)
        family = only;
    doing(1 + 2 * (unsigned)family);
    CUresult result = make(piece, family, random_size(seed));
    doing(NOTHING);
    if (result != CUDA_SUCCESS) {
        piece->family = -1;
        if (result != CUDA_ERROR_OUT_OF_MEMORY)
            fail(families[family], result);
        return 0;
    }
    if (family == MANAGED)
        managed_bytes += (piece->bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
    return 1;
}

static void walk(unsigned seed)
{
    static struct piece pieces[200];
    char name[64];
    begin();
    checkpoint("context, stream, pool");
    walk_driver();
    walk_green();
    for (int i = 0; i < 200; i++)
        pieces[i].family = -1;
    for (int round = 0; round < 60; round++) {
        for (int i = 0; i < 25; i++)
            random_step(pieces, 200, &seed, ANY);
        CHECK(cuStreamSynchronize(stream));
        snprintf(name, sizeof(name), "random %d", (round + 1) * 25);
        checkpoint(name);
    }
    for (int i = 0; i < 200; i++)
        if (pieces[i].family >= 0)
            drop(&pieces[i]);
    CHECK(cuCtxSynchronize());
    managed_bytes = 0;
    checkpoint("all freed");
}

static void race(unsigned seed, long operations, int only)
{
    static struct piece pieces[64];
    unsigned long long refused = 0;
    begin();
    for (int i = 0; i < 64; i++)
        pieces[i].family = -1;
    checkpoint("ready");
    for (long i = 0; i < operations; i++)
        refused += !random_step(pieces, 64, &seed, only);
    printf("{\"operations\": %ld, \"refused\": %llu}\n", operations, refused);
    fflush(stdout);
    doing(ENDING);
}

/*
 * The second process of a relay: for each byte it gets, it allocates and frees a piece and answers with a byte. For 'h'
 * it holds the piece until the next byte.
 */
static void relay_second(int from, int to, int family, size_t bytes)
{
    struct piece piece;
    char order;
    begin();
    CHECK(make(&piece, family, bytes));
    drop(&piece);
    while (write(to, "k", 1) == 1 && read(from, &order, 1) == 1) {
        CHECK(make(&piece, family, bytes));
        if (order == 'h' && (write(to, "k", 1) != 1 || read(from, &order, 1) != 1))
            break;
        drop(&piece);
    }
    exit(0);
}

static void tell(int to, int from, char order)
{
    if (write(to, &order, 1) != 1 || read(from, &order, 1) != 1)
        fail("the other process", CUDA_ERROR_UNKNOWN);
}

static void relay(int first, int second, size_t bytes, double seconds)
{
    struct piece piece;
    struct timespec now;
    unsigned long long rounds = 0;
    int there[2], back[2];
    char answer;
    if (pipe(there) != 0 || pipe(back) != 0)
        fail("pipe", CUDA_ERROR_UNKNOWN);
    if (fork() == 0) {
        close(there[1]); /* so the read of the second process ends when the first process ends */
        relay_second(there[0], back[1], second, bytes);
    }
    begin();
    CHECK(make(&piece, first, bytes));
    drop(&piece);
    if (read(back[0], &answer, 1) != 1)
        fail("the other process", CUDA_ERROR_UNKNOWN);
    checkpoint("none");
    CHECK(make(&piece, first, bytes));
    checkpoint("first");
    drop(&piece);
    tell(there[1], back[0], 'h');
    checkpoint("second");
    tell(there[1], back[0], 'd');
    clock_gettime(CLOCK_MONOTONIC, &now);
    double until = (double)now.tv_sec + (double)now.tv_nsec * 1e-9 + seconds;
    printf("{\"at\": \"racing\"}\n");
    fflush(stdout);
    do {
        CHECK(make(&piece, first, bytes));
        drop(&piece);
        tell(there[1], back[0], 'p');
        rounds++;
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((double)now.tv_sec + (double)now.tv_nsec * 1e-9 < until);
    printf("{\"rounds\": %llu}\n", rounds);
}

static int pieces_of(const char *text)
{
    int count = atoi(text);
    return count > 0 && count < PIECES ? count : PIECES;
}

int main(int argc, char **argv)
{
    if (argc >= 3 && strcmp(argv[1], "fill") == 0)
        fill(argv[2], argc > 3 ? (size_t)atoi(argv[3]) * MIB : 32 * MIB, argc > 4 ? pieces_of(argv[4]) : PIECES);
    else if (argc == 3 && strcmp(argv[1], "walk") == 0)
        walk((unsigned)atoi(argv[2]));
    else if (argc >= 4 && strcmp(argv[1], "race") == 0)
        race((unsigned)atoi(argv[2]), atol(argv[3]), argc > 4 ? family_of(argv[4]) : ON_THE_CARD);
    else if (argc == 6 && strcmp(argv[1], "relay") == 0)
        relay(family_of(argv[2]), family_of(argv[3]), (size_t)(atof(argv[4]) * MIB), atof(argv[5]));
    else
        return 2;
    return 0;
}
