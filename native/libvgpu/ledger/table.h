/*
 * table.h: live allocations by handle. A hash table in shards, each with its own mutex: the cost does not grow with the
 * number of live allocations, and threads seldom use the same shard.
 */
#ifndef VGPU_TABLE_H
#define VGPU_TABLE_H

#include <stdbool.h>
#include <stdint.h>

/* Handles of different kinds may have equal values, so the kind is part of the key. */
enum vgpu_kind {
    VGPU_KIND_NONE, /* marks an empty bucket */
    VGPU_KIND_POINTER,
    VGPU_KIND_MANAGED, /* a pointer whose bytes NVML does not list for the process */
    VGPU_KIND_PAGE,    /* a page that small allocations of one context share; count is their number */
    VGPU_KIND_ARRAY,
    VGPU_KIND_MIPMAP,
    VGPU_KIND_HANDLE,    /* a handle of cuMemCreate; owner is its block */
    VGPU_KIND_MAPPING,   /* an address of cuMemMap; owner is its block */
    VGPU_KIND_POOL,      /* a memory pool; owner is its record */
    VGPU_KIND_EVICTABLE, /* a pointer to memory that can leave the card; owner is its struct vgpu_allocation */
    VGPU_KIND_GRAPH,     /* an executable graph that allocates; bytes is the most that it can add */
};

struct vgpu_entry {
    uint64_t key;
    uint64_t bytes;
    void *owner;    /* the context whose end frees the memory, or what the kind says */
    uint8_t kind;   /* enum vgpu_kind */
    int8_t device;  /* index of the device in the lease */
    uint32_t count; /* number of small allocations in the page; only for VGPU_KIND_PAGE */
};

/*
 * The driver takes memory from the card in pages of 2 MiB. A request above 1 MiB has separate pages. Smaller requests
 * share a page, which is freed with the last of them (measured on an H200, driver 580). A page belongs to one context,
 * as a context's address space does (assumed). A page is therefore known by its owner, too: while an ended context's
 * entries wait for their removal, a new page at the same address is a new entry with its own charge.
 */
#define VGPU_PAGE_BYTES (2u << 20)
#define VGPU_SHARED_MAX (1u << 20)

/*
 * All functions of this file are thread-safe. put stores an entry, in place of one with the same kind and key; it
 * returns false if memory is short. get copies an entry, and take also removes it; they return false if there is none.
 */
bool vgpu_table_put(const struct vgpu_entry *entry);
bool vgpu_table_get(enum vgpu_kind kind, uint64_t key, struct vgpu_entry *entry);
bool vgpu_table_take(enum vgpu_kind kind, uint64_t key, struct vgpu_entry *entry);

/* As put, for a small allocation (VGPU_KIND_POINTER), which is also counted in its page. *first: the page is new. */
bool vgpu_table_put_in_page(const struct vgpu_entry *entry, bool *first);

/*
 * Removes the small allocation `entry` from the count of its page. Returns true if it was the last; *page is then the
 * page's entry.
 */
bool vgpu_table_leave_page(const struct vgpu_entry *entry, struct vgpu_entry *page);

/*
 * Finds the entry of this kind whose `bytes`, from its key on, contain `address`. It searches all entries, so it is for
 * rare calls.
 */
bool vgpu_table_holding(enum vgpu_kind kind, uint64_t address, struct vgpu_entry *entry);

/* Removes every entry for which `match` returns true. `match` must not call functions of the table. */
void vgpu_table_purge(bool (*match)(const struct vgpu_entry *entry, void *argument), void *argument);

/* Returns the number of entries of all kinds. */
uint64_t vgpu_table_count(void);

#endif
