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

/* The object loaded first of all with this DT_SONAME: file names say nothing, they are links and copies. */
bool fgpu_object_named(const char *name, struct fgpu_object *out);

/* The function that this object itself defines under this name, in its default version if there are several. */
void *fgpu_object_function(const struct fgpu_object *object, const char *name);

/* The first definition of this function after the object that `address` is in, passing over libfgpu; with its object.
 * What dlsym(RTLD_NEXT) finds, but for libraries that were opened privately: those are looked through too. */
void *fgpu_function_after(uintptr_t address, const char *name, struct fgpu_object *out);

#endif
