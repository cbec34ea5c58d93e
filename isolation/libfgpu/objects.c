#include "objects.h"

#include <link.h>
#include <stdatomic.h>
#include <stddef.h>

/* ---- One object ---- */

/* The loader has relocated the addresses in most dynamic sections, but not in read-only ones. */
static const void *pointer_of(const struct fgpu_object *object, ElfW(Addr) address) {
    return (const void *)(address >= object->base ? address : address + object->base);
}

static const ElfW(Dyn) *entry_of(const struct fgpu_object *object, ElfW(Sxword) tag) {
    for (const ElfW(Dyn) *entry = object->dynamic; entry->d_tag != DT_NULL; entry++)
        if (entry->d_tag == tag)
            return entry;
    return NULL;
}

static const void *table_of(const struct fgpu_object *object, ElfW(Sxword) tag) {
    const ElfW(Dyn) *entry = entry_of(object, tag);
    return entry == NULL ? NULL : pointer_of(object, entry->d_un.d_ptr);
}

static const char *soname_of(const struct fgpu_object *object) {
    const ElfW(Dyn) *name = entry_of(object, DT_SONAME);
    const char *strings = table_of(object, DT_STRTAB);
    return name == NULL || strings == NULL ? "" : strings + name->d_un.d_val;
}

static bool read_object(const struct dl_phdr_info *info, struct fgpu_object *out) {
    *out = (struct fgpu_object){.base = info->dlpi_addr, .start = UINTPTR_MAX, .path = info->dlpi_name, .name = ""};
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &info->dlpi_phdr[i];
        uintptr_t start = out->base + segment->p_vaddr;
        if (segment->p_type == PT_DYNAMIC)
            out->dynamic = (const void *)start;
        if (segment->p_type != PT_LOAD)
            continue;
        if (start < out->start)
            out->start = start;
        if (start + segment->p_memsz > out->end)
            out->end = start + segment->p_memsz;
    }
    if (out->dynamic == NULL)
        return false;
    out->name = soname_of(out);
    return true;
}

/* ---- Its symbols ---- */

struct symbols {
    const ElfW(Sym) *symbols;
    const char *strings;
    const ElfW(Half) *versions;
};

/* 0: another name; 1: this name in an old version, for old programs; 2: the version that programs get today. */
static int quality(const struct symbols *table, uint32_t index, const char *name) {
    const ElfW(Sym) *symbol = &table->symbols[index];
    if (symbol->st_shndx == SHN_UNDEF || symbol->st_value == 0 || (symbol->st_info & 0xf) != STT_FUNC ||
        !fgpu_same(table->strings + symbol->st_name, name))
        return 0;
    return table->versions != NULL && (table->versions[index] & 0x8000) ? 1 : 2;
}

static uint32_t gnu_hash(const char *name) {
    uint32_t hash = 5381;
    for (; *name; name++)
        hash = hash * 33 + (unsigned char)*name;
    return hash;
}

static uint32_t find_by_gnu_hash(const struct symbols *table, const uint32_t *header, const char *name) {
    uint32_t buckets = header[0], first = header[1], bloom_words = header[2], hash = gnu_hash(name), found = 0;
    const uint32_t *bucket = header + 4 + bloom_words * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
    const uint32_t *chain = bucket + buckets;
    uint32_t index = buckets == 0 ? 0 : bucket[hash % buckets];
    for (; index >= first && index != 0; index++) {
        if ((chain[index - first] | 1) == (hash | 1)) {
            int better = quality(table, index, name);
            if (better == 2)
                return index;
            if (better == 1 && found == 0)
                found = index;
        }
        if (chain[index - first] & 1)
            break;
    }
    return found;
}

/* A table of the old kind has no end mark, so all symbols are counted; a linear search is fast enough here. */
static uint32_t find_by_count(const struct symbols *table, const uint32_t *header, const char *name) {
    uint32_t found = 0;
    for (uint32_t index = 1; index < header[1]; index++) {
        int better = quality(table, index, name);
        if (better == 2)
            return index;
        if (better == 1 && found == 0)
            found = index;
    }
    return found;
}

