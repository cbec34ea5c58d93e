/* Reads the file `machine`, and finds the folder that it lies in. */
#include "machine.h"

#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MACHINE_FILE_BYTES 65536

static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
static struct machine the_machine;
static enum { UNREAD, READ, UNREADABLE } state;

uint64_t machine_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int is_this_library(struct dl_phdr_info *info, size_t size, void *out)
{
    (void)size;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &info->dlpi_phdr[i];
        uintptr_t start = info->dlpi_addr + segment->p_vaddr;
        if (segment->p_type == PT_LOAD && (uintptr_t)&the_machine - start < segment->p_memsz) {
            const char *slash = strrchr(info->dlpi_name, '/');
            if (slash)
                snprintf(out, 4096, "%.*s", (int)(slash - info->dlpi_name), info->dlpi_name);
            return 1;
        }
    }
    return 0;
}

const char *machine_folder(void)
{
    static char folder[4096];
    static _Atomic(bool) found;
    if (!atomic_load(&found)) {
        char draft[4096] = "";
        const char *elsewhere = getenv("FGPU_SIMULATED_MACHINE");
        if (elsewhere && *elsewhere)
            snprintf(draft, sizeof draft, "%s", elsewhere);
        else
            dl_iterate_phdr(is_this_library, draft);
        /* Threads that get here together write the same bytes. */
        memcpy(folder, draft, sizeof folder);
        atomic_store(&found, true);
    }
    return *folder ? folder : NULL;
}

void machine_log(const char *format, ...)
{
    char path[4200], line[1024];
    int was = errno;
    const char *folder = machine_folder();
    if (!folder)
        return;
    snprintf(path, sizeof path, "%s/log", folder);
    int file = open(path, O_WRONLY | O_APPEND | O_CLOEXEC | O_NOFOLLOW);
    if (file >= 0) {
        va_list values;
        int used = snprintf(line, sizeof line, "%lld %d simulated: ", (long long)time(NULL), (int)getpid());
        va_start(values, format);
        vsnprintf(line + used, sizeof line - (size_t)used - 1, format, values);
        va_end(values);
        strcat(line, "\n");
        ssize_t ignored = write(file, line, strlen(line));
        (void)ignored;
        close(file);
    }
    errno = was;
}

/* ---- parsing ------------------------------------------------------------------------------------ */

struct parser {
    struct machine *machine;
    char *reason;
    size_t reason_size;
    unsigned line;
};

static bool refuse(struct parser *p, const char *format, ...) __attribute__((format(printf, 2, 3)));

static bool refuse(struct parser *p, const char *format, ...)
{
    va_list values;
    int used = snprintf(p->reason, p->reason_size, "machine, line %u: ", p->line);
    va_start(values, format);
    vsnprintf(p->reason + used, p->reason_size - (size_t)used, format, values);
    va_end(values);
    return false;
}

static bool number(struct parser *p, const char *field, const char *text, uint64_t from, uint64_t to, uint64_t *out)
{
    char *end = NULL;
    errno = 0;
    unsigned long long value = *text >= '0' && *text <= '9' ? strtoull(text, &end, 10) : 0;
    if (!end || *end || errno || value < from || value > to)
        return refuse(p, "%s=%s is not a whole number from %llu to %llu", field, text, (unsigned long long)from,
                      (unsigned long long)to);
    *out = value;
    return true;
}

/* Two numbers with a dot between; what follows a second dot does not matter. */
static bool version(struct parser *p, const char *field, const char *text, unsigned *major, unsigned *minor)
{
    char after = 0;
    int end = 0;
    *minor = 0;
    if (sscanf(text, "%4u%n", major, &end) != 1 || (text[end] && sscanf(text + end, ".%4u%c", minor, &after) < 1) ||
        (after && after != '.'))
        return refuse(p, "%s=%s is not a version such as 13.0", field, text);
    return true;
}

static bool hexadecimal(const char *text, unsigned char bytes[16])
{
    unsigned count = 0;
    for (; *text; text++) {
        if (*text == '-' && (count == 8 || count == 12 || count == 16 || count == 20))
            continue;
        int digit = *text >= '0' && *text <= '9' ? *text - '0' : *text >= 'a' && *text <= 'f' ? *text - 'a' + 10 : -1;
        if (digit < 0 || count == 32)
            return false;
        bytes[count / 2] = (unsigned char)(count % 2 ? bytes[count / 2] | digit : digit << 4);
        count++;
    }
    return count == 32;
}

static void bytes_of_uuid(const char *uuid, unsigned char bytes[16])
{
    const char *text = strchr(uuid, '-') + 1;
    if (hexadecimal(text, bytes))
        return;
    unsigned __int128 prime = ((unsigned __int128)1 << 88) + 0x13b;
    unsigned __int128 hash = ((unsigned __int128)0x6c62272e07bb0142 << 64) + 0x62b821756295c58d;
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * prime;
    for (int i = 15; i >= 0; i--, hash >>= 8)
        bytes[i] = (unsigned char)hash;
}

