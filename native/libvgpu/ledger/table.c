#include "table.h"
#include "in_child.h"
#include "invariant.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define SHARD_BITS 4
#define SHARDS (1u << SHARD_BITS)
#define CAPACITY_MIN 64u /* initial number of buckets of a shard, a power of two */

struct shard {
    pthread_mutex_t mutex;
    struct vgpu_entry *buckets; /* buckets, with open addressing and linear probing */
    uint64_t capacity;
    uint64_t count;
} __attribute__((aligned(64)));

static struct shard shards[SHARDS] = {[0 ... SHARDS - 1] = {.mutex = PTHREAD_MUTEX_INITIALIZER}};

static uint64_t hash(uint32_t kind, uint64_t key)
{
    uint64_t x = (key ^ (uint64_t)kind << 57) * 0x9e3779b97f4a7c15u; /* Fibonacci hashing of key and kind */
    return x ^ x >> 29;
}

/* Returns the shard of an entry. A pointer is in the shard of its page, so that both are found under one lock. */
static struct shard *shard_of(uint32_t kind, uint64_t key)
{
    uint64_t hashed = kind == VGPU_KIND_POINTER ? hash(VGPU_KIND_PAGE, key / VGPU_PAGE_BYTES) : hash(kind, key);
    return &shards[hashed >> (64 - SHARD_BITS)];
}

static bool is(const struct vgpu_entry *entry, uint32_t kind, uint64_t key, const void *owner)
{
    return entry->kind == kind && entry->key == key && (kind != VGPU_KIND_PAGE || entry->owner == owner);
}

/*
 * Returns the entry's bucket, or the empty bucket into which it would go. A page is known by its owner, too; for other
 * kinds `owner` is not looked at.
 */
static uint64_t find(const struct shard *shard, uint32_t kind, uint64_t key, const void *owner)
{
    uint64_t mask = shard->capacity - 1;
    uint64_t i = hash(kind, key) & mask;
    while (shard->buckets[i].kind != VGPU_KIND_NONE && !is(&shard->buckets[i], kind, key, owner))
        i = (i + 1) & mask;
    return i;
}

static bool grow(struct shard *shard)
{
    struct shard bigger = {.capacity = shard->capacity != 0 ? shard->capacity * 2 : CAPACITY_MIN};
    bigger.buckets = calloc(bigger.capacity, sizeof(*bigger.buckets));
    if (bigger.buckets == NULL)
        return false;
    for (uint64_t i = 0; i < shard->capacity; i++) {
        const struct vgpu_entry *entry = &shard->buckets[i];
        if (entry->kind != VGPU_KIND_NONE)
            bigger.buckets[find(&bigger, entry->kind, entry->key, entry->owner)] = *entry;
    }
    free(shard->buckets);
    shard->buckets = bigger.buckets;
    shard->capacity = bigger.capacity;
    return true;
}

/* Empties bucket i and moves later entries of the same run up, so that no deleted markers accumulate. */
static void empty(struct shard *shard, uint64_t i)
{
    uint64_t mask = shard->capacity - 1;
    uint64_t hole = i;
    for (uint64_t j = (i + 1) & mask; shard->buckets[j].kind != VGPU_KIND_NONE; j = (j + 1) & mask) {
        uint64_t home = hash(shard->buckets[j].kind, shard->buckets[j].key) & mask;
        if (((j - home) & mask) >= ((j - hole) & mask)) {
            shard->buckets[hole] = shard->buckets[j];
            hole = j;
        }
    }
    shard->buckets[hole].kind = VGPU_KIND_NONE;
    VGPU_ASSERT(shard->count > 0);
    __atomic_store_n(&shard->count, shard->count - 1, __ATOMIC_RELAXED);
}

static bool has_room(struct shard *shard, uint64_t entries)
{
    return (shard->count + entries) * 4 <= shard->capacity * 3 || grow(shard);
}

static void store(struct shard *shard, const struct vgpu_entry *entry)
{
    uint64_t i = find(shard, entry->kind, entry->key, entry->owner);
    if (shard->buckets[i].kind == VGPU_KIND_NONE)
        __atomic_store_n(&shard->count, shard->count + 1, __ATOMIC_RELAXED);
    shard->buckets[i] = *entry;
    VGPU_ASSERT(shard->count < shard->capacity); /* a search ends at an empty bucket, so there must be one */
}

bool vgpu_table_put(const struct vgpu_entry *entry)
{
    struct shard *shard = shard_of(entry->kind, entry->key);
    pthread_mutex_lock(&shard->mutex);
    bool stored = has_room(shard, 1);
    if (stored)
        store(shard, entry);
    pthread_mutex_unlock(&shard->mutex);
    return stored;
}

