/*
 * sched_cut.c: programs under the engine cut, in virtual time: the scheduler and the engine as they ship (cut.c), a
 * driver whose calls take as long as an H100's and are carried out in sequence, and libvgpu's reports.
 *
 *   sched-cut [slow | sliced] POLICY:SHARE[@LEAVES_MS-RETURNS_MS] KERNELS KERNEL_US LAUNCH_US GAP_US ...
 * A tenant for each five words; with `slow`, calls and messages take twice as long; with `sliced`, the driver gives the
 * device to each tenant with work for up to 2 ms at a time, and otherwise divides it equally among them.
 * POLICY: none, hard or lent; SHARE: percent. With `/N` after the share, the program has N devices and a process on
 * each, and its kernels run only while it is on all of them, like those of a collective operation. Between the two
 * times, counted from the start, the tenant makes no step. With `!` at the end of the word, its load samples say that
 * it has no work. A step of a tenant's program launches KERNELS kernels, each takes LAUNCH_US of the host, then waits
 * for the last of them, and pauses for GAP_US on average. Without kernels its work is endless. After 5 s of warming up
 * it prints, for each tenant and 20 s: steps a second, percent of the device, percent of the time that the tenant is
 * charged, percent of its time with work in which it is off the device, number of orders.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "channels.h"
#include "cut.h"
#include "rest.h"
#include "usage_io.h"

enum { MOST = 4, WORDS = 5, DEVICES = 8 };
static const char uuids[DEVICES][VGPU_UUID_BYTES] = {"GPU-0", "GPU-1", "GPU-2", "GPU-3",
                                                     "GPU-4", "GPU-5", "GPU-6", "GPU-7"};
#define STEP_NS 25000u
#define BEGIN_NS 1000000000u
#define WARM_NS 5000000000u
#define LENGTH_NS 20000000000u
#define MESSAGE_NS (slowness * 50000u) /* a message to the arbiter, and the wake-up of its thread */
#define ON_NS (slowness * 290000u)     /* a call that enables channels; their work runs at its end */
#define OFF_NS (slowness * 520000u)    /* a call that disables channels; their work stops after STOPS_NS */
#define STOPS_NS (slowness * 250000u)
#define OUT_OF_ORDER 0.1 /* the fraction of cases in which a thread other than the first gets the driver's lock */
#define SLICE_NS 2e6     /* the driver's time slice among programs on the device, and its switch between them */
#define SWITCH_NS 125e3
#define RETURNS_KERNEL_NS 5e6 /* endless work that can stop has kernels of this length */
#define AHEAD_MOST 1000u      /* launches in flight, above which the driver makes the program wait */
/* libvgpu/compute/cut.c */
#define LOOK_NS 250000u
#define LOOK_OFF_NS 1000000u
#define QUIET_NS 400000u
#define QUIET_MAX_NS 3000000u
#define TOO_EARLY_NS 1000000u
#define SAMPLE_NS 1000000u
#define MARKER_NS 20000.0
#define SAMPLE_FREE_NS 5000000u /* interval after a sample that found no work, which costs 50 us */

static struct program {
    struct lease lease;
    struct connection connections[DEVICES]; /* one process for each device */
    struct process processes[DEVICES];
    uint32_t kernels;
    double kernel_ns, launch_ns, gap_ns;
    /* the host: it launches until `launched` is `kernels`, waits for the device, and pauses */
    uint32_t launched;
    double host_ns; /* rest of the present launch or pause */
    bool pauses;
    uint64_t leaves_at, returns_at; /* between these times the program makes no step */
    bool lies;                      /* its samples say that it has no work */
    double queued_ns;               /* unfinished work on the device */
    /* the devices */
    uint32_t devices;
    bool on[DEVICES];
    /* libvgpu */
    bool idle;
    uint64_t quiet_ns, idle_at, call_at, looked_at, look_at, sample_at, sampled_at, said_at;
    uint32_t said; /* the kind of a message that the arbiter gets at said_at */
    uint64_t said_idle_ns;
    struct channels_load load;
    /* the figures */
    uint64_t steps, worked_ns, off_ns, charged_before_ns;
    double used_ns;
    uint32_t orders;
} programs[MOST];
static unsigned count;
static uint64_t slowness = 1; /* how many times as long as on an H100 driver calls and messages take */
static uint64_t now = BEGIN_NS;
static bool stale;
static bool slices; /* the driver gives time slices */
static const struct program *in_slice;

