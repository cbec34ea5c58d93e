/* The ledger: one sparse file, mapped by every process that uses the simulated machine. Each process writes what it
 * holds into a slot of its own, so that what a killed one held is what its slot says, and nothing has to be repaired. */
#include "machine.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef F_OFD_GETLK
#define F_OFD_GETLK 36
#endif

static const char magic[8] = {'s', 'i', 'm', 'l', 'e', 'd', 'g', '1'};

_Static_assert(sizeof(struct ledger_header) == 4096, "documented offset of the devices");
_Static_assert(sizeof(struct ledger_device) == 256, "documented stride of the devices");
_Static_assert(offsetof(struct ledger_device, busy_until) == 192, "documented offset");

static struct ledger *the_ledger;
static int descriptor = -1;
static dev_t file_device;
static ino_t file_inode;
static char path[4200];

/* glibc had no fstat of its own before 2.33. */
static bool is_ledger(int fd, struct stat *out)
{
    return syscall(SYS_fstat, fd, out) == 0 && (!the_ledger || (out->st_dev == file_device && out->st_ino == file_inode));
}

/* Opened once in each library and never closed: the first close of any descriptor of the file ends all POSIX locks that
 * the process has on it, also those of the other library. So the number must be right from the start: not one of those
 * that a program without standard output will take for it. */
static int open_file(void)
{
    int low[3], count = 0;
    while (count < 3 && (low[count] = open("/dev/null", O_RDWR | O_CLOEXEC)) >= 0 && low[count] < 3)
        count++;
    if (count < 3 && low[count] >= 0)
        close(low[count]);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) {
        fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        /* The processes of every user write it. */
        if (fd >= 0)
            fchmod(fd, 0666);
    }
    int failure = errno;
    while (count)
        close(low[--count]);
    errno = failure;
    return fd;
}

struct ledger *ledger_mapped(void)
{
    return the_ledger;
}

bool ledger_descriptor_holds(void)
{
    struct stat status;
    return is_ledger(descriptor, &status);
}

bool ledger_reopen(void)
{
    struct stat status;
    descriptor = open_file();
    return descriptor >= 0 && is_ledger(descriptor, &status);
}

bool ledger_lock_byte(int byte, bool wait)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    int result;
    do
        result = fcntl(descriptor, wait ? F_SETLKW : F_SETLK, &lock);
    while (result < 0 && errno == EINTR);
    return result == 0;
}

void ledger_unlock_byte(int byte)
{
    struct flock lock = {.l_type = F_UNLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    fcntl(descriptor, F_SETLK, &lock);
}

pid_t ledger_owner(unsigned slot)
{
    /* The OFD form also sees the lock of this very process. */
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = LEDGER_LOCK_SLOT + (off_t)slot, .l_len = 1};
    if (fcntl(descriptor, F_OFD_GETLK, &lock) < 0 || lock.l_type == F_UNLCK)
        return -1;
    return lock.l_pid > 0 ? lock.l_pid : 0;
}

bool ledger_is_checkpointed(const struct ledger_slot *slot)
{
    return atomic_load(&slot->checkpoint) == 2; /* CU_PROCESS_STATE_CHECKPOINTED */
}

uint64_t ledger_held(const struct ledger_slot *slot, unsigned block)
{
    return ledger_is_checkpointed(slot) ? 0 : atomic_load(&slot->holdings[block].bytes);
}

uint64_t ledger_used(const struct machine_device *device)
{
    struct ledger *ledger = the_ledger;
    uint64_t sum = 0;
    for (unsigned i = 0; i < atomic_load(&ledger->header.watermark); i++) {
        uint64_t bytes = ledger_held(&ledger->slots[i], device->block);
        if (bytes && ledger_owner(i) >= 0)
            sum += bytes;
    }
    return sum;
}