bool vgpu_table_put_in_page(const struct vgpu_entry *entry, bool *first)
{
    struct vgpu_entry page = {.kind = VGPU_KIND_PAGE,
                              .key = entry->key / VGPU_PAGE_BYTES,
                              .bytes = VGPU_PAGE_BYTES,
                              .owner = entry->owner,
                              .device = entry->device,
                              .count = 1};
    struct shard *shard = shard_of(entry->kind, entry->key);
    pthread_mutex_lock(&shard->mutex);
    bool stored = has_room(shard, 2);
    if (stored) {
        struct vgpu_entry *known = &shard->buckets[find(shard, page.kind, page.key, page.owner)];
        *first = known->kind == VGPU_KIND_NONE;
        if (*first)
            store(shard, &page);
        else
            known->count++;
        store(shard, entry);
    }
    pthread_mutex_unlock(&shard->mutex);
    return stored;
}

bool vgpu_table_leave_page(const struct vgpu_entry *entry, struct vgpu_entry *page)
{
    uint64_t key = entry->key / VGPU_PAGE_BYTES;
    struct shard *shard = shard_of(VGPU_KIND_PAGE, key);
    bool last = false;
    pthread_mutex_lock(&shard->mutex);
    if (shard->count > 0) {
        uint64_t i = find(shard, VGPU_KIND_PAGE, key, entry->owner);
        last = shard->buckets[i].kind != VGPU_KIND_NONE && --shard->buckets[i].count == 0;
        if (last) {
            *page = shard->buckets[i];
            empty(shard, i);
        }
    }
    pthread_mutex_unlock(&shard->mutex);
    return last;
}

/* Not inlined, so that a search in an empty shard saves no registers. */
static __attribute__((noinline)) bool look_up(struct shard *shard, enum vgpu_kind kind, uint64_t key,
                                              struct vgpu_entry *entry, bool remove)
{
    bool found = false;
    pthread_mutex_lock(&shard->mutex);
    if (shard->count > 0) {
        uint64_t i = find(shard, kind, key, NULL);
        found = shard->buckets[i].kind != VGPU_KIND_NONE;
        if (found) {
            *entry = shard->buckets[i];
            if (remove)
                empty(shard, i);
        }
    }
    pthread_mutex_unlock(&shard->mutex);
    return found;
}

/* Reads the count without the lock: an entry that this thread itself has added is visible to it. */
static bool is_empty(const struct shard *shard)
{
    return __atomic_load_n(&shard->count, __ATOMIC_RELAXED) == 0;
}

bool vgpu_table_get(enum vgpu_kind kind, uint64_t key, struct vgpu_entry *entry)
{
    struct shard *shard = shard_of(kind, key);
    return !is_empty(shard) && look_up(shard, kind, key, entry, false);
}

bool vgpu_table_take(enum vgpu_kind kind, uint64_t key, struct vgpu_entry *entry)
{
    struct shard *shard = shard_of(kind, key);
    return !is_empty(shard) && look_up(shard, kind, key, entry, true);
}

static bool holds(const struct vgpu_entry *entry, enum vgpu_kind kind, uint64_t address)
{
    return entry->kind == kind && entry->key <= address && address - entry->key < entry->bytes;
}

bool vgpu_table_holding(enum vgpu_kind kind, uint64_t address, struct vgpu_entry *entry)
{
    bool found = false;
    for (unsigned s = 0; s < SHARDS && !found; s++) {
        pthread_mutex_lock(&shards[s].mutex);
        for (uint64_t i = 0; i < shards[s].capacity && !found; i++) {
            found = holds(&shards[s].buckets[i], kind, address);
            if (found)
                *entry = shards[s].buckets[i];
        }
        pthread_mutex_unlock(&shards[s].mutex);
    }
    return found;
}

static void purge_shard(struct shard *shard, bool (*match)(const struct vgpu_entry *, void *), void *argument)
{
    /*
     * Entries that move back may come to bucket i again or, wrapping around, be seen twice. Both are harmless, because
     * `match` is asked once for each entry that is then removed.
     */
    for (uint64_t i = 0; i < shard->capacity;) {
        if (shard->buckets[i].kind != VGPU_KIND_NONE && match(&shard->buckets[i], argument))
            empty(shard, i);
        else
            i++;
    }
}

void vgpu_table_purge(bool (*match)(const struct vgpu_entry *entry, void *argument), void *argument)
{
    for (unsigned s = 0; s < SHARDS; s++) {
        pthread_mutex_lock(&shards[s].mutex);
        purge_shard(&shards[s], match, argument);
        pthread_mutex_unlock(&shards[s].mutex);
    }
}

uint64_t vgpu_table_count(void)
{
    uint64_t count = 0;
    for (unsigned s = 0; s < SHARDS; s++) {
        pthread_mutex_lock(&shards[s].mutex);
        count += shards[s].count;
        pthread_mutex_unlock(&shards[s].mutex);
    }
    return count;
}

static void reset(void)
{
    for (unsigned s = 0; s < SHARDS; s++) {
        pthread_mutex_init(&shards[s].mutex, NULL);
        shards[s].buckets = NULL;
        shards[s].capacity = 0;
        shards[s].count = 0;
    }
}
VGPU_IN_CHILD(reset);
