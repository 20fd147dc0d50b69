/*
 * table.h: live allocations by handle. A hash table in shards, each with its own mutex: a hundred
 * thousand live allocations cost what one does, and threads seldom meet.
 */
#ifndef VGPU_TABLE_H
#define VGPU_TABLE_H

#include <stdbool.h>
#include <stdint.h>

/* Handles of different kinds may have equal values, so the kind is part of the key. */
enum vgpu_kind {
    VGPU_KIND_NONE, /* an empty bucket */
    VGPU_KIND_POINTER,
    VGPU_KIND_MANAGED, /* a pointer whose bytes NVML does not show with the process */
    VGPU_KIND_PAGE,    /* a page that small allocations share; count: how many */
    VGPU_KIND_ARRAY,
    VGPU_KIND_MIPMAP,
    VGPU_KIND_HANDLE,    /* a cuMemCreate handle; owner: its block */
    VGPU_KIND_MAPPING,   /* a cuMemMap address; owner: its block */
    VGPU_KIND_POOL,      /* a memory pool; owner: what is known of it */
    VGPU_KIND_EVICTABLE, /* a pointer to memory that can leave the card; owner: its struct vgpu_allocation */
    VGPU_KIND_GRAPH,     /* an executable graph that allocates; bytes: the most that it can add */
};

struct vgpu_entry {
    uint64_t key;
    uint64_t bytes;
    void *owner;    /* the context whose end frees the memory, or as the kind says */
    uint8_t kind;   /* enum vgpu_kind */
    int8_t device;  /* index in the lease */
    uint32_t count; /* of VGPU_KIND_PAGE */
};

/*
 * The driver takes memory from the card in pages of 2 MiB. A request above 1 MiB has pages of its own; smaller requests
 * share a page, which is freed with the last of them (measured on an H200, driver 580).
 */
#define VGPU_PAGE_BYTES (2u << 20)
#define VGPU_SHARED_MAX (1u << 20)

/* All functions are thread-safe. put replaces an entry of the same kind and key; false: out of memory. */
bool vgpu_table_put(const struct vgpu_entry *entry);
bool vgpu_table_get(enum vgpu_kind kind, uint64_t key, struct vgpu_entry *entry);
bool vgpu_table_take(enum vgpu_kind kind, uint64_t key, struct vgpu_entry *entry);

/* As put, for a small allocation (VGPU_KIND_POINTER): it is counted in its page, too. *first: the page is new. */
bool vgpu_table_put_in_page(const struct vgpu_entry *entry, bool *first);

/* Removes one allocation from the page of `pointer`; true if it was the last: *page is the page's entry. */
bool vgpu_table_leave_page(uint64_t pointer, struct vgpu_entry *page);

/* The entry of this kind whose `bytes` from its key on hold `address`. Looks at all entries: for rare calls. */
bool vgpu_table_holding(enum vgpu_kind kind, uint64_t address, struct vgpu_entry *entry);

/* Removes every entry that `match` says; `match` must not call into the table. */
void vgpu_table_purge(bool (*match)(const struct vgpu_entry *entry, void *argument), void *argument);

/* Entries of all kinds. */
uint64_t vgpu_table_count(void);

/* In a forked child: forgets everything (the parent's arrays stay as garbage: a lock may be held). */
void vgpu_table_reset(void);

#endif