/* --- what the arbiter's other files do */

static double random_part(void)
{
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (double)(state >> 11) / (double)(1ull << 53);
}

static struct channels_thread {
    struct channels_order *first; /* the thread's waiting orders, without the one that it carries out */
    uint64_t free_at;
} threads[DEVICES];
static struct channels_order *calling; /* the order whose driver call has the driver's lock */
static uint64_t lock_free_at;
static struct channels_order *finished;
static void (*report)(struct channels_order *order);

int channels_open(const char *path, void (*done)(struct channels_order *order))
{
    (void)path;
    report = done;
    return 0;
}

bool channels_device(void)
{
    return true;
}

struct channels_thread *channels_thread_start(void)
{
    static uint32_t started;
    return &threads[started++];
}

static void append(struct channels_order **link, struct channels_order *order)
{
    while (*link != NULL)
        link = &(*link)->next;
    order->next = NULL;
    *link = order;
}

void channels_submit(struct channels_thread *thread, struct channels_order *order)
{
    order->began_ns = now;
    append(&thread->first, order);
    programs[order->processes[0].slot / DEVICES].orders++;
}

void channels_order_free(struct channels_order *order)
{
    for (uint32_t p = 0; p < order->process_count; p++) {
        close(order->processes[p].pidfd);
        free(order->processes[p].groups);
    }
    free(order->processes);
    free(order);
}

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* Gives the driver's lock to one of the threads that wait for it: to the first, or at times to the second. */
static void take_lock(void)
{
    struct channels_thread *next = NULL;
    for (uint32_t d = 0; d < DEVICES; d++)
        if (threads[d].first != NULL && (next == NULL || random_part() < OUT_OF_ORDER))
            next = &threads[d];
    if (next == NULL)
        return;
    calling = next->first;
    next->first = calling->next;
    calling->began_ns = calling->last_began_ns = later(calling->began_ns, next->free_at);
    calling->ended_ns = later(calling->began_ns, lock_free_at) + (calling->off ? OFF_NS : ON_NS);
    calling->first_ended_ns = calling->last_ended_ns = next->free_at = lock_free_at = calling->ended_ns;
    calling->calls = 1;
}

/* Carries out the calls up to now. */
static void run_driver(void)
{
    for (;;) {
        if (calling == NULL)
            take_lock();
        if (calling == NULL || now < (calling->off ? calling->ended_ns - OFF_NS + STOPS_NS : calling->ended_ns))
            break;
        programs[calling->processes[0].slot / DEVICES].on[calling->ordinal] = !calling->off;
        if (now < calling->ended_ns)
            break;
        append(&finished, calling);
        calling = NULL;
    }
    while (finished != NULL && now >= finished->ended_ns + MESSAGE_NS) {
        struct channels_order *order = finished;
        finished = order->next;
        report(order);
        channels_order_free(order);
    }
}

uint64_t channels_check(struct channels_thread *thread, uint64_t at)
{
    (void)thread;
    (void)at;
    return UINT64_MAX;
}

bool channels_barred(uint64_t tenant)
{
    (void)tenant;
    return false;
}

bool channels_read(int usage_fd, uint32_t slot, const uint8_t uuid[16], uint32_t *budget,
                   struct channels_process *process)
{
    (void)usage_fd;
    (void)budget;
    *process = (struct channels_process){.slot = slot, .pidfd = -1, .count = uuid[0] == '0' + slot % DEVICES};
    process->groups = calloc(1, sizeof(process->groups[0]));
    return process->groups != NULL;
}

uint32_t channels_devices(int usage_fd, uint32_t slot, const uint8_t *const uuids[], uint32_t devices, uint32_t *groups)
{
    (void)usage_fd;
    (void)slot;
    (void)uuids;
    (void)devices;
    *groups = 1;
    return 1;
}

void channels_note(unsigned char *usage_map, uint32_t slot, uint32_t ordinal, bool off)
{
    (void)usage_map;
    (void)slot;
    (void)ordinal;
    (void)off;
}

bool channels_load(int usage_fd, uint32_t slot, struct channels_load *load)
{
    (void)usage_fd;
    *load = programs[slot / DEVICES].load;
    load->groups = 1;
    return true;
}

