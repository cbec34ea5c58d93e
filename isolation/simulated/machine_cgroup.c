/* Memory limits of cgroups, as drivers from r615 on have them. A cgroup is known by the inode of its folder, which is
 * the same in every cgroup namespace and mount. */
#include "machine.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Where cgroup v2 is mounted: alone, or beside the controllers of v1. */
static const char *const mounts[] = {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"};

static const char *mount_point(void)
{
    char probe[64];
    for (unsigned i = 0; i < sizeof mounts / sizeof *mounts; i++) {
        snprintf(probe, sizeof probe, "%s/cgroup.procs", mounts[i]);
        if (access(probe, F_OK) == 0)
            return mounts[i];
    }
    return NULL;
}

static uint64_t inode_of(const char *path)
{
    struct stat status;
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    uint64_t inode = folder >= 0 && syscall(SYS_fstat, folder, &status) == 0 ? (uint64_t)status.st_ino : 0;
    if (folder >= 0)
        close(folder);
    return inode;
}

uint64_t cgroup_inode(const char *path)
{
    char whole[4400];
    const char *mount = mount_point();
    if (!mount || *path != '/' || strstr(path, "/../"))
        return 0;
    /* Full paths below the mount are taken too. */
    if (!strncmp(path, mount, strlen(mount)))
        return inode_of(path);
    snprintf(whole, sizeof whole, "%s%s", mount, path);
    return inode_of(whole);
}

void cgroup_chain(uint64_t chain[LEDGER_CGROUPS])
{
    char text[4096], path[4200];
    unsigned count = 0;
    memset(chain, 0, LEDGER_CGROUPS * sizeof *chain);
    int file = open("/proc/self/cgroup", O_RDONLY | O_CLOEXEC);
    ssize_t size = file < 0 ? 0 : read(file, text, sizeof text - 1);
    if (file >= 0)
        close(file);
    text[size > 0 ? size : 0] = 0;
    char *line = !strncmp(text, "0::/", 4) ? text : strstr(text, "\n0::/");
    if (!line)
        return;
    line += *line == '\n' ? 4 : 3;
    line[strcspn(line, "\n")] = 0;
    for (;;) {
        snprintf(path, sizeof path, "%s", line);
        uint64_t inode = cgroup_inode(*path ? path : "/");
        if (inode && count < LEDGER_CGROUPS - 1 && (count == 0 || chain[count - 1] != inode))
            chain[count++] = inode;
        char *slash = strrchr(line, '/');
        if (!slash || (slash == line && !slash[1]))
            return;
        slash[slash == line] = 0;
    }
}

uint64_t cgroup_limit(const struct machine_device *device, uint64_t cgroup)
{
    struct ledger *ledger = ledger_mapped();
    for (unsigned i = 0; cgroup && i < LEDGER_LIMITS; i++)
        if (atomic_load(&ledger->limits[i].cgroup) == cgroup)
            return atomic_load(&ledger->limits[i].devices[device->block].hard);
    return LEDGER_NO_LIMIT;
}

static bool is_below(const struct ledger_slot *slot, uint64_t cgroup)
{
    bool below = false;
    for (unsigned level = 0; level < LEDGER_CGROUPS; level++)
        below = below || atomic_load(&slot->cgroups[level]) == cgroup;
    return below;
}

uint64_t cgroup_used(const struct machine_device *device, uint64_t cgroup)
{
    struct ledger *ledger = ledger_mapped();
    uint64_t sum = 0;
    for (unsigned i = 0; i < atomic_load(&ledger->header.watermark); i++) {
        struct ledger_slot *slot = &ledger->slots[i];
        uint64_t bytes = ledger_held(slot, device->block);
        if (bytes && is_below(slot, cgroup) && ledger_owner(i) >= 0)
            sum += bytes;
    }
    return sum;
}

uint64_t cgroup_reserved(const struct machine_device *device, const struct ledger_slot *slot)
{
    struct ledger *ledger = ledger_mapped();
    uint64_t sum = 0;
    for (unsigned i = 0; i < LEDGER_LIMITS; i++) {
        uint64_t cgroup = atomic_load(&ledger->limits[i].cgroup);
        uint64_t soft = cgroup ? atomic_load(&ledger->limits[i].devices[device->block].soft) : 0;
        uint64_t used = soft ? cgroup_used(device, cgroup) : 0;
        if (soft > used && !is_below(slot, cgroup))
            sum += soft - used;
    }
    return sum;
}
