/* Keeps libfgpu first among the loaded objects. A linked program gets the first definition of a function: from the
 * program itself, from LD_PRELOAD, from /etc/ld.so.preload, then from everything else. So LD_PRELOAD=libc.so.6 would
 * put dlsym() before ours, and the driver's own library all of its functions.
 *
 * If such an object is found, the program is executed again, unchanged except that its LD_PRELOAD then begins with
 * libfgpu. That happens before any of it has run and changes the least: the objects in LD_PRELOAD stay loaded, and a
 * process that never needs a GPU runs as usual. If that is impossible, the process ends.
 *
 * Objects before libfgpu that wrap single functions, as sanitizers and profilers do, stay: they call the next
 * definition, which is ours. */
#include "objects.h"
#include "hooks.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PRELOAD_FILE "/etc/ld.so.preload"
#define STATUS 127

/* ---- Objects before libfgpu ---- */

struct order {
    const char *path; /* of the object before it; NULL: none */
    const char *own_path;   /* of libfgpu */
    bool libfgpu; /* that object is another copy of libfgpu */
};

static const char own_name[] = "libfgpu.so";

static bool takes_over(const struct fgpu_object *object) {
    return fgpu_object_function(object, "dlsym") != NULL || fgpu_object_function(object, "dlvsym") != NULL ||
           strcmp(object->name, "libcuda.so.1") == 0 || strcmp(object->name, "libnvidia-ml.so.1") == 0 ||
           fgpu_implements(object, FGPU_CUDA) || fgpu_implements(object, FGPU_NVML);
}

static int look_at(const struct fgpu_object *object, void *data) {
    struct order *order = data;
    bool libfgpu = strcmp(object->name, own_name) == 0;
    if (!libfgpu && !takes_over(object))
        return 0;
    if (order->path == NULL || libfgpu)
        order->path = object->path;
    order->libfgpu |= libfgpu;
    return 0;
}

static void read_order(struct order *order) {
    struct fgpu_object self;
    fgpu_objects_before((uintptr_t)&read_order, look_at, order);
    if (order->path != NULL && fgpu_object_at((uintptr_t)&read_order, &self))
        order->own_path = self.path;
}

/* ---- Lists of files to preload ---- */

static size_t length_of_entry(const char *list) {
    return strcspn(list, ": \t\n");
}

static bool is_entry(const char *entry, size_t length, const char *path) {
    return strlen(path) == length && memcmp(entry, path, length) == 0;
}

static bool names(const char *list, const char *path) {
    while (*list != '\0') {
        size_t length = length_of_entry(list);
        if (is_entry(list, length, path))
            return true;
        list += length + (list[length] != '\0');
    }
    return false;
}

/* It can be read by every user, and has one line. */
static bool file_names(const char *path) {
    char text[PATH_MAX + 1];
    long file = syscall(SYS_openat, AT_FDCWD, PRELOAD_FILE, O_RDONLY | O_CLOEXEC, 0);
    if (file < 0)
        return false;
    long size = syscall(SYS_read, file, text, sizeof text - 1);
    fgpu_close((int)file);
    text[size < 0 ? 0 : size] = '\0';
    return names(text, path);
}

/* ---- The environment ---- */

static const char variable[] = "LD_PRELOAD=";

/* The loader takes the last of several. */
static const char *preload_of(char **environment) {
    const char *list = "";
    for (char **each = environment; *each != NULL; each++)
        if (strncmp(*each, variable, sizeof variable - 1) == 0)
            list = *each + sizeof variable - 1;
    return list;
}

/* The environment with this object as the first in LD_PRELOAD. NULL without memory. */
static char **with_first(char **environment, const char *path, const char *list) {
    size_t count = 0, kept = 0;
    while (environment[count] != NULL)
        count++;
    char **changed = calloc(count + 2, sizeof *changed);
    size_t size = sizeof variable + strlen(path) + strlen(list) + 1;
    char *entry = malloc(size);
    if (changed == NULL || entry == NULL)
        return NULL;
    snprintf(entry, size, "%s%s:%s", variable, path, list);
    changed[kept++] = entry;
    for (size_t i = 0; i < count; i++)
        if (strncmp(environment[i], variable, sizeof variable - 1) != 0)
            changed[kept++] = environment[i];
    return changed;
}

/* ---- Executing the program again ---- */

/* By its own name first, so that process lists show it rather than "exe". */
static void execute(char **arguments, char **environment) {
    static const char self[] = "/proc/self/exe";
    char path[PATH_MAX];
    ssize_t size = readlink(self, path, sizeof path - 1);
    if (size > 0) {
        path[size] = '\0';
        execve(path, arguments, environment);
    }
    execve(self, arguments, environment);
}

static void say(const char *first, const char *second, const char *third) {
    char line[3 * PATH_MAX];
    int size = snprintf(line, sizeof line, "fgpu: %s%s%s\n", first, second, third);
    if (size > 0 && syscall(SYS_write, 2, line, (size_t)size < sizeof line ? (size_t)size : sizeof line - 1) < 0)
        (void)0; /* nothing to report to */
}

static __attribute__((noreturn)) void end(const struct order *order, const char *why) {
    fgpu_log("ended", "%s stands before libfgpu, and %s: the program was ended", order->path, why);
    say(order->path, " is loaded before libfgpu, so this session's GPU limits would not hold; ", why);
    say("this program was ended. Start it without that library in LD_PRELOAD.", "", "");
    syscall(SYS_exit_group, STATUS);
    abort();
}

static void start_again(const struct order *order, char **arguments, char **environment) {
    const char *list = preload_of(environment), *own = order->own_path;
    if (own == NULL || own[0] != '/' || own[length_of_entry(own)] != '\0')
        end(order, "libfgpu's own path cannot be put before it");
    if (is_entry(list, length_of_entry(list), own))
        end(order, "putting libfgpu first in LD_PRELOAD did not help");
    if (getauxval(AT_BASE) == 0) /* started by the loader, whose arguments are gone */
        end(order, "the program was started through the dynamic loader");
    char **changed = with_first(environment, own, list);
    if (changed == NULL)
        end(order, "there is no memory to put libfgpu first");
    fgpu_log("order", "%s stood before libfgpu; the program was started again with libfgpu first in LD_PRELOAD",
             order->path);
    execute(arguments, changed);
    end(order, strerror(errno));
}

/* In almost all processes no object is before it, and this costs nothing. Only if preloaded: a program may also have
 * opened it, long after its start. */
__attribute__((constructor)) static void keep_order(int count, char **arguments, char **environment) {
    struct order order = {0};
    (void)count;
    read_order(&order);
    if (order.path == NULL || order.own_path == NULL)
        return;
    if (!names(preload_of(environment), order.own_path) && !file_names(order.own_path))
        return;
    if (order.libfgpu)
        end(&order, "it would hold to limits of its own");
    start_again(&order, arguments, environment);
}
