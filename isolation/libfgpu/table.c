#include "hooks.h"

#include "parts.h"

#include <dlfcn.h>
#include <string.h>

#define HOOKED(library, name, ...) {#name, (void *)name, sizeof #name - 1, FGPU_##library},
#define CALLED(library, name) {#name, NULL, sizeof #name - 1, FGPU_##library},

const struct fgpu_hook fgpu_hooks[FGPU_REAL_COUNT] = {FGPU_HOOKS(HOOKED) FGPU_CALLS(CALLED)};

int fgpu_hook_by_name(const char *name) {
    /* Nearly every name asked for is another one: told by its first letters. */
    if (name == NULL || !((name[0] == 'c' && name[1] == 'u') || (name[0] == 'd' && name[1] == 'l') ||
                          (name[0] == 'n' && name[1] == 'v')))
        return -1;
    size_t length = strlen(name);
    for (int number = 0; number < FGPU_HOOK_COUNT; number++)
        if (fgpu_hooks[number].length == length && memcmp(fgpu_hooks[number].name, name, length) == 0)
            return number;
    return -1;
}

void fgpu_forget(void) {
    fgpu_devices_forget();
    fgpu_memory_forget();
    fgpu_pools_forget();
    fgpu_virtual_forget();
    fgpu_graphs_forget();
    fgpu_contexts_forget();
    fgpu_throttle_forget();
}
