#include "probe.h"

#include <dlfcn.h>
#include <stdio.h>

#ifndef PROBE_STATIC
/* The names in old systems: linked on a new one, the probe would otherwise need its glibc. */
#if defined(__x86_64__)
#define OLDEST "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define OLDEST "GLIBC_2.17"
#else
#error "x86-64 or 64-bit Arm is needed"
#endif
__asm__(".symver dlopen, dlopen@" OLDEST);
__asm__(".symver dlsym, dlsym@" OLDEST);
__asm__(".symver dlerror, dlerror@" OLDEST);

/* The linker's start-up code calls this one. Defined here, it also finds the old symbol. */
typedef int main_function(int, char **, char **);
int old_start_main(main_function *, int, char **, void (*)(void), void (*)(void), void (*)(void), void *);
__asm__(".symver old_start_main, __libc_start_main@" OLDEST);
__attribute__((visibility("hidden"))) int __libc_start_main(main_function *, int, char **, void (*)(void),
                                                            void (*)(void), void (*)(void), void *);

int __libc_start_main(main_function *program, int count, char **words, void (*first)(void), void (*last)(void),
                      void (*loader_last)(void), void *stack)
{
    return old_start_main(program, count, words, first, last, loader_last, stack);
}
#endif

const char probe_other_glibc[] = "a static program cannot load the driver here: the glibc is another than the one it was linked with";

bool library_open(struct library *library, const char *file, struct json *json)
{
#ifdef PROBE_STATIC
    /* Every driver needs the C library. Loaded alone first, it shows that a crash is not the driver's. */
    *probe_step = probe_other_glibc;
    dlopen("libc.so.6", RTLD_NOW | RTLD_LOCAL);
#endif
    *probe_step = file;
    library->file = file;
    library->handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (library->handle != NULL)
        return true;

    const char *error = dlerror();

#ifdef PROBE_STATIC
    /* A static program can only load libraries of the same glibc. */
    library_section(json, "not_tried", error != NULL ? error : "dlopen failed", -1, NULL);
#else
    library_section(json, "missing", error != NULL ? error : "dlopen failed", -1, NULL);
#endif
    json_raw(json, "}");
    return false;
}

void *library_function(const struct library *library, const char *name)
{
    *probe_step = name;
    return dlsym(library->handle, name);
}

void library_section(struct json *json, const char *status, const char *error, int code, const char *file)
{
    char path[4096];

    json_raw(json, "{");
    json_name(json, "status");
    json_string(json, status);
    json_name(json, "error");
    json_string(json, error);
    json_name(json, "code");
    if (code < 0)
        json_raw(json, "null");
    else
        json_number(json, (uint64_t)code);
    json_name(json, "library");
    json_string(json, file != NULL && system_mapped_path(file, path, sizeof(path)) ? path : NULL);
}
