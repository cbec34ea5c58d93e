/* How a program finds its functions, and how libfgpu finds the real ones.
 *
 * A program gets at a driver's function in four ways: it is linked against it (then the loader finds libfgpu's export
 * first), it asks dlsym(), it asks cuGetProcAddress(), or a library that it uses does. What is no hook is left to
 * libc by a jump, not by a call: dlsym(RTLD_NEXT) and dlopen() with DT_RUNPATH depend on the address that called them.
 *
 * Nothing here takes a lock. The loader runs constructors while it holds its own, and constructors look up functions;
 * and a fork may leave any lock locked. */
#include "objects.h"
#include "hooks.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

/* ---- libc's own functions ---- */

typedef void *(*dlsym_function)(void *, const char *);
typedef void *(*dlvsym_function)(void *, const char *, const char *);
typedef void *(*dlopen_function)(const char *, int);

static void *nothing(void) {
    return NULL;
}

/* They are in libc since glibc 2.34, in libdl before. Found by name in the table of symbols: asked by version, the
 * answer would depend on the versions that were known here; and a reference of our own would lead back to our exports. */
static __attribute__((noinline)) void *find_in_libc(_Atomic(void *) *place, const char *name) {
    static const char *const libraries[] = {"libc.so.6", "libdl.so.2"};
    struct fgpu_object object;
    void *found = NULL;
    for (int i = 0; i < 2 && found == NULL; i++)
        if (fgpu_object_named(libraries[i], &object))
            found = fgpu_object_function(&object, name);
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

#define ADDRESSES 1024 /* a power of two, several times the number of hooks */

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

/* Two names of one address are versions of a function that do the same; the first in the table stands for both. */
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
 * close it, and open one of a compatibility package. It stays loaded, as its addresses are kept. */
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

/* The driver in use; if none is known yet, as in a program that was linked against it, the one that is loaded. */
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

/* Whether a hook's function in this object is the one that the hook stands before. */
static bool is_hooked(const struct fgpu_object *object, enum fgpu_library library) {
    if (library == FGPU_LIBC)
        return strcmp(object->name, "libc.so.6") == 0 || strcmp(object->name, "libdl.so.2") == 0;
    return strcmp(object->name, sonames[library]) == 0;
}

/* The program gets the hook only where it would have got the function: what is not there stays missing, with dlerror()
 * as libc has left it, and a function of this name in another library stays what it is. */
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
    if (is_libfgpu(&object)) { /* by RTLD_DEFAULT: is there a driver behind it? */
        if (hook->library == FGPU_LIBC || fgpu_real((unsigned)number) != NULL)
            return hook->hook;
        return libc_dlsym()(RTLD_NEXT, name);
    }
    if (!is_hooked(&object, hook->library))
        return found;
    if (hook->library != FGPU_LIBC && adopt(hook->library, &object) == NULL)
        return NULL;
    return hook->hook;
}

FGPU_EXPORT void *dlsym(void *restrict handle, const char *restrict name) {
    int number = fgpu_hook_by_name(name);
    if (__builtin_expect(number >= 0, 0))
        return find_hooked(handle, name, NULL, number, (uintptr_t)__builtin_return_address(0));
    return libc_dlsym()(handle, name);
}

FGPU_EXPORT void *dlvsym(void *restrict handle, const char *restrict name, const char *restrict version) {
    int number = fgpu_hook_by_name(name);
    if (__builtin_expect(number >= 0, 0))
        return find_hooked(handle, name, version, number, (uintptr_t)__builtin_return_address(0));
    return libc_dlvsym()(handle, name, version);
}

/* ---- dlopen ---- */

/* A library opened with RTLD_DEEPBIND would find the driver's functions before libfgpu's. */
FGPU_EXPORT void *dlopen(const char *file, int mode) {
    return libc_dlopen()(file, mode & ~RTLD_DEEPBIND);
}

/* Another namespace would have its own driver and no libfgpu; so there is only the one. A program that wanted two
 * copies of a library gets the same one twice. */
FGPU_EXPORT void *dlmopen(Lmid_t namespace, const char *file, int mode) {
    (void)namespace;
    return libc_dlopen()(file, mode & ~RTLD_DEEPBIND);
}

/* ---- cuGetProcAddress ---- */

/* Whether `name` is `symbol` with the suffixes of a version. */
static bool is_version_of(const char *name, const char *symbol) {
    size_t length = strlen(symbol);
    if (strncmp(name, symbol, length) != 0)
        return false;
    const char *rest = name + length;
    if (rest[0] == '_' && rest[1] == 'v' && rest[2] >= '0' && rest[2] <= '9')
        rest += 3;
    return rest[0] == '\0' || strcmp(rest, "_ptsz") == 0;
}

static bool has_hooked_version(const char *symbol) {
    for (int number = 0; number < FGPU_HOOK_COUNT; number++)
        if (fgpu_hooks[number].library == FGPU_CUDA && is_version_of(fgpu_hooks[number].name, symbol))
            return true;
    return false;
}

/* The driver knows which version of a function a program of this CUDA version wants; each answer is one of its exported
 * addresses. A version of a hooked function that is not in the table is refused: it would go past the limit. */
static CUresult swap(const char *symbol, void **function, CUdriverProcAddressQueryResult *status, CUresult result) {
    struct driver *driver = driver_of(FGPU_CUDA);
    if (result != CUDA_SUCCESS || function == NULL || *function == NULL || driver == NULL)
        return result;
    int number = hook_at(driver, (uintptr_t)*function);
    if (number >= 0) {
        *function = fgpu_hooks[number].hook;
    } else if (has_hooked_version(symbol)) {
        fgpu_log("version", "the driver has a version of %s that this libfgpu does not know; it is refused", symbol);
        *function = NULL;
        if (status != NULL)
            *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
        return CUDA_ERROR_NOT_FOUND;
    }
    return result;
}

FGPU_LOOKUP_HOOKS(FGPU_EXPORT_HOOK)