void *fgpu_object_function(const struct fgpu_object *object, const char *name) {
    struct symbols table = {table_of(object, DT_SYMTAB), table_of(object, DT_STRTAB), table_of(object, DT_VERSYM)};
    if (table.symbols == NULL || table.strings == NULL)
        return NULL;
    const uint32_t *gnu = table_of(object, DT_GNU_HASH), *old = table_of(object, DT_HASH);
    uint32_t index = gnu ? find_by_gnu_hash(&table, gnu, name) : old ? find_by_count(&table, old, name) : 0;
    return index == 0 ? NULL : (void *)(object->base + table.symbols[index].st_value);
}

/* ---- All of them ---- */

/* The loader's list without its lock: used for libc, which is never unloaded, and first called with a single thread. */
void *fgpu_function_of(const char *name, const char *function) {
    for (const struct link_map *each = _r_debug.r_map; each != NULL; each = each->l_next) {
        struct fgpu_object object = {.base = each->l_addr, .dynamic = each->l_ld, .path = each->l_name};
        if (object.dynamic != NULL && fgpu_same(soname_of(&object), name))
            return fgpu_object_function(&object, function);
    }
    return NULL;
}

typedef int (*iterate_function)(int (*)(struct dl_phdr_info *, size_t, void *), void *);

/* libc's own, even if another object defines this name. */
static int iterate(int (*visit)(struct dl_phdr_info *, size_t, void *), void *data) {
    static _Atomic(void *) place;
    void *found = atomic_load_explicit(&place, memory_order_acquire);
    if (found == NULL) {
        found = fgpu_function_of("libc.so.6", "dl_iterate_phdr");
        atomic_store_explicit(&place, found, memory_order_release);
    }
    return found == NULL ? 0 : ((iterate_function)found)(visit, data);
}

struct search {
    const char *name;
    uintptr_t address;
    bool passed; /* the object with the address */
    void *found;
    struct fgpu_object *out;
};

static bool contains(const struct fgpu_object *object, uintptr_t address) {
    return address >= object->start && address < object->end;
}

static int has_address(struct dl_phdr_info *info, size_t size, void *data) {
    struct search *search = data;
    (void)size;
    return read_object(info, search->out) && contains(search->out, search->address);
}

bool fgpu_object_at(uintptr_t address, struct fgpu_object *out) {
    struct search search = {.address = address, .out = out};
    return iterate(has_address, &search) != 0;
}

static int has_name(struct dl_phdr_info *info, size_t size, void *data) {
    struct search *search = data;
    (void)size;
    return read_object(info, search->out) && fgpu_same(search->out->name, search->name);
}

bool fgpu_object_named(const char *name, struct fgpu_object *out) {
    struct search search = {.name = name, .out = out};
    return iterate(has_name, &search) != 0;
}

static int is_after(struct dl_phdr_info *info, size_t size, void *data) {
    struct search *search = data;
    (void)size;
    if (!read_object(info, search->out))
        return 0;
    if (search->passed && !contains(search->out, (uintptr_t)&fgpu_function_after))
        search->found = fgpu_object_function(search->out, search->name);
    search->passed |= contains(search->out, search->address);
    return search->found != NULL;
}

void *fgpu_function_after(uintptr_t address, const char *name, struct fgpu_object *out) {
    struct search search = {.name = name, .address = address, .out = out};
    iterate(is_after, &search);
    return search.found;
}

struct visit {
    uintptr_t address;
    int (*visit)(const struct fgpu_object *, void *);
    void *data;
    bool after_program, reached;
};

static int is_before(struct dl_phdr_info *info, size_t size, void *data) {
    struct visit *visit = data;
    struct fgpu_object object;
    (void)size;
    bool program = !visit->after_program;
    visit->after_program = true; /* the program is the first one */
    if (!read_object(info, &object))
        return 0;
    visit->reached = contains(&object, visit->address);
    return visit->reached ? 1 : program ? 0 : visit->visit(&object, visit->data);
}

int fgpu_objects_before(uintptr_t address, int (*visit)(const struct fgpu_object *, void *), void *data) {
    struct visit each = {.address = address, .visit = visit, .data = data};
    int result = iterate(is_before, &each);
    return each.reached ? 0 : result;
}
