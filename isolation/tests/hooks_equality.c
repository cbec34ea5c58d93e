/* Asks a driver for every function that it exports, in every version and both stream modes, and prints where the
 * answers lie. cuGetProcAddress needs no GPU.
 *
 *     hooks_equality LIBRARY < names      "name version flags OFFSET" if the answer is in the library's file, else
 *                                         "name version flags FILE"; the offsets are those of `nm -D` */
#include "cuda_abi.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const int versions[] = {2000,  2010,  2020,  3000,  3020,  4000,  4010,  5000,  5050,  6000,  6050,  7000,
                               7050,  8000,  9000,  9020,  10000, 10010, 10020, 11000, 11010, 11020, 11030, 11040,
                               11050, 11060, 11070, 11080, 12000, 12010, 12020, 12030, 12040, 12050, 12060, 12080,
                               12090, 13000, 13010, 13020, 13040};

struct search {
    ElfW(Addr) address, base;
    const char *name;
};

static int contains(struct dl_phdr_info *object, size_t size, void *data) {
    struct search *search = data;
    (void)size;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &object->dlpi_phdr[i];
        if (segment->p_type == PT_LOAD && search->address - object->dlpi_addr - segment->p_vaddr < segment->p_memsz) {
            search->base = object->dlpi_addr;
            search->name = object->dlpi_name;
            return 1;
        }
    }
    return 0;
}

static const char *file_of(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

int main(int count, char **arguments) {
    void *library = count > 1 ? dlopen(arguments[1], RTLD_NOW) : NULL;
    __typeof__(&cuGetProcAddress_v2) ask = NULL;
    if (library != NULL)
        ask = (__typeof__(&cuGetProcAddress_v2))dlsym(library, "cuGetProcAddress_v2");
    if (ask == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    char name[256];
    while (scanf("%255s", name) == 1) {
        for (size_t i = 0; i < sizeof versions / sizeof *versions; i++) {
            for (cuuint64_t flags = 0; flags <= 2; flags++) {
                struct search search = {0};
                void *found = NULL;
                if (ask(name, &found, versions[i], flags, NULL) != CUDA_SUCCESS || found == NULL)
                    continue;
                search.address = (ElfW(Addr))found;
                if (!dl_iterate_phdr(contains, &search))
                    printf("%s %d %d nowhere\n", name, versions[i], (int)flags);
                else if (strncmp(file_of(search.name), "libcuda", 7) == 0)
                    printf("%s %d %d %lx\n", name, versions[i], (int)flags, (unsigned long)(search.address - search.base));
                else
                    printf("%s %d %d %s\n", name, versions[i], (int)flags, file_of(search.name));
            }
        }
    }
    return 0;
}