static int device_called(const struct machine *machine, const char *uuid)
{
    for (unsigned i = 0; i < machine->count; i++)
        if (!strcmp(machine->devices[i].uuid, uuid))
            return (int)i;
    return -1;
}

/* One field of a device's line. */
static bool device_field(struct parser *p, struct machine_device *device, const char *field, const char *value, bool mig)
{
    uint64_t n = 0;
    if (!strcmp(field, "uuid")) {
        const char *prefix = mig ? "MIG-" : "GPU-";
        if (strncmp(value, prefix, 4) || !value[4] || strlen(value) >= sizeof device->uuid)
            return refuse(p, "uuid=%s does not start with %s or is longer than 95 characters", value, prefix);
        if (device_called(p->machine, value) >= 0)
            return refuse(p, "uuid=%s stands on an earlier line too", value);
        snprintf(device->uuid, sizeof device->uuid, "%s", value);
        bytes_of_uuid(value, device->uuid_bytes);
    } else if (!strcmp(field, "memory_mib")) {
        if (!number(p, field, value, 1, UINT64_C(1) << 24, &n))
            return false;
        device->memory_bytes = n * MACHINE_MIB;
    } else if (!strcmp(field, "context_mib")) {
        if (!number(p, field, value, 0, 65536, &n))
            return false;
        device->context_bytes = n * MACHINE_MIB;
    } else if (!strcmp(field, "code_mib")) {
        if (!number(p, field, value, 0, 65536, &n))
            return false;
        device->code_bytes = n * MACHINE_MIB;
    } else if (!strcmp(field, "granularity_kib")) {
        if (!number(p, field, value, 0, 1024 * 1024, &n))
            return false;
        device->granularity_bytes = n << 10;
    } else if (!strcmp(field, "sm_count")) {
        if (!number(p, field, value, 1, 1024, &n))
            return false;
        device->sm_count = (unsigned)n;
    } else if (!strcmp(field, "compute_capability")) {
        return version(p, field, value, &device->major, &device->minor);
    } else if (!strcmp(field, "name")) {
        if (!*value || strlen(value) >= sizeof device->name)
            return refuse(p, "name= is empty or longer than 95 characters");
        snprintf(device->name, sizeof device->name, "%s", value);
    } else if (mig && !strcmp(field, "parent")) {
        device->parent = device_called(p->machine, value);
        if (device->parent < 0 || p->machine->devices[device->parent].parent >= 0)
            return refuse(p, "parent=%s is no gpu of an earlier line", value);
    } else {
        return refuse(p, "unknown field %s=", field);
    }
    return true;
}

/* A MIG instance is carved out of its GPU. */
static bool instance_fits(struct parser *p, struct machine_device *device)
{
    struct machine *machine = p->machine;
    if (device->parent < 0)
        return refuse(p, "parent= is missing");
    struct machine_device *parent = &machine->devices[device->parent];
    uint64_t sum = device->memory_bytes;
    for (unsigned i = 0; i < machine->count; i++)
        if (machine->devices[i].parent == device->parent)
            sum += machine->devices[i].memory_bytes;
    if (sum > parent->memory_bytes)
        return refuse(p, "the instances of %s have %llu MiB together, it has %llu", parent->uuid,
                      (unsigned long long)(sum / MACHINE_MIB), (unsigned long long)(parent->memory_bytes / MACHINE_MIB));
    if (parent->instances == MACHINE_INSTANCES)
        return refuse(p, "%s has %d instances already", parent->uuid, MACHINE_INSTANCES);
    device->ordinal = parent->instances++;
    device->major = parent->major;
    device->minor = parent->minor;
    if (!device->granularity_bytes)
        device->granularity_bytes = parent->granularity_bytes;
    return true;
}

static bool device_line(struct parser *p, char *rest, bool mig)
{
    struct machine *machine = p->machine;
    if (machine->count == MACHINE_DEVICES || (!mig && machine->gpu_count == MACHINE_GPUS))
        return refuse(p, "more than %d GPUs, or %d with MIG instances", MACHINE_GPUS, MACHINE_DEVICES);
    struct machine_device device = {.parent = -1, .sm_count = mig ? 16 : 132, .major = 9, .name = "Simulated GPU"};
    char seen[256] = " ";
    for (char *field = rest + strspn(rest, " "); *field; field += strspn(field, " ")) {
        char *equals = strchr(field, '=');
        char *end = field + strcspn(field, " ");
        if (!equals || equals > end)
            return refuse(p, "'%.*s' is not of the form name=value", (int)(end - field), field);
        *equals = 0;
        if (!strcmp(field, "name"))
            end = field + strlen(field) + 1 + strlen(equals + 1);
        bool last = !*end;
        *end = 0;
        char word[64];
        snprintf(word, sizeof word, " %.60s ", field);
        if (strstr(seen, word))
            return refuse(p, "%s= stands twice", field);
        if (strlen(seen) + strlen(word) < sizeof seen)
            strcat(seen, word);
        if (!device_field(p, &device, field, equals + 1, mig))
            return false;
        field = last ? end : end + 1;
    }
    if (!*device.uuid || !device.memory_bytes)
        return refuse(p, "%s= is missing", *device.uuid ? "memory_mib" : "uuid");
    if (device.context_bytes >= device.memory_bytes)
        return refuse(p, "context_mib= leaves nothing of memory_mib=");
    if (mig ? !instance_fits(p, &device) : false)
        return false;
    if (!mig)
        device.ordinal = machine->gpu_count++;
    machine->devices[machine->count++] = device;
    return true;
}

