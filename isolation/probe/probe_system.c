#include "probe.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define PRELOAD "/etc/ld.so.preload"
#define LONGEST_PRELOAD 4096

struct mapping {
    char device[24];
    char inode[24];
    char path[4096];
};

/* Splits one line of /proc/self/maps: address permissions offset device inode path. */
static bool take_apart(char *line, struct mapping *mapping)
{
    char *rest = line;
    const char *fields[5];

    line[strcspn(line, "\n")] = '\0';
    for (size_t i = 0; i < 5; i++) {
        char *field = strsep(&rest, " ");

        if (field == NULL || rest == NULL)
            return false;
        fields[i] = field;
    }
    rest += strspn(rest, " ");
    if (*rest != '/' || strlen(fields[3]) >= sizeof(mapping->device) || strlen(fields[4]) >= sizeof(mapping->inode) ||
        strlen(rest) >= sizeof(mapping->path))
        return false;
    memcpy(mapping->device, fields[3], strlen(fields[3]) + 1);
    memcpy(mapping->inode, fields[4], strlen(fields[4]) + 1);
    memcpy(mapping->path, rest, strlen(rest) + 1);
    return true;
}

static bool next_mapped(FILE *maps, const char *name, struct mapping *mapping)
{
    char line[4096 + 256];

    while (fgets(line, sizeof(line), maps) != NULL) {
        if (!take_apart(line, mapping))
            continue;
        if (strncmp(strrchr(mapping->path, '/') + 1, name, strlen(name)) == 0)
            return true;
    }
    return false;
}

void system_mapped(struct json *json, const char *name)
{
    struct mapping mapping, before = {"", "", ""};
    FILE *maps = fopen("/proc/self/maps", "re");

    if (maps == NULL) {
        /* Not an empty list: the mappings are unknown. */
        json_raw(json, "null");
        return;
    }
    json_raw(json, "[");
    while (next_mapped(maps, name, &mapping)) {
        /* The segments of one file are consecutive. */
        if (strcmp(mapping.path, before.path) == 0 && strcmp(mapping.inode, before.inode) == 0)
            continue;
        before = mapping;
        json_next(json);
        json_raw(json, "{");
        json_name(json, "path");
        json_string(json, mapping.path);
        json_name(json, "device");
        json_string(json, mapping.device);
        json_name(json, "inode");
        json_raw(json, mapping.inode);
        json_raw(json, "}");
    }
    json_raw(json, "]");
    fclose(maps);
}

bool system_mapped_path(const char *name, char *path, size_t size)
{
    struct mapping mapping;
    FILE *maps = fopen("/proc/self/maps", "re");
    bool found = maps != NULL && next_mapped(maps, name, &mapping) && strlen(mapping.path) < size;

    if (found)
        memcpy(path, mapping.path, strlen(mapping.path) + 1);
    if (maps != NULL)
        fclose(maps);
    return found;
}

/* Whether a file is a mount of its own: the fifth field of /proc/self/mountinfo. */
static bool is_mount(const char *path)
{
    char line[8192];
    bool found = false;
    FILE *mounts = fopen("/proc/self/mountinfo", "re");

    while (mounts != NULL && !found && fgets(line, sizeof(line), mounts) != NULL) {
        char *rest = line, *field = NULL;

        for (int i = 0; i < 5; i++)
            field = strsep(&rest, " ");
        found = field != NULL && strcmp(field, path) == 0;
    }
    if (mounts != NULL)
        fclose(mounts);
    return found;
}

void system_preload(struct json *json)
{
    char content[LONGEST_PRELOAD + 1], device[32];
    struct stat status;
    struct statvfs volume;
    size_t size = 0;
    /* A manipulated image may have put anything there, even a pipe. */
    int descriptor = open(PRELOAD, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);

    json_raw(json, "{");
    json_name(json, "path");
    json_string(json, PRELOAD);
    json_name(json, "error");
    /* By system call: fstat is a newer symbol than old systems have. */
    if (descriptor < 0 || syscall(SYS_fstat, descriptor, &status) != 0) {
        json_string(json, strerror(errno));
    } else if (!S_ISREG(status.st_mode)) {
        json_string(json, "not a regular file");
    } else {
        ssize_t got;

        while (size < sizeof(content) && (got = read(descriptor, content + size, sizeof(content) - size)) > 0)
            size += (size_t)got;
        json_raw(json, "null");
        json_name(json, "content");
        json_bytes(json, content, size < LONGEST_PRELOAD ? size : LONGEST_PRELOAD);
        json_name(json, "complete");
        json_raw(json, size > LONGEST_PRELOAD ? "false" : "true");
        snprintf(device, sizeof(device), "%02x:%02x", major(status.st_dev), minor(status.st_dev));
        json_name(json, "device");
        json_string(json, device);
        json_name(json, "inode");
        json_number(json, status.st_ino);
        json_name(json, "read_only");
        json_raw(json, fstatvfs(descriptor, &volume) == 0 && (volume.f_flag & ST_RDONLY) != 0 ? "true" : "false");
        json_name(json, "mount");
        json_raw(json, is_mount(PRELOAD) ? "true" : "false");
    }
    json_raw(json, "}");
    if (descriptor >= 0)
        close(descriptor);
}
