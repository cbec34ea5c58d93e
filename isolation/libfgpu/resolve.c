/* How a program finds its functions, and how libfgpu finds the real ones.
 *
 * A program gets a driver's function in four ways: it is linked against it (the loader finds libfgpu's export first),
 * it calls dlsym(), it calls cuGetProcAddress(), or a library that it uses does. Functions without a hook are left to
 * libc by a jump, not a call: dlsym(RTLD_NEXT), and dlopen() with DT_RUNPATH, depend on the address of their caller.
 *
 * Nothing here takes a lock. The loader holds its own lock while it runs constructors, which look up functions; and a
 * fork may leave any lock locked. */
#include "objects.h"
#include "hooks.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- libc's own functions ---- */

typedef void *(*dlsym_function)(void *, const char *);
typedef void *(*dlvsym_function)(void *, const char *, const char *);
typedef void *(*dlopen_function)(const char *, int);

static void *nothing(void) {
    return NULL;
}

/* They are in libc since glibc 2.34, in libdl before. Found by name in the symbol table: a look-up by version would
 * only know the versions listed here, and a reference would lead back to our own exports. */
static __attribute__((noinline)) void *find_in_libc(_Atomic(void *) *place, const char *name) {
    static const char *const libraries[] = {"libc.so.6", "libdl.so.2"};
    void *found = NULL;
    for (int i = 0; i < 2 && found == NULL; i++)
        found = fgpu_function_of(libraries[i], name);
    if (found == NULL)
        found = (void *)nothing;
    atomic_store_explicit(place, found, memory_order_release);
    return found;
}

static inline void *in_libc(_Atomic(void *) *place, const char *name) {
    void *found = atomic_load_explicit(place, memory_order_acquire);
    return __builtin_expect(found != NULL, 1) ? found : find_in_libc(place, name);
}

static inline dlsym_function libc_dlsym(void) {
    static _Atomic(void *) place;
    return (dlsym_function)in_libc(&place, "dlsym");
}

static inline dlvsym_function libc_dlvsym(void) {
    static _Atomic(void *) place;
    return (dlvsym_function)in_libc(&place, "dlvsym");
}

static inline dlopen_function libc_dlopen(void) {
    static _Atomic(void *) place;
    return (dlopen_function)in_libc(&place, "dlopen");
}

void *fgpu_real_dlsym(void *handle, const char *name) {
    return libc_dlsym()(handle, name);
}

/* ---- The driver's functions ---- */

#define ADDRESSES 4096 /* a power of two, several times the number of hooks */

/* A driver that was found, with the hook for each of its addresses. Never changed and never freed. */
struct driver {
    struct fgpu_object object;
    struct {
        uintptr_t address;
        int number;
    } hooked[ADDRESSES];
};

_Static_assert(FGPU_HOOK_COUNT * 4 < ADDRESSES, "most places stay free");

_Atomic(void *) fgpu_reals[FGPU_REAL_COUNT];
static struct driver *_Atomic drivers[FGPU_LIBRARIES];

static size_t place_of(uintptr_t address) {
    return (size_t)((address * UINT64_C(0x9e3779b97f4a7c15)) >> 32) % ADDRESSES;
}

/* Two names of one address are equal versions of a function; the first in the table stands for both. */
static void remember(struct driver *driver, uintptr_t address, int number) {
    size_t place = place_of(address);
    while (driver->hooked[place].address != 0 && driver->hooked[place].address != address)
        place = (place + 1) % ADDRESSES;
    if (driver->hooked[place].address == 0) {
        driver->hooked[place].address = address;
        driver->hooked[place].number = number;
    }
}

static int hook_at(const struct driver *driver, uintptr_t address) {
    size_t place = place_of(address);
    while (driver->hooked[place].address != 0 && driver->hooked[place].address != address)
        place = (place + 1) % ADDRESSES;
    return driver->hooked[place].address == 0 ? -1 : driver->hooked[place].number;
}

/* Makes this object the driver that hooks call. The last one found counts: a program may look at the system's driver,
 * close it, and open one from a compatibility package. It stays loaded, as its addresses are kept. */