static bool one_line(struct parser *p, char *line)
{
    struct machine *machine = p->machine;
    unsigned major = 0, minor = 0;
    uint64_t n = 0;
    if (!strncmp(line, "gpu ", 4))
        return device_line(p, line + 4, false);
    if (!strncmp(line, "mig ", 4))
        return device_line(p, line + 4, true);
    if (!strncmp(line, "driver=", 7)) {
        if (!version(p, "driver", line + 7, &machine->driver_major, &minor))
            return false;
        if (strlen(line + 7) >= sizeof machine->driver)
            return refuse(p, "driver= is too long");
        strcpy(machine->driver, line + 7);
        return true;
    }
    if (!strncmp(line, "cuda=", 5)) {
        if (!version(p, "cuda", line + 5, &major, &minor))
            return false;
        if (major < 11 || major > 13 || minor > 9)
            return refuse(p, "%s is not from 11.0 to 13.9", line);
        machine->cuda_version = (int)(major * 1000 + minor * 10);
        return true;
    }
    if (!strncmp(line, "kernel_us=", 10)) {
        if (!number(p, "kernel_us", line + 10, 0, 60000000, &n))
            return false;
        machine->kernel_ns = n * 1000;
        return true;
    }
    if (!strncmp(line, "checkpoint_mib_s=", 17))
        return number(p, "checkpoint_mib_s", line + 17, 1, UINT64_C(1) << 24, &machine->checkpoint_mib_s);
    if (!strncmp(line, "checkpoint=", 11)) {
        static const char *const words[] = {"works", "none", "lock-stuck", "fails", "restore-fails"};
        for (unsigned i = 0; i < sizeof words / sizeof *words; i++)
            if (!strcmp(line + 11, words[i])) {
                machine->checkpoint = (enum machine_checkpoint)i;
                return true;
            }
        return refuse(p, "%.40s is none of works, none, lock-stuck, fails, restore-fails", line);
    }
    return refuse(p, "'%.40s' starts with none of gpu, mig, driver=, cuda=, kernel_us=, checkpoint=", line);
}

bool machine_parse(const char *text, struct machine *out, char *reason, size_t reason_size)
{
    struct parser p = {.machine = out, .reason = reason, .reason_size = reason_size};
    *out = (struct machine){.driver = "580.95.05", .driver_major = 580, .kernel_ns = 10000};
    while (*text) {
        char line[1024];
        size_t length = strcspn(text, "\n");
        p.line++;
        if (length >= sizeof line)
            return refuse(&p, "longer than %zu characters", sizeof line - 1);
        memcpy(line, text, length);
        line[length] = 0;
        text += length + (text[length] == '\n');
        line[strcspn(line, "#")] = 0;
        for (size_t end = strlen(line); end && (line[end - 1] == ' ' || line[end - 1] == '\r'); end--)
            line[end - 1] = 0;
        if (*line && !one_line(&p, line))
            return false;
    }
    if (!out->gpu_count)
        return refuse(&p, "no gpu line");
    if (!out->cuda_version)
        out->cuda_version = out->driver_major >= 615 ? 13040 : out->driver_major >= 580 ? 13000 : 12020;
    return true;
}

static bool read_machine(struct machine *out)
{
    static char text[MACHINE_FILE_BYTES];
    char path[4200], reason[512];
    const char *folder = machine_folder();
    if (!folder)
        return false;
    snprintf(path, sizeof path, "%s/machine", folder);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = file < 0 ? -1 : read(file, text, sizeof text - 1);
    int failure = errno;
    if (file >= 0)
        close(file);
    if (size < 0) {
        machine_log("%s cannot be read: %s", path, strerror(failure));
        return false;
    }
    text[size] = 0;
    if (!machine_parse(text, out, reason, sizeof reason)) {
        machine_log("%s", reason);
        return false;
    }
    return true;
}

const struct machine *machine_load(void)
{
    pthread_mutex_lock(&once);
    if (state == UNREAD)
        state = read_machine(&the_machine) && ledger_open(&the_machine) ? READ : UNREADABLE;
    pthread_mutex_unlock(&once);
    return state == READ ? &the_machine : NULL;
}
