/* NVIDIA's OpenCL does not use CUDA, so neither its memory nor its compute would be limited. A program that looks for
 * its functions does not find them, as on a system without it: every loader of OpenCL platforms asks dlsym() for them
 * and goes on to the next platform, so processors' platforms remain.
 *
 * An empty folder over /etc/OpenCL/vendors would hide all platforms, would not stop programs that open the library by
 * name, and would keep NVIDIA's container toolkit, which makes a file there, from starting the container. */
#include "objects.h"
#include "fgpu.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SONAME "libnvidia-opencl.so.1"
#define ALLOWS "opencl" /* a file in the folder, with any content: the administrator allows it */
#define STATUS 127

/* A session with whole devices only cannot take from other sessions. */
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

/* A program linked with it needs no dlsym(). Only a program made to bypass the limits is. */
__attribute__((constructor)) static void end_if_linked(void) {
    static const char words[] = "fgpu: this program is linked with NVIDIA's OpenCL, which this session may not use: it was "
                                "ended. Use CUDA, or ask for a whole GPU.\n";
    struct fgpu_object object;
    if (!fgpu_object_named(SONAME, &object) || !fgpu_hides(&object))
        return;
    if (syscall(SYS_write, 2, words, sizeof words - 1) < 0)
        (void)0; /* nothing to report to */
    syscall(SYS_exit_group, STATUS);
    abort();
}