uint64_t ledger_busy_in(const struct ledger_slot *slot, unsigned block, uint64_t now, uint64_t window)
{
    uint64_t from = now - window, sum = 0;
    uint32_t count = atomic_load(&slot->spell_count);
    for (uint32_t i = 0; i < count && i < LEDGER_SPELLS; i++) {
        const struct ledger_spell *spell = &slot->spells[i];
        uint64_t start = atomic_load(&spell->start), end = atomic_load(&spell->end);
        if (atomic_load(&spell->block) != block || end <= from || start >= now || start >= end)
            continue;
        uint64_t inside = (end < now ? end : now) - (start > from ? start : from);
        sum += (uint64_t)((double)atomic_load(&spell->busy) * (double)inside / (double)(end - start));
    }
    return sum < window ? sum : window;
}

/* ---- opening ------------------------------------------------------------------------------------ */

static bool in_use(unsigned block)
{
    for (unsigned i = 0; i < atomic_load(&the_ledger->header.watermark); i++)
        if (atomic_load(&the_ledger->slots[i].touched) >> block & 1 && ledger_owner(i) >= 0)
            return true;
    return false;
}

static void give_block(unsigned block, const struct machine_device *device)
{
    struct ledger_device *entry = &the_ledger->devices[block];
    memset(entry, 0, sizeof *entry);
    memcpy(entry->uuid, device->uuid, sizeof entry->uuid);
    atomic_store(&entry->bytes, device->memory_bytes);
}

/* The device's block is found by its UUID: sessions' machines need not list the same devices in the same order. */
static bool find_block(struct machine_device *device)
{
    int place = -1;
    for (unsigned i = 0; i < MACHINE_DEVICES && place < 0; i++)
        if (!strncmp(the_ledger->devices[i].uuid, device->uuid, MACHINE_UUID_BYTES))
            place = (int)i;
    if (place >= 0 && atomic_load(&the_ledger->devices[place].bytes) != device->memory_bytes) {
        if (in_use((unsigned)place)) {
            machine_log("%s is in use with another memory_mib than this machine file's", device->uuid);
            return false;
        }
        give_block((unsigned)place, device);
    }
    for (int free_only = 1; free_only >= 0 && place < 0; free_only--)
        for (unsigned i = 0; i < MACHINE_DEVICES && place < 0; i++)
            if (free_only ? !*the_ledger->devices[i].uuid : !in_use(i)) {
                give_block(i, device);
                place = (int)i;
            }
    if (place < 0) {
        machine_log("the ledger has no room for %s: remove it while nothing uses it", device->uuid);
        return false;
    }
    device->block = (unsigned)place;
    return true;
}

static bool map_file(void)
{
    struct stat status;
    descriptor = open_file();
    if (descriptor < 0) {
        machine_log("%s cannot be opened for writing: %s", path, strerror(errno));
        return false;
    }
    /* Of this lock, unlike of POSIX ones, each library of a process has its own. */
    flock(descriptor, LOCK_EX);
    bool right = is_ledger(descriptor, &status);
    if (right && status.st_size == 0 && ftruncate(descriptor, (off_t)sizeof(struct ledger)) == 0)
        right = pwrite(descriptor, magic, sizeof magic, 0) == sizeof magic && is_ledger(descriptor, &status);
    char found[sizeof magic] = "";
    if (!right || status.st_size != (off_t)sizeof(struct ledger) ||
        pread(descriptor, found, sizeof found, 0) != sizeof found || memcmp(found, magic, sizeof magic) != 0) {
        machine_log("%s is not a ledger of this version: remove it while nothing uses it", path);
        return false;
    }
    void *address = mmap(NULL, sizeof(struct ledger), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (address == MAP_FAILED) {
        machine_log("%s cannot be mapped: %s", path, strerror(errno));
        return false;
    }
    file_device = status.st_dev;
    file_inode = status.st_ino;
    the_ledger = address;
    return true;
}

struct ledger *ledger_open(struct machine *machine)
{
    snprintf(path, sizeof path, "%s/ledger", machine_folder());
    bool right = map_file();
    for (unsigned i = 0; right && i < machine->count; i++)
        right = find_block(&machine->devices[i]);
    if (descriptor >= 0)
        flock(descriptor, LOCK_UN);
    return right ? the_ledger : NULL;
}
