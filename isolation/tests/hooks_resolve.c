/* Looks functions up in the way of its first argument, and prints the file that contains each address. The other
 * arguments are the libraries to look in. */
#include "cuda_abi.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct search {
    ElfW(Addr) address;
    char name[4096];
};

static int contains(struct dl_phdr_info *object, size_t size, void *data) {
    struct search *search = data;
    (void)size;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &object->dlpi_phdr[i];
        if (segment->p_type == PT_LOAD && search->address - object->dlpi_addr - segment->p_vaddr < segment->p_memsz) {
            const char *slash = strrchr(object->dlpi_name, '/');
            snprintf(search->name, sizeof search->name, "%s", slash ? slash + 1 : object->dlpi_name);
            return 1;
        }
    }
    return 0;
}

static void say(const char *what, void *address) {
    struct search search = {.address = (ElfW(Addr))address};
    if (address == NULL)
        snprintf(search.name, sizeof search.name, "nothing");
    else if (!dl_iterate_phdr(contains, &search))
        snprintf(search.name, sizeof search.name, "nowhere");
    else if (search.name[0] == '\0')
        snprintf(search.name, sizeof search.name, "program");
    printf("%s %s\n", what, search.name);
}

static void *open_or_die(const char *path, int mode) {
    void *handle = dlopen(path, mode);
    if (handle == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    return handle;
}

static void say_error(void) {
    const char *error = dlerror();
    printf("error %s\n", error == NULL ? "none" : strstr(error, "undefined symbol") ? "undefined symbol" : error);
}

static void look_up(void *handle) {
    say("cuMemAlloc_v2", dlsym(handle, "cuMemAlloc_v2"));
    say("cuDriverGetVersion", dlsym(handle, "cuDriverGetVersion"));
    dlerror();
    say("cuMemAllocAsync", dlsym(handle, "cuMemAllocAsync"));
    say_error();
}

static int allocate(void *function) {
    CUdeviceptr address;
    return (int)((__typeof__(&cuMemAlloc_v2))function)(&address, 1);
}

static void by_version(void *handle, const char *libc) {
    static const char *const names[] = {"dlsym", "dlvsym", "dlopen", "dlmopen"};
    void *c = open_or_die("libc.so.6", RTLD_NOW | RTLD_NOLOAD);
    for (int i = 0; i < 4; i++) {
        say(names[i], dlsym(c, names[i]));
        say(names[i], dlvsym(c, names[i], libc));
    }
    say("a64l", dlvsym(c, "a64l", libc));
    say("cuMemAlloc_v2", dlvsym(handle, "cuMemAlloc_v2", "none"));
}

static void by_driver(void *handle) {
    static const struct {
        const char *name;
        int version;
    } questions[] = {{"cuMemAlloc", 4000},       {"cuMemAlloc", 99000},      {"cuMemFree", 4000},
                     {"cuSomethingElse", 12000}, {"cuGetProcAddress", 12000}, {"cuNothing", 12000}};
    __typeof__(&cuGetProcAddress_v2) second = (__typeof__(&cuGetProcAddress_v2))dlsym(handle, "cuGetProcAddress_v2");
    __typeof__(&cuGetProcAddress) first = (__typeof__(&cuGetProcAddress))dlsym(handle, "cuGetProcAddress");
    for (size_t i = 0; i < sizeof questions / sizeof *questions; i++) {
        void *function = NULL;
        CUdriverProcAddressQueryResult status = 0;
        int result = (int)second(questions[i].name, &function, questions[i].version, 0, &status);
        printf("%d %d ", result, (int)status);
        say(questions[i].name, function);
        void *again = NULL;
        if (second(questions[i].name, &again, questions[i].version, 0, NULL) != CUDA_SUCCESS || again != function)
            printf("without a status it differs\n");
        CUresult missing = function == NULL ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
        if (first(questions[i].name, &again, questions[i].version, 0) != missing || again != function)
            printf("the first version differs\n");
    }
}

int main(int count, char **arguments) {
    const char *way = arguments[1], *path = count > 2 ? arguments[2] : NULL;
    if (strcmp(way, "handle") == 0) {
        look_up(open_or_die(path, RTLD_NOW));
    } else if (strcmp(way, "default") == 0) {
        if (path != NULL)
            open_or_die(path, RTLD_NOW | RTLD_GLOBAL);
        look_up(RTLD_DEFAULT);
    } else if (strcmp(way, "next") == 0) {
        if (path != NULL)
            open_or_die(path, RTLD_NOW | RTLD_GLOBAL);
        look_up(RTLD_NEXT);
        say("a64l", dlsym(RTLD_NEXT, "a64l"));
    } else if (strcmp(way, "version") == 0) {
        by_version(open_or_die(path, RTLD_NOW), arguments[3]);
    } else if (strcmp(way, "driver") == 0) {
        by_driver(open_or_die(path, RTLD_NOW));
    } else if (strcmp(way, "library") == 0) { /* linked against the driver, opened with RTLD_DEEPBIND */
        void *library = open_or_die(path, RTLD_NOW | RTLD_DEEPBIND);
        say("cuMemAlloc_v2", ((void *(*)(void))dlsym(library, "library_address"))());
        printf("result %d\n", (int)((CUresult(*)(void))dlsym(library, "library_allocates"))());
    } else if (strcmp(way, "apart") == 0) {
        void *handle = dlmopen(LM_ID_NEWLM, path, RTLD_NOW);
        if (handle == NULL)
            printf("%s\n", dlerror());
        else
            look_up(handle);
    } else if (strcmp(way, "runpath") == 0) {
        void *library = open_or_die(path, RTLD_NOW);
        const char *name = arguments[3];
        void *handle = dlopen(name, RTLD_NOW); /* it cannot be found from here */
        printf("program %s\n", handle ? "found" : "nothing");
        handle = ((void *(*)(const char *))dlsym(library, "library_opens"))(name);
        printf("library %s\n", handle ? "found" : dlerror());
        handle = ((void *(*)(const char *))dlsym(library, "library_opens_apart"))(name);
        printf("apart %s\n", handle ? "found" : dlerror());
    } else if (strcmp(way, "newer") == 0) {
        say("cuMemAlloc_v9", dlsym(open_or_die(path, RTLD_NOW), "cuMemAlloc_v9"));
        const char *error = dlerror();
        printf("%s\n", error == NULL ? "no error" : error);
    } else if (strcmp(way, "copies") == 0) { /* a copy of the driver, before and after the driver itself */
        void *copy = open_or_die(path, RTLD_NOW);
        say("copy", dlsym(copy, "cuMemAlloc_v2"));
        void *driver = open_or_die(arguments[3], RTLD_NOW);
        say("driver", dlsym(driver, "cuMemAlloc_v2"));
        say("copy", dlsym(copy, "cuMemAlloc_v2"));
        const char *error = dlerror();
        printf("%s\n", error == NULL ? "no error" : error);
        say("copy", dlsym(copy, "cuDriverGetVersion"));
    } else if (strcmp(way, "two") == 0) { /* drivers, one after another */
        void *first = open_or_die(path, RTLD_NOW);
        void *function = dlsym(first, "cuMemAlloc_v2");
        printf("first %d\n", allocate(function));
        dlclose(first);
        printf("closed %d\n", allocate(function));
        void *second = open_or_die(arguments[3], RTLD_NOW);
        function = dlsym(second, "cuMemAlloc_v2");
        printf("second %d\n", allocate(function));
    } else if (strcmp(way, "preloaded") == 0) {
        open_or_die(path, RTLD_NOW | RTLD_GLOBAL);
        printf("a64l %ld\n", a64l(arguments[3]));
        void *found = dlsym(RTLD_DEFAULT, "cuMemAlloc_v2");
        say("cuMemAlloc_v2", found);
        printf("result %d\n", allocate(found));
        say("next", ((void *(*)(void))dlsym(RTLD_DEFAULT, "preloaded_next"))());
    }
    return 0;
}