bool channels_uuid(const char *text, uint8_t uuid[16])
{
    memset(uuid, text[strlen(text) - 1], 16);
    return true;
}

unsigned char *usage_io_map(int usage_fd)
{
    static unsigned char map;
    (void)usage_fd;
    return &map;
}

bool rest_afford(struct lease *lease, uint32_t units)
{
    (void)lease;
    (void)units;
    return true;
}

static void say_grant(struct sched_member *member, const struct vgpu_turn *turn)
{
    (void)member;
    (void)turn;
}

static void say_revoke(struct sched_member *member)
{
    (void)member;
}

static const struct sched_messages messages = {.grant = say_grant, .revoke = say_revoke};

static void look_again(void)
{
    stale = true;
}

/* --- a program and its libvgpu */

static bool is_on(const struct program *program)
{
    bool on = true;
    for (uint32_t d = 0; d < program->devices; d++)
        on &= program->on[d];
    return on;
}

static void say(struct program *program, uint32_t kind, uint64_t idle_ns)
{
    program->said = kind;
    program->said_idle_ns = idle_ns;
    program->said_at = now + MESSAGE_NS;
}

/* A driver call of the program. The first one after an idle time tells the arbiter that the tenant wants the device. */
static void call(struct program *program)
{
    program->call_at = now;
    if (!program->idle)
        return;
    uint64_t to = now - program->idle_at < TOO_EARLY_NS ? 2 * program->quiet_ns
                                                        : program->quiet_ns - program->quiet_ns / 16;
    program->quiet_ns = to < QUIET_NS ? QUIET_NS : to < QUIET_MAX_NS ? to : QUIET_MAX_NS;
    program->idle = false;
    program->sampled_at = now;
    program->look_at = now + LOOK_NS;
    say(program, VGPU_MSG_WANT, 0);
}

static bool waits(const struct program *program)
{
    return !program->pauses && program->launched == program->kernels;
}

static void run_host(struct program *program)
{
    double left_ns = STEP_NS;
    while (left_ns > 0) {
        if (waits(program)) {
            if (program->queued_ns > 0)
                return;
            program->steps++;
            program->pauses = true;
            program->call_at = now;
            program->host_ns = 2 * program->gap_ns * random_part();
        }
        if (!program->pauses && program->queued_ns > AHEAD_MOST * program->kernel_ns)
            return;
        double part_ns = program->host_ns < left_ns ? program->host_ns : left_ns;
        program->host_ns -= part_ns;
        left_ns -= part_ns;
        if (program->host_ns > 0)
            return;
        if (program->pauses && now >= program->leaves_at && now < program->returns_at) {
            program->host_ns = (double)(program->returns_at - now);
            return;
        }
        if (program->pauses)
            program->launched = 0;
        else {
            program->launched++;
            program->queued_ns += program->kernel_ns;
        }
        call(program);
        program->pauses = false;
        program->host_ns = program->launched < program->kernels ? program->launch_ns : 0;
    }
}

static void record(struct program *program, bool unfinished, bool waits_on)
{
    uint32_t ms = (uint32_t)((now - program->sampled_at + SAMPLE_NS / 2) / SAMPLE_NS);
    ms = ms < 1 ? 1 : ms;
    program->load.sampled_ms += ms;
    program->load.busy_ms += unfinished ? ms : 0;
    program->load.waiting_ms += waits_on ? ms : 0;
    program->sampled_at = now;
}

/* The work of libvgpu's thread: samples of the load, and whether the program is idle. */
static void run_looks(struct program *program)
{
    bool inside = waits(program) && program->queued_ns > 0;
    bool quiet = !inside && now - program->call_at > LOOK_NS;
    if (program->idle || now < program->look_at)
        return;
    bool same = program->call_at <= program->looked_at;
    program->looked_at = now;
    program->look_at = now + (is_on(program) ? LOOK_NS : LOOK_OFF_NS);
    if (!is_on(program))
        program->sampled_at = now;
    if (is_on(program) && now >= program->sample_at) {
        bool unfinished = (inside || program->queued_ns > MARKER_NS) && !program->lies;
        record(program, unfinished, inside && same && !program->lies);
        program->sample_at = now + (unfinished || quiet ? SAMPLE_NS : SAMPLE_FREE_NS);
    }
    if (inside || program->queued_ns > 0 || now - program->call_at < program->quiet_ns)
        return;
    if (now - program->sampled_at >= SAMPLE_NS / 2)
        record(program, false, false);
    program->idle = true;
    program->idle_at = now;
    say(program, VGPU_MSG_DONE, now - program->call_at);
}

