/* NVIDIA's OpenCL does not pass through CUDA: neither its memory nor its compute would be held. So a program that looks for
 * its functions does not find them, as in a system without it. Every loader of OpenCL's platforms asks dlsym() for them,
 * and goes on to the next platform: those of processors stay.
 *
 * An empty folder over /etc/OpenCL/vendors would hide all platforms, is not asked by who opens the library by its name, and
 * NVIDIA's container toolkit, which makes a file there, could not start the container. */
#include "objects.h"
#include "fgpu.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SONAME "libnvidia-opencl.so.1"
#define ALLOWS "opencl" /* a file in the folder, whatever is in it: the administrator allows it */
#define STATUS 127

/* Who has whole devices only cannot take anything from anybody. */
static bool has_whole_devices(void) {
    const struct fgpu_limits *limits = fgpu_limits();
    if (limits == NULL)
        return false;
    for (unsigned n = 0; n < limits->device_count; n++)
        if (limits->devices[n].compute_percent < 100 || limits->devices[n].memory_bytes < limits->devices[n].device_bytes)
            return false;
    return true;
}

static bool is_allowed(void) {
    struct stat status;
    const char *why;
    int file = fgpu_open(ALLOWS, 0, &status, &why);
    if (file >= 0)
        fgpu_close(file);
    return file >= 0 || has_whole_devices();
}

bool fgpu_hides(const struct fgpu_object *object) {
    if (!fgpu_same(object->name, SONAME) || is_allowed())
        return false;
    fgpu_log("opencl", "NVIDIA's OpenCL is hidden from this session, as it would not be held to its slice");
    return true;
}

/* A program that is linked with it needs no dlsym(). There is no such program, but for one that is made to get around. */
__attribute__((constructor)) static void end_if_linked(void) {
    static const char words[] = "fgpu: this program is linked with NVIDIA's OpenCL, which this session may not use: it was "
                                "ended. Use CUDA, or ask for a whole GPU.\n";
    struct fgpu_object object;
    if (!fgpu_object_named(SONAME, &object) || !fgpu_hides(&object))
        return;
    if (syscall(SYS_write, 2, words, sizeof words - 1) < 0)
        (void)0; /* there is nobody to tell */
    syscall(SYS_exit_group, STATUS);
    abort();
}