static struct driver *adopt(enum fgpu_library library, const struct fgpu_object *object) {
    struct driver *before = atomic_load_explicit(&drivers[library], memory_order_acquire);
    if (before != NULL && before->object.base == object->base && before->object.dynamic == object->dynamic)
        return before;
    struct driver *driver = calloc(1, sizeof *driver);
    if (driver == NULL)
        return before;
    driver->object = *object;
    libc_dlopen()(object->path, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
    void *found[FGPU_REAL_COUNT] = {NULL};
    for (int number = 0; number < FGPU_REAL_COUNT; number++) {
        if (fgpu_hooks[number].library != library)
            continue;
        found[number] = fgpu_object_function(object, fgpu_hooks[number].name);
        if (found[number] != NULL && number < FGPU_HOOK_COUNT)
            remember(driver, (uintptr_t)found[number], number);
    }
    if (!atomic_compare_exchange_strong(&drivers[library], &before, driver)) {
        free(driver);
        return before;
    }
    for (int number = 0; number < FGPU_REAL_COUNT; number++)
        if (fgpu_hooks[number].library == library)
            atomic_store_explicit(&fgpu_reals[number], found[number], memory_order_release);
    return driver;
}

static const char *const sonames[FGPU_LIBRARIES] = {NULL, "libcuda.so.1", "libnvidia-ml.so.1"};

/* The driver in use; if none is known yet, as in a program that was linked against it, the loaded one. */
static struct driver *driver_of(enum fgpu_library library) {
    struct driver *known = atomic_load_explicit(&drivers[library], memory_order_acquire);
    struct fgpu_object object;
    if (known == NULL && fgpu_object_named(sonames[library], &object))
        known = adopt(library, &object);
    return known;
}

void *fgpu_find_real(unsigned number) {
    struct driver *driver = fgpu_hooks[number].library == FGPU_LIBC ? NULL : driver_of(fgpu_hooks[number].library);
    return driver == NULL ? NULL : fgpu_object_function(&driver->object, fgpu_hooks[number].name);
}

void *fgpu_driver_symbol(const char *name) {
    struct driver *driver = driver_of(strncmp(name, "nvml", 4) == 0 ? FGPU_NVML : FGPU_CUDA);
    return driver == NULL ? NULL : fgpu_object_function(&driver->object, name);
}

/* ---- dlsym ---- */

static bool is_libfgpu(const struct fgpu_object *object) {
    return (uintptr_t)&is_libfgpu >= object->start && (uintptr_t)&is_libfgpu < object->end;
}

/* Whether the driver in use is this object. */
static bool is_hooked(const struct fgpu_object *object, enum fgpu_library library) {
    if (library == FGPU_LIBC)
        return fgpu_same(object->name, "libc.so.6") || fgpu_same(object->name, "libdl.so.2");
    return fgpu_same(object->name, sonames[library]);
}

/* Makes dlerror() say what is missing, and why. */
static void *refuse(const char *name, const char *why) {
    char words[128];
    snprintf(words, sizeof words, "%.64s (refused by libfgpu: %s)", name, why);
    libc_dlsym()(RTLD_DEFAULT, words);
    return NULL;
}

/* The hook for a function found in this object, if that is the driver or libc; a copy of the driver counts, whatever
 * its DT_SONAME. But while the driver itself is in use, that copy may be a library that passes calls on to the driver,
 * and so to the hooks: as the hooks' driver it would call itself forever. So it is refused. */
static void *instead_of(void *found, const struct fgpu_object *object, const struct fgpu_hook *hook) {
    bool by_name = is_hooked(object, hook->library);
    if (!by_name && !fgpu_implements(object, hook->library))
        return found;
    if (hook->library == FGPU_LIBC)
        return hook->hook;
    struct driver *known = atomic_load_explicit(&drivers[hook->library], memory_order_acquire);
    if (!by_name && known != NULL && is_hooked(&known->object, hook->library)) {
        fgpu_log("copy", "%s has the functions of %s beside it; they are refused", object->path,
                 sonames[hook->library]);
        return refuse(hook->name, "this is not the driver in use");
    }
    return adopt(hook->library, object) == NULL ? NULL : hook->hook;
}

/* The program gets the hook only if it would have got the function: missing functions stay missing, with libc's
 * dlerror(), and a function of this name in another library stays as it is. */
static __attribute__((noinline)) void *find_hooked(void *handle, const char *name, const char *version, int number,
                                                   uintptr_t caller) {
    const struct fgpu_hook *hook = &fgpu_hooks[number];
    struct fgpu_object object;
    void *found = NULL;
    if (handle == RTLD_NEXT)
        found = fgpu_function_after(caller, name, &object);
    if (found == NULL) {
        found = version != NULL ? libc_dlvsym()(handle, name, version) : libc_dlsym()(handle, name);
        if (found == NULL || !fgpu_object_at((uintptr_t)found, &object))
            return found;
    }
    if (is_libfgpu(&object)) { /* found by RTLD_DEFAULT: is there a driver behind it? */
        if (hook->library == FGPU_LIBC || fgpu_real((unsigned)number) != NULL)
            return hook->hook;
        return libc_dlsym()(RTLD_NEXT, name);
    }
    return instead_of(found, &object, hook);
}

/* Whether the rest of a function's name is a version suffix. */
static bool is_suffix(const char *rest) {
    if (rest[0] == '_' && rest[1] == 'v' && rest[2] >= '0' && rest[2] <= '9')
        rest += 3;
    return fgpu_same(rest, "") || fgpu_same(rest, "_ptsz");
}

/* Whether two names are of one function, in any versions. */
static bool are_versions(const char *a, const char *b) {
    while (*a != '\0' && *a == *b) {
        if (*a == '_' && is_suffix(a) && is_suffix(b))
            return true;
        a++;
        b++;
    }
    return is_suffix(a) && is_suffix(b);
}

static bool has_hooked_version(const char *symbol, enum fgpu_library library) {
    for (int number = FGPU_GATED_COUNT; number < FGPU_HOOK_COUNT; number++)
        if (fgpu_hooks[number].library == library && are_versions(fgpu_hooks[number].name, symbol))
            return true;
    return false;
}

/* The library of a function by its name; libc's if in none of the tables. */
static enum fgpu_library library_of(const char *name) {
    if (name == NULL || (name[0] != 'c' && name[0] != 'n'))
        return FGPU_LIBC;
    if (name[0] == 'c')
        return name[1] == 'u' ? FGPU_CUDA : FGPU_LIBC;
    return name[1] == 'v' && name[2] == 'm' && name[3] == 'l' ? FGPU_NVML : FGPU_LIBC;
}

/* A name that is missing in the table but is a version of one in it: from a driver newer than this libfgpu. */
static bool is_unknown_version(const char *name) {
    enum fgpu_library library = library_of(name);
    return library != FGPU_LIBC && has_hooked_version(name, library);
}

/* It would bypass the limit, or reveal other sessions; so it is missing, as in older drivers. */
static __attribute__((noinline)) void *find_unknown_version(void *handle, const char *name) {
    struct fgpu_object object;
    enum fgpu_library library = library_of(name);
    void *found = libc_dlsym()(handle, name);
    if (found == NULL || !fgpu_object_at((uintptr_t)found, &object) ||
        (!is_hooked(&object, library) && !fgpu_implements(&object, library)))
        return found;
    fgpu_log("version", "the driver has %s, a version that this libfgpu does not know; it is refused", name);
    return refuse(name, "this version is not known to it");
}

#define HIDDEN "NVIDIA's OpenCL is not held to a slice"

/* OpenCL's functions. */
static inline bool is_opencl(const char *name) {
    return name != NULL && name[0] == 'c' && name[1] == 'l' && name[2] >= 'A' && name[2] <= 'Z';
}

/* Whether this name leads into a library that the session may not use. */
static __attribute__((noinline)) bool is_hidden(void *handle, const char *name, uintptr_t caller) {
    struct fgpu_object object;
    void *found = handle == RTLD_NEXT ? fgpu_function_after(caller, name, &object) : libc_dlsym()(handle, name);
    return found != NULL && fgpu_object_at((uintptr_t)found, &object) && fgpu_hides(&object);
}

FGPU_EXPORT void *dlsym(void *restrict handle, const char *restrict name) {
    int number = fgpu_hook_by_name(name);
    if (__builtin_expect(number >= 0, 0))
        return find_hooked(handle, name, NULL, number, (uintptr_t)__builtin_return_address(0));
    if (__builtin_expect(is_unknown_version(name), 0))
        return find_unknown_version(handle, name);
    if (__builtin_expect(is_opencl(name), 0) && is_hidden(handle, name, (uintptr_t)__builtin_return_address(0)))
        return refuse(name, HIDDEN);
    return libc_dlsym()(handle, name);
}

FGPU_EXPORT void *dlvsym(void *restrict handle, const char *restrict name, const char *restrict version) {
    int number = fgpu_hook_by_name(name);
    if (__builtin_expect(number >= 0, 0))
        return find_hooked(handle, name, version, number, (uintptr_t)__builtin_return_address(0));
    if (__builtin_expect(is_opencl(name), 0) && is_hidden(handle, name, (uintptr_t)__builtin_return_address(0)))
        return refuse(name, HIDDEN);
    return libc_dlvsym()(handle, name, version);
}

/* ---- dlopen ---- */

/* A library opened with RTLD_DEEPBIND would find the driver's functions before libfgpu's. */
FGPU_EXPORT void *dlopen(const char *file, int mode) {
    return libc_dlopen()(file, mode & ~RTLD_DEEPBIND);
}

/* Another namespace would have its own driver and no libfgpu, so there is only one. A program that wants two copies of
 * a library gets the same one twice. */
FGPU_EXPORT void *dlmopen(Lmid_t namespace, const char *file, int mode) {
    (void)namespace;
    return libc_dlopen()(file, mode & ~RTLD_DEEPBIND);
}

/* ---- cuGetProcAddress ---- */

/* The driver knows which version of a function suits a program's CUDA version; each answer is one of its exported
 * addresses. A version of a hooked function that is missing in the table is refused: it would bypass the limit. */
/* A refusal looks like the driver's own answer for a missing function: `missing`, and no function. */
static CUresult swap(const char *symbol, void **function, CUdriverProcAddressQueryResult *status, CUresult missing,
                     CUresult result) {
    struct driver *driver = driver_of(FGPU_CUDA);
    if (result != CUDA_SUCCESS || function == NULL || *function == NULL || driver == NULL)
        return result;
    int number = hook_at(driver, (uintptr_t)*function);
    if (number >= 0) {
        *function = fgpu_hooks[number].hook;
    } else if (has_hooked_version(symbol, FGPU_CUDA)) {
        fgpu_log("version", "the driver has a version of %s that this libfgpu does not know; it is refused", symbol);
        *function = NULL;
        if (status != NULL)
            *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
        return missing;
    }
    return result;
}

FGPU_LOOKUP_HOOKS(FGPU_EXPORT_HOOK)
