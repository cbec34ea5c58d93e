/* Reports the slots of libfgpu's accounting file that living processes hold, and which processes run. */
#include "probe.h"

#include "../libfgpu/region.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef F_OFD_GETLK
#define F_OFD_GETLK 36
#endif

bool slot_is_held(int descriptor, unsigned slot)
{
    struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = (off_t)slot, .l_len = 1};

    return fcntl(descriptor, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

#define MOST_AMOUNTS 32 /* so that the line stays short */

static struct region_owner owners[REGION_SLOTS];
static bool held[REGION_SLOTS];

/* Read, never mapped: the session may truncate the file at any time. */
static void tell_slots(struct json *json, int descriptor)
{
    size_t size = sizeof(owners);

    if (pread(descriptor, owners, size, offsetof(struct region, owner)) != (ssize_t)size) {
        json_raw(json, "null");
        return;
    }
    json_raw(json, "[");
    for (unsigned slot = 0; slot < REGION_SLOTS; slot++) {
        held[slot] = slot_is_held(descriptor, slot);
        if (held[slot]) {
            json_next(json);
            json_number(json, owners[slot].pid);
        }
    }
    json_raw(json, "]");
}

/* The processes among them that could not read the changed limits. */
static void tell_behind(struct json *json)
{
    for (unsigned slot = 0; slot < REGION_SLOTS; slot++)
        if (held[slot] && owners[slot].behind) {
            json_next(json);
            json_number(json, owners[slot].pid);
        }
}

static bool is_asked(const char *processes, uint64_t process)
{
    char *end;

    for (const char *rest = processes; *rest != '\0'; rest = end + (*end == ','))
        if (strtoul(rest, &end, 10) == process && end != rest)
            return true;
        else if (end == rest)
            end++;
    return false;
}

/* For each slot of a requested process: its number, and what it holds of each device. */
static void tell_amounts(struct json *json, int descriptor, const char *processes)
{
    unsigned told = 0;

    for (unsigned slot = 0; slot < REGION_SLOTS && told < MOST_AMOUNTS; slot++) {
        if (!held[slot] || !is_asked(processes, owners[slot].pid))
            continue;
        told++;
        json_next(json);
        json_raw(json, "[");
        json_number(json, owners[slot].pid);
        for (unsigned device = 0; device < FGPU_MAX_DEVICES; device++) {
            uint64_t amount = 0;
            off_t place = (off_t)(offsetof(struct region, cell[0][0].committed) +
                                  (device * REGION_SLOTS + slot) * sizeof(struct region_cell));

            if (pread(descriptor, &amount, sizeof(amount), place) != (ssize_t)sizeof(amount))
                amount = 0;
            json_next(json);
            json_number(json, amount);
        }
        json_raw(json, "]");
    }
}

/* For each device, the sum of all: nothing beyond these commitments is granted by an older limit. */
static void tell_held(struct json *json, int descriptor)
{
    for (unsigned device = 0; device < FGPU_MAX_DEVICES; device++) {
        uint64_t sum = 0;

        for (unsigned slot = 0; slot < REGION_SLOTS; slot++) {
            uint64_t amount = 0;
            off_t place = (off_t)(offsetof(struct region, cell[0][0].committed) +
                                  (device * REGION_SLOTS + slot) * sizeof(struct region_cell));

            if (held[slot] && pread(descriptor, &amount, sizeof(amount), place) != (ssize_t)sizeof(amount))
                amount = (uint64_t)1 << 62; /* unknown: count as too much */
            sum += amount;
        }
        json_next(json);
        json_number(json, sum);
    }
}

static bool has_memory(const char *path)
{
    unsigned long pages = 0;
    FILE *file = fopen(path, "re");

    if (file == NULL)
        return false;
    if (fscanf(file, "%lu", &pages) != 1)
        pages = 0;
    fclose(file);
    return pages > 0;
}

/* Whether one of its threads has memory: otherwise it has ended, or is being taken apart, which can take long with a
 * GPU. Its first thread may have ended before the others. */
static bool runs(unsigned long process)
{
    char path[64];
    const struct dirent *thread;
    bool found = false;
    DIR *threads;

    snprintf(path, sizeof(path), "/proc/%lu/task", process);
    threads = opendir(path);
    while (threads != NULL && !found && (thread = readdir(threads)) != NULL) {
        snprintf(path, sizeof(path), "/proc/%lu/task/%.20s/statm", process, thread->d_name);
        found = has_memory(path);
    }
    if (threads != NULL)
        closedir(threads);
    return found;
}

/* Of the requested processes, those that took a slot lately, whether or not they still run. */
static void tell_lately(struct json *json, int descriptor, const char *processes)
{
    static uint32_t lately[REGION_LATELY];

    if (pread(descriptor, lately, sizeof(lately), offsetof(struct region, lately)) != (ssize_t)sizeof(lately))
        return;
    for (unsigned i = 0; i < REGION_LATELY; i++)
        if (lately[i] != 0 && is_asked(processes, lately[i])) {
            json_next(json);
            json_number(json, lately[i]);
        }
}

/* The slots come first: a process that gives its slot back in between has ended by then. */
void probe_slots(struct json *json, const struct options *options)
{
    int descriptor = open(options->accounting, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
    const char *rest = options->processes;
    char *end;

    json_name(json, "slots");
    if (descriptor >= 0)
        tell_slots(json, descriptor);
    else
        /* No process was counted yet: libfgpu makes the file. */
        json_raw(json, errno == ENOENT ? "[]" : "null");
    json_name(json, "behind");
    json_raw(json, "[");
    tell_behind(json);
    json_raw(json, "]");
    json_name(json, "running");
    json_raw(json, "[");
    while (*rest != '\0') {
        unsigned long process = strtoul(rest, &end, 10);

        if (runs(process)) {
            json_next(json);
            json_number(json, process);
        }
        rest = end + strcspn(end, ",");
        rest += *rest == ',';
    }
    json_raw(json, "]");
    json_name(json, "lately");
    json_raw(json, "[");
    if (descriptor >= 0)
        tell_lately(json, descriptor, options->processes);
    json_raw(json, "]");
    json_name(json, "amounts");
    json_raw(json, "[");
    if (descriptor >= 0)
        tell_amounts(json, descriptor, options->processes);
    json_raw(json, "]");
    json_name(json, "held");
    json_raw(json, "[");
    if (descriptor >= 0)
        tell_held(json, descriptor);
    json_raw(json, "]");
    if (descriptor >= 0)
        close(descriptor);
}
