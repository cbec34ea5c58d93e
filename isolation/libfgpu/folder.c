/* The library's folder, the files in it, and the log among them.
 *
 * System calls go through syscall(): the C library's open, write and close are cancellation points, where a thread
 * would be cancelled with its locks held; and glibc's fstat is newer than user images are. */
#include "fgpu.h"

#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOG_BYTES (256 << 10)
#define LINE_BYTES 1024
#define REASONS 64

/* ---- The folder ---- */

static const char *_Atomic folder;

struct search {
    uintptr_t address;
    const char *name; /* the loader's string; valid while the object is loaded */
};

static int holds_address(struct dl_phdr_info *object, size_t size, void *data) {
    struct search *search = data;
    (void)size;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &object->dlpi_phdr[i];
        uintptr_t start = object->dlpi_addr + segment->p_vaddr;
        if (segment->p_type == PT_LOAD && search->address >= start && search->address - start < segment->p_memsz) {
            search->name = object->dlpi_name;
            return 1;
        }
    }
    return 0;
}

/* Before main, so that no thread later waits for the loader's lock, which a fork may have left locked. */
__attribute__((constructor)) static void find_folder(void) {
    struct search search = {.address = (uintptr_t)&folder};
    dl_iterate_phdr(holds_address, &search);
    /* A relative path would mean another folder after each chdir, and an empty one is the program itself. */
    if (search.name == NULL || search.name[0] != '/')
        return;
    size_t size = (size_t)(strrchr(search.name, '/') - search.name);
    if (size >= PATH_MAX)
        return;
    char *copy = mmap(NULL, size + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED)
        return;
    memcpy(copy, search.name, size);
    const char *nobody = NULL;
    if (!atomic_compare_exchange_strong(&folder, &nobody, copy))
        munmap(copy, size + 1); /* another thread was faster */
}

const char *fgpu_folder(void) {
    const char *found = atomic_load_explicit(&folder, memory_order_acquire);
    if (found == NULL) { /* another library's constructor ran before ours */
        find_folder();
        found = atomic_load_explicit(&folder, memory_order_acquire);
    }
    return found;
}

/* ---- Its files ---- */

static const char *words_for(int error) {
    switch (error) {
    case ENOENT: return "does not exist";
    case EACCES: case EPERM: return "may not be opened by this user";
    case ELOOP: return "is a link, which is not followed";
    case EROFS: return "is on a read-only mount";
    case EMFILE: case ENFILE: return "cannot be opened: too many open files";
    case EISDIR: case ENXIO: return "is not a regular file";
    case ENAMETOOLONG: return "has too long a path";
    default: return "cannot be opened";
    }
}

static int open_in(const char *between, const char *name, int flags, struct stat *status, int *error) {
    char path[PATH_MAX];
    const char *parent = fgpu_folder();
    if ((size_t)snprintf(path, sizeof path, "%s/%s%s", parent, between, name) >= sizeof path) {
        *error = ENAMETOOLONG;
        return -1;
    }
    int more = O_CLOEXEC | O_NONBLOCK | O_NOCTTY | (flags & FGPU_FOLLOW ? 0 : O_NOFOLLOW);
    long descriptor;
    do
        descriptor = syscall(SYS_openat, AT_FDCWD, path, (flags & ~FGPU_FOLLOW) | more, 0600);
    while (descriptor < 0 && errno == EINTR);
    if (descriptor < 0) {
        *error = errno;
        return -1;
    }
    if (syscall(SYS_fstat, descriptor, status) != 0 || !S_ISREG(status->st_mode)) {
        *error = ENXIO;
        fgpu_close((int)descriptor);
        return -1;
    }
    return (int)descriptor;
}

int fgpu_open(const char *name, int flags, struct stat *status, const char **why) {
    int error = 0;
    if (fgpu_folder() == NULL) {
        *why = "cannot be found: libfgpu was not loaded by an absolute path";
        return -1;
    }
    int descriptor = open_in("", name, flags, status, &error);
    if (descriptor < 0)
        *why = words_for(error);
    return descriptor;
}