static void hear(struct program *program)
{
    if (program->said == 0 || now < program->said_at)
        return;
    for (uint32_t d = 0; d < program->devices; d++) {
        if (program->said == VGPU_MSG_WANT) {
            sched_want(&program->connections[d].member, 1u << d, now);
        } else {
            cut_note_load(&program->lease, now);
            sched_idle(&program->connections[d].member, program->said_idle_ns, now);
        }
    }
    program->said = 0;
    stale = true;
}

/*
 * The driver's time slices: the program whose slice it is has the device until it has no work or the slice ends. Returns
 * that program, or NULL during a switch.
 */
static const struct program *next_in_slices(void)
{
    static unsigned at;
    static double left_ns;
    bool ready = is_on(&programs[at]) && programs[at].queued_ns > 0;
    left_ns -= STEP_NS;
    if (ready && (left_ns > 0 || count == 1))
        return left_ns > SLICE_NS ? NULL : &programs[at];
    for (unsigned p = 1; p <= count; p++) {
        unsigned next = (at + p) % count;
        if (!is_on(&programs[next]) || programs[next].queued_ns <= 0)
            continue;
        left_ns = next == at ? SLICE_NS : SLICE_NS + SWITCH_NS;
        at = next;
        return left_ns > SLICE_NS ? NULL : &programs[at];
    }
    return NULL;
}

static void run_device(struct program *program, unsigned with_work)
{
    if (program->queued_ns <= 0)
        return;
    program->worked_ns += STEP_NS;
    if (!is_on(program)) {
        program->off_ns += STEP_NS;
        return;
    }
    double part_ns = !slices ? (double)STEP_NS / with_work : program == in_slice ? STEP_NS : 0;
    part_ns = part_ns < program->queued_ns ? part_ns : program->queued_ns;
    program->used_ns += part_ns;
    program->queued_ns -= part_ns;
}

/* --- the run */

static void step(void)
{
    static uint64_t again;
    unsigned with_work = 0;
    run_driver();
    for (unsigned p = 0; p < count; p++)
        hear(&programs[p]);
    stale |= now >= again;
    while (stale) {
        stale = false;
        again = sched_run(now);
        uint64_t cut = cut_follow(now);
        again = cut < again ? cut : again;
    }
    for (unsigned p = 0; p < count; p++)
        with_work += is_on(&programs[p]) && programs[p].queued_ns > 0;
    in_slice = slices ? next_in_slices() : NULL;
    for (unsigned p = 0; p < count; p++) {
        run_device(&programs[p], with_work);
        run_host(&programs[p]);
        run_looks(&programs[p]);
    }
    now += STEP_NS;
}

/* Reads the words of a program. */
static void read_program(struct program *program, char **words)
{
    char *at = strchr(words[0], '@');
    if (at != NULL) {
        program->leaves_at = BEGIN_NS + strtoull(at + 1, &at, 10) * 1000000;
        program->returns_at = BEGIN_NS + strtoull(at + 1, NULL, 10) * 1000000;
        program->pauses = true;
    }
    program->lies = strchr(words[0], '!') != NULL;
    program->kernels = (uint32_t)strtoul(words[1], NULL, 10);
    program->kernel_ns = atof(words[2]) * 1000;
    program->launch_ns = atof(words[3]) * 1000;
    program->gap_ns = atof(words[4]) * 1000;
    if (program->kernels == 0) {
        program->kernels = 1;
        program->kernel_ns = at != NULL ? RETURNS_KERNEL_NS : 1e18;
    }
    for (uint32_t d = 0; d < DEVICES; d++)
        program->on[d] = true;
    program->quiet_ns = QUIET_NS;
    program->sampled_at = BEGIN_NS;
}

