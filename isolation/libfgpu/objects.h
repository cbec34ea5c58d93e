/* The loaded objects, read without the dynamic loader's own functions, because libfgpu intercepts those. */
#ifndef FGPU_OBJECTS_H
#define FGPU_OBJECTS_H

#include <stdbool.h>
#include <stdint.h>

struct fgpu_object {
    uintptr_t base; /* base of the addresses in the file */
    uintptr_t start, end; /* of the mapping */
    const char *path; /* the loader's string; valid while the object is loaded */
    const char *name;     /* DT_SONAME; "" if it has none */
    const void *dynamic;
};

/* The object that contains this address. */
bool fgpu_object_at(uintptr_t address, struct fgpu_object *out);

/* Strings are compared here rather than by the C library: a sanitizer intercepts its functions, and needs dlsym()
 * before it can serve any. */
static inline bool fgpu_same(const char *a, const char *b) {
    while (*a != '\0' && *a == *b) {
        a++;
        b++;
    }
    return *a == *b;
}

/* The function of the first loaded object with this DT_SONAME, such as libc, found without a call of any other
 * function, for the same reason. NULL if there is none. */
void *fgpu_function_of(const char *object, const char *name);

/* The first loaded object with this DT_SONAME. File names are unreliable: they are links and copies. */
bool fgpu_object_named(const char *name, struct fgpu_object *out);

/* Calls `visit` for the objects loaded before the one with `address`, except the program itself; a result other than 0
 * ends the loop and is returned. The symbols of earlier objects are found first. */
int fgpu_objects_before(uintptr_t address, int (*visit)(const struct fgpu_object *object, void *data), void *data);

/* The function that this object itself defines under this name; the default version if there are several. */
void *fgpu_object_function(const struct fgpu_object *object, const char *name);

/* The first definition of this function after the object with `address`, skipping libfgpu, and its object. Like
 * dlsym(RTLD_NEXT), but privately opened libraries are searched too. */
void *fgpu_function_after(uintptr_t address, const char *name, struct fgpu_object *out);

#endif