/* Several processes may make it at once: the result is one file, and allocating its blocks twice changes nothing. They
 * are allocated at once, because a process that writes to a page without room is killed. */
int fgpu_open_written(const char *name, int flags, size_t size, struct stat *status, const char **why) {
    int error = ENOENT;
    if (fgpu_folder() == NULL)
        return fgpu_open(name, flags, status, why);
    int descriptor = open_in("", name, flags, status, &error);
    if (descriptor < 0 && error == ENOENT) {
        descriptor = open_in(FGPU_WRITTEN, name, (flags & ~FGPU_FOLLOW) | O_CREAT, status, &error);
        if (descriptor >= 0 && status->st_size == 0) {
            syscall(SYS_fchmod, descriptor, 0666); /* every user of the session writes it, whatever the umask */
            if (size > 0)
                syscall(SYS_fallocate, descriptor, 0, (off_t)0, (off_t)size);
            syscall(SYS_fstat, descriptor, status);
        }
    }
    if (descriptor < 0)
        *why = words_for(error);
    return descriptor;
}

void fgpu_close(int descriptor) {
    syscall(SYS_close, descriptor);
}

/* ---- The log ---- */

static const char *_Atomic logged[REASONS];

/* If there were more reasons than expected here, the later ones would not be logged. */
static bool first_time(const char *reason) {
    for (int i = 0; i < REASONS; i++) {
        const char *here = NULL;
        if (atomic_compare_exchange_strong(&logged[i], &here, reason))
            return true;
        if (here == reason)
            return false;
    }
    return false;
}

/* UTC by arithmetic: the C library's function takes a lock, which a fork may have left locked. */
static int print_time(char *line, size_t size) {
    struct timespec now = {0};
    clock_gettime(CLOCK_REALTIME, &now);
    long days = now.tv_sec / 86400, second = now.tv_sec % 86400;
    /* Years begin in March here, so the leap day is the last day of its year, and a cycle of 400 years has 146,097
     * days. */
    long shifted = days + 719468, era = shifted / 146097, day_of_era = shifted % 146097;
    long year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36524 - day_of_era / 146096) / 365;
    long day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    long shifted_month = (5 * day_of_year + 2) / 153;
    long day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    long month = shifted_month < 10 ? shifted_month + 3 : shifted_month - 9;
    long year = year_of_era + era * 400 + (month <= 2);
    return snprintf(line, size, "%04ld-%02ld-%02ldT%02ld:%02ld:%02ld.%03ldZ pid %ld: ", year, month, day, second / 3600,
                    second / 60 % 60, second % 60, now.tv_nsec / 1000000, syscall(SYS_getpid));
}

void fgpu_log(const char *reason, const char *format, ...) {
    int saved = errno;
    if (first_time(reason)) {
        char line[LINE_BYTES];
        size_t size = (size_t)print_time(line, sizeof line);
        va_list arguments;
        va_start(arguments, format);
        int more = vsnprintf(line + size, sizeof line - size - 1, format, arguments);
        va_end(arguments);
        size += more < 0 ? 0 : strlen(line + size);
        for (size_t i = 0; i < size; i++) /* one line, whatever a file or a program put in */
            if ((unsigned char)line[i] < ' ' || line[i] == 0x7f)
                line[i] = '?';
        line[size++] = '\n';
        struct stat status;
        const char *why;
        int descriptor = fgpu_open_written("log", O_WRONLY | O_APPEND, 0, &status, &why);
        if (descriptor >= 0) {
            if ((size_t)status.st_size + size <= LOG_BYTES && syscall(SYS_write, descriptor, line, size) < 0)
                (void)0; /* nothing to report to */
            fgpu_close(descriptor);
        }
    }
    errno = saved;
}
