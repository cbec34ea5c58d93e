#include "hooks.h"

#include "objects.h"
#include "parts.h"

#include <dlfcn.h>

#define HOOKED(library, name, ...) {#name, (void *)name, FGPU_##library},
#define CALLED(library, name) {#name, NULL, FGPU_##library},
/* Without parameters here, some of these functions have other types. */
#define DECLARED(name) extern void gated_##name(void) __asm__(#name);
#define ONLY_GATED(name) {#name, (void *)gated_##name, FGPU_CUDA},

FGPU_GATED(DECLARED)

const struct fgpu_hook fgpu_hooks[FGPU_REAL_COUNT] = {FGPU_GATED(ONLY_GATED) FGPU_HOOKS(HOOKED) FGPU_CALLS(CALLED)};

int fgpu_hook_by_name(const char *name) {
    /* Most names asked for are others, recognised by their first letters. */
    if (name == NULL || !((name[0] == 'c' && name[1] == 'u') || (name[0] == 'd' && name[1] == 'l') ||
                          (name[0] == 'n' && name[1] == 'v')))
        return -1;
    for (int number = 0; number < FGPU_HOOK_COUNT; number++)
        if (fgpu_same(fgpu_hooks[number].name, name))
            return number;
    return -1;
}

bool fgpu_implements(const struct fgpu_object *object, enum fgpu_library library) {
    unsigned count = 0, there = 0;
    for (int number = FGPU_GATED_COUNT; number < FGPU_HOOK_COUNT; number++) {
        if (fgpu_hooks[number].library != library)
            continue;
        count++;
        there += fgpu_object_function(object, fgpu_hooks[number].name) != NULL;
    }
    return there * 2 > count; /* not all: drivers are older or newer than the table */
}

void fgpu_forget(void) {
    fgpu_devices_forget();
    fgpu_code_forget();
    fgpu_memory_forget();
    fgpu_pools_forget();
    fgpu_virtual_forget();
    fgpu_graphs_forget();
    fgpu_contexts_forget();
    fgpu_throttle_forget();
}