static bool join(char **words)
{
    struct program *program = &programs[count];
    struct sched_tenant *tenant = &program->lease.tenant;
    char *share = strchr(words[0], ':');
    struct sched_limits limits = {share != NULL ? (uint32_t)(atof(share + 1) * 100) : 0, VGPU_SHARE_WORK_CONSERVING, 0};
    if (strncmp(words[0], "hard", 4) == 0)
        limits.policy = VGPU_SHARE_HARD;
    if (strncmp(words[0], "none", 4) == 0)
        limits.policy = VGPU_SHARE_NONE;
    read_program(program, words);
    program->devices = strchr(words[0], '/') != NULL ? (uint32_t)atoi(strchr(words[0], '/') + 1) : 1;
    if (!sched_tenant_add(tenant, program->devices, uuids))
        return false;
    for (uint32_t d = 0; d < program->devices; d++)
        sched_set_limits(tenant, d, &limits);
    cut_lease_add(&program->lease);
    for (uint32_t d = 0; d < program->devices; d++) {
        struct connection *connection = &program->connections[d];
        uint32_t slot = count * DEVICES + d;
        program->processes[d] = (struct process){.slot = slot, .pidfd = {.fd = STDIN_FILENO}};
        program->processes[d].next = program->lease.processes;
        program->lease.processes = &program->processes[d];
        *connection = (struct connection){.joined = true, .slot = slot, .next = program->lease.connections};
        program->lease.connections = connection;
        sched_member_add(tenant, &connection->member, now);
        connection->member.cut = program->lease.cut_entities != NULL;
    }
    cut_lease_stale(&program->lease);
    for (uint32_t d = 0; d < program->devices; d++)
        sched_want(&program->connections[d].member, 1u << d, now);
    count++;
    return program->lease.cut_entities != NULL;
}

/* Makes a run folder whose file gives the device the engine cut. */
static int run_folder(void)
{
    char folder[] = "/tmp/sched-cut.XXXXXX";
    char path[80];
    if (mkdtemp(folder) == NULL)
        return -1;
    int fd = open(folder, O_RDONLY | O_DIRECTORY);
    mkdirat(fd, "engines", 0700);
    bool said = true;
    for (uint32_t d = 0; d < DEVICES; d++) {
        snprintf(path, sizeof(path), "engines/%.63s", uuids[d]);
        int engine = openat(fd, path, O_WRONLY | O_CREAT, 0600);
        said &= write(engine, "cut\n", 4) == 4;
        close(engine);
    }
    return said ? fd : -1;
}

static void forget_folder(int fd)
{
    char link[40];
    char folder[64] = "";
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    for (uint32_t d = 0; d < DEVICES; d++) {
        char path[80];
        snprintf(path, sizeof(path), "engines/%.63s", uuids[d]);
        unlinkat(fd, path, 0);
    }
    unlinkat(fd, "engines", AT_REMOVEDIR);
    if (readlink(link, folder, sizeof(folder) - 1) > 0)
        rmdir(folder);
}

static void print_figures(struct program *of)
{
    double worked_ns = of->worked_ns > 0 ? (double)of->worked_ns : 1;
    uint64_t charged_ns = of->lease.tenant.entities[0]->count.used_ns - of->charged_before_ns;
    printf("%.2f %.2f %.2f %.2f %u\n", (double)of->steps * 1e9 / LENGTH_NS, of->used_ns * 100 / LENGTH_NS,
           (double)charged_ns * 100 / LENGTH_NS, (double)of->off_ns * 100 / worked_ns, of->orders);
}

int main(int argc, char **argv)
{
    int folder = run_folder();
    sched_open(&messages);
    if (folder < 0 || cut_open(folder, "", look_again) != 0)
        return 1;
    slowness = argc > 1 && strcmp(argv[1], "slow") == 0 ? 2 : 1;
    slices = argc > 1 && strcmp(argv[1], "sliced") == 0;
    for (int word = slices ? 2 : (int)slowness; word + WORDS <= argc && count < MOST; word += WORDS)
        if (!join(argv + word))
            return 1;
    forget_folder(folder);
    for (uint64_t end = now + WARM_NS; now < end;)
        step();
    for (unsigned p = 0; p < count; p++) {
        struct program *program = &programs[p];
        program->charged_before_ns = program->lease.tenant.entities[0]->count.used_ns;
        program->steps = program->worked_ns = program->off_ns = program->orders = 0;
        program->used_ns = 0;
    }
    for (uint64_t end = now + LENGTH_NS; now < end;)
        step();
    for (unsigned p = 0; p < count; p++)
        print_figures(&programs[p]);
    return 0;
}
