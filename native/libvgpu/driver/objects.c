#include "objects.h"

#include <link.h>
#include <stddef.h>
#include <stdint.h>

struct vgpu_object {
    const struct dl_phdr_info *info;
    const ElfW(Sym) * symbols;
    const char *strings;
    const uint32_t *gnu_hash;
    const uint32_t *sysv_hash;
};

struct walk {
    vgpu_object_visit visit;
    void *argument;
};

/*
 * Returns the address that an entry of the dynamic section means. glibc relocates these entries in place, except in
 * objects whose dynamic section is read-only (the vdso).
 */
static const void *dynamic_pointer(ElfW(Addr) base, ElfW(Addr) value)
{
    return (const void *)(value < base ? base + value : value);
}

static void read_dynamic(struct vgpu_object *object, const ElfW(Dyn) * entry, ElfW(Addr) base)
{
    for (; entry->d_tag != DT_NULL; entry++) {
        const void *pointer = dynamic_pointer(base, entry->d_un.d_ptr);
        if (entry->d_tag == DT_SYMTAB)
            object->symbols = pointer;
        else if (entry->d_tag == DT_STRTAB)
            object->strings = pointer;
        else if (entry->d_tag == DT_GNU_HASH)
            object->gnu_hash = pointer;
        else if (entry->d_tag == DT_HASH)
            object->sysv_hash = pointer;
    }
}

static int visit_object(struct dl_phdr_info *info, size_t size, void *argument)
{
    struct walk *walk = argument;
    struct vgpu_object object = {.info = info};
    (void)size;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
            read_dynamic(&object, (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr), info->dlpi_addr);
    return walk->visit(&object, walk->argument);
}

void vgpu_objects_walk(vgpu_object_visit visit, void *argument)
{
    struct walk walk = {.visit = visit, .argument = argument};
    dl_iterate_phdr(visit_object, &walk);
}

bool vgpu_object_holds(const struct vgpu_object *object, const void *address)
{
    for (int i = 0; i < object->info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &object->info->dlpi_phdr[i];
        uintptr_t start = object->info->dlpi_addr + header->p_vaddr;
        if (header->p_type == PT_LOAD && (uintptr_t)address - start < header->p_memsz)
            return true;
    }
    return false;
}

static void *definition(const struct vgpu_object *object, const ElfW(Sym) * symbol, const char *name)
{
    if (symbol->st_shndx == SHN_UNDEF || !vgpu_same(object->strings + symbol->st_name, name))
        return NULL;
    return (void *)(object->info->dlpi_addr + symbol->st_value);
}

static void *find_gnu(const struct vgpu_object *object, const char *name)
{
    const uint32_t *table = object->gnu_hash;
    uint32_t buckets = table[0];
    uint32_t first = table[1];
    const ElfW(Addr) *bloom = (const ElfW(Addr) *)&table[4];
    const uint32_t *bucket = (const uint32_t *)&bloom[table[2]];
    const uint32_t *chain = bucket + buckets;
    uint32_t hash = 5381;
    for (const unsigned char *c = (const unsigned char *)name; *c != '\0'; c++)
        hash = hash * 33 + *c;
    uint32_t index = buckets == 0 ? 0 : bucket[hash % buckets];
    if (index < first)
        return NULL;
    for (;; index++) {
        uint32_t link = chain[index - first];
        if ((link | 1) == (hash | 1)) {
            void *found = definition(object, &object->symbols[index], name);
            if (found != NULL)
                return found;
        }
        if (link & 1)
            return NULL;
    }
}

static void *find_sysv(const struct vgpu_object *object, const char *name)
{
    uint32_t count = object->sysv_hash[1]; /* nchain is the number of symbols */
    for (uint32_t i = 0; i < count; i++) {
        void *found = definition(object, &object->symbols[i], name);
        if (found != NULL)
            return found;
    }
    return NULL;
}

void *vgpu_object_symbol(const struct vgpu_object *object, const char *name)
{
    if (object->symbols == NULL || object->strings == NULL)
        return NULL;
    if (object->gnu_hash != NULL)
        return find_gnu(object, name);
    return object->sysv_hash != NULL ? find_sysv(object, name) : NULL;
}

/*
 * Returns the number of symbols. The symbol table does not contain it, but a hash table does. In the GNU hash table,
 * the chain of the bucket with the highest index ends with the last symbol.
 */
static uint32_t symbol_count(const struct vgpu_object *object)
{
    if (object->sysv_hash != NULL)
        return object->sysv_hash[1];
    if (object->gnu_hash == NULL)
        return 0;
    const uint32_t *table = object->gnu_hash;
    const uint32_t *bucket = (const uint32_t *)&((const ElfW(Addr) *)&table[4])[table[2]];
    const uint32_t *chain = bucket + table[0];
    uint32_t last = 0;
    for (uint32_t i = 0; i < table[0]; i++)
        last = bucket[i] > last ? bucket[i] : last;
    if (last < table[1])
        return 0;
    while ((chain[last - table[1]] & 1) == 0)
        last++;
    return last + 1;
}

void vgpu_object_functions(const struct vgpu_object *object, void (*visit)(const char *name, void *argument),
                           void *argument)
{
    uint32_t count = object->symbols != NULL && object->strings != NULL ? symbol_count(object) : 0;
    for (uint32_t i = 0; i < count; i++) {
        const ElfW(Sym) *symbol = &object->symbols[i];
        if (symbol->st_shndx != SHN_UNDEF && ELF64_ST_TYPE(symbol->st_info) == STT_FUNC)
            visit(object->strings + symbol->st_name, argument);
    }
}
