/* The loaded objects, read without the dynamic loader's own functions: those are what libfgpu stands before. */
#ifndef FGPU_OBJECTS_H
#define FGPU_OBJECTS_H

#include <stdbool.h>
#include <stdint.h>

struct fgpu_object {
    uintptr_t base;       /* what the addresses in the file are relative to */
    uintptr_t start, end; /* of what is mapped */
    const char *path;     /* the loader's; it stays while the object is loaded */
    const char *name;     /* DT_SONAME; "" if it has none */
    const void *dynamic;
};

/* The object that this address is in. */
bool fgpu_object_at(uintptr_t address, struct fgpu_object *out);

/* Words are compared here, not by the C library: a sanitizer stands before its functions, and asks dlsym() for them
 * before it can serve any. */
static inline bool fgpu_same(const char *a, const char *b) {
    while (*a != '\0' && *a == *b) {
        a++;
        b++;
    }
    return *a == *b;
}

/* The function of the object loaded first of all with this DT_SONAME, in libc itself or the like: without any other
 * function being called, for the same reason. NULL if there is none. */
void *fgpu_function_of(const char *object, const char *name);

/* The object loaded first of all with this DT_SONAME: file names say nothing, they are links and copies. */
bool fgpu_object_named(const char *name, struct fgpu_object *out);

/* Calls `visit` for the objects loaded before the one that `address` is in, the program itself left out; what it
 * returns other than 0 ends that, and is returned. What stands before another object is found before it, too. */
int fgpu_objects_before(uintptr_t address, int (*visit)(const struct fgpu_object *object, void *data), void *data);

/* The function that this object itself defines under this name, in its default version if there are several. */
void *fgpu_object_function(const struct fgpu_object *object, const char *name);

/* The first definition of this function after the object that `address` is in, passing over libfgpu; with its object.
 * What dlsym(RTLD_NEXT) finds, but for libraries that were opened privately: those are looked through too. */
void *fgpu_function_after(uintptr_t address, const char *name, struct fgpu_object *out);

#endif
