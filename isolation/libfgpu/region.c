/* What the session's processes hold. README.md, "Accounting", has the idea; region.h the layout.
 *
 * Why the limit holds. A process that reserves first announces (adds to its `pending`), then sums all slots. From
 * announcement to release each reservation is visible, in `pending` or in `committed` or briefly in both: the owner
 * adds to the second before it subtracts from the first, and a reader reads the first before the second. Of all
 * reservations held at some time, take the one announced last: its sum contained all the others. Everything is
 * sequentially consistent, so "last" has a meaning.
 *
 * A sum is not a snapshot: bytes released in one slot and reserved in another during the sum may count twice. So a sum
 * within the limit grants at once, and one above it is examined by reserve_contended().
 *
 * A session that truncates the file gets its processes killed by SIGBUS, and one that writes into it cheats: the region
 * belongs to the session. Values from it are bounded before use, nothing more. */
#include "region.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif
#ifndef F_OFD_SETLK
#define F_OFD_GETLK 36
#define F_OFD_SETLK 37
#endif

#define PATIENCE_NS INT64_C(100000000) /* how long to wait for other processes' reservations in progress */
#define CLAIM_PASSES 50 /* over all slots, for a free one */
#define COLLECTS 8 /* sums for a report until two are equal */
/* Instead of a slot. */
#define ALL_TAKEN (-1)
#define UNUSABLE (-2)

/* ---- This process ---- */

/* On a page that is zero in each child, however it was forked: a child starts without a slot, and without locks of
 * threads that it does not have. */
struct process {
    _Atomic(uint32_t) known; /* 0: a child that was not noticed yet */
    _Atomic(uint32_t) slot_plus_one; /* 0: none */
    _Atomic(uint32_t) opener; /* the thread that has a descriptor of the region open; forks wait for it */
    uint32_t forks_inside;           /* by the opener itself, in signal handlers; touched by that thread only */
    _Atomic(uint32_t) contender;     /* 1: a thread is in reserve_contended() */
};

static struct process *_Atomic process_page;
_Atomic(uint32_t) *_Atomic fgpu_process_known;
static struct region *_Atomic region_pages;

static struct process *this_process(void) {
    struct process *found = atomic_load_explicit(&process_page, memory_order_acquire);
    if (__builtin_expect(found != NULL, 1))
        return found;
    struct process *mine =
        mmap(NULL, sizeof *mine, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mine == MAP_FAILED) {
        fgpu_log("page", "there is no memory for a page; every allocation is refused");
        return NULL;
    }
    if (madvise(mine, sizeof *mine, MADV_WIPEONFORK) != 0) {
        fgpu_log("wipe", "the kernel has no MADV_WIPEONFORK (Linux 4.14); every allocation is refused");
        munmap(mine, sizeof *mine);
        return NULL;
    }
    atomic_store(&mine->known, 1);
    if (atomic_compare_exchange_strong(&process_page, &found, mine)) {
        atomic_store(&fgpu_process_known, &mine->known);
        return mine;
    }
    munmap(mine, sizeof *mine);
    return found;
}

bool fgpu_forked_perhaps(void) {
    struct process *process = this_process();
    uint32_t unknown = 0;
    return process != NULL && atomic_compare_exchange_strong(&process->known, &unknown, 1);
}

static void pause_for(long ns) {
    struct timespec time = {.tv_nsec = ns};
    syscall(SYS_nanosleep, &time, NULL); /* not a cancellation point, unlike nanosleep() */
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Around everything that has a descriptor of the region open. False: this thread is already inside, and a signal
 * handler has come here. */
static bool begin_opening(struct process *process) {
    uint32_t me = (uint32_t)syscall(SYS_gettid), nobody = 0;
    while (!atomic_compare_exchange_weak(&process->opener, &nobody, me)) {
        if (nobody == me)
            return false;
        if (nobody != 0)
            pause_for(20000);
        nobody = 0;
    }
    return true;
}

static void end_opening(struct process *process) {
    atomic_store(&process->opener, 0);
}

/* A child would keep the descriptor, and with it the lock, that was open during its fork. So forks wait. A child made
 * by the bare system call does not: then the slot stays taken until that child ends or executes another program, which
 * is the safe side. */
static void before_fork(void) {
    struct process *process = atomic_load(&process_page);
    if (process != NULL && !begin_opening(process))
        process->forks_inside++;
}

static void after_fork_in_parent(void) {
    struct process *process = atomic_load(&process_page);
    if (process == NULL || atomic_load(&process->opener) != (uint32_t)syscall(SYS_gettid))
        return; /* the page is newer than the begin of the fork */
    if (process->forks_inside > 0)
        process->forks_inside--;
    else
        end_opening(process);
}

__attribute__((constructor)) static void prepare_for_forks(void) {
    this_process(); /* before there is anything for a child to inherit */
    pthread_atfork(before_fork, after_fork_in_parent, NULL);
}

/* ---- The file ---- */

static int open_region(void) {
    struct stat status;
    const char *why;
    /* A link is followed: the spawner links it from a tmpfs. */
    int descriptor = fgpu_open_written("accounting", O_RDWR | FGPU_FOLLOW, FGPU_REGION_BYTES, &status, &why);
    if (descriptor < 0) {
        fgpu_log("accounting", "the file accounting %s; every allocation is refused", why);
    } else if (status.st_size != FGPU_REGION_BYTES) {
        fgpu_log("size", "the file accounting has %lld bytes, not %llu; every allocation is refused",
                 (long long)status.st_size, (unsigned long long)FGPU_REGION_BYTES);
        fgpu_close(descriptor);
        descriptor = -1;
    }
    return descriptor;
}

/* Children inherit these pages. They come from another file description than the slot's lock. */
static struct region *this_region(void) {
    struct region *found = atomic_load_explicit(&region_pages, memory_order_acquire);
    if (__builtin_expect(found != NULL, 1))
        return found;
    int descriptor = open_region();
    if (descriptor < 0)
        return NULL;
    struct region *mine = mmap(NULL, sizeof *mine, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    fgpu_close(descriptor);
    if (mine == MAP_FAILED) {
        fgpu_log("map", "the file accounting cannot be mapped (error %d); every allocation is refused", errno);
        return NULL;
    }
    uint64_t magic = 0;
    if (!atomic_compare_exchange_strong(&mine->magic, &magic, REGION_MAGIC) && magic != REGION_MAGIC) {
        fgpu_log("magic", "the file accounting begins with %#llx, not with zeros and not with what this libfgpu writes "
                 "there; every allocation is refused", (unsigned long long)magic);
        munmap(mine, sizeof *mine);
        return NULL;
    }
    if (atomic_compare_exchange_strong(&region_pages, &found, mine))
        return mine;
    munmap(mine, sizeof *mine);
    return found;
}

static bool set_lock(int descriptor, short type, unsigned slot) {
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)slot, .l_len = 1};
    return fcntl(descriptor, F_OFD_SETLK, &lock) == 0;
}

static unsigned high_water(struct region *region) {
    uint64_t slots = atomic_load(&region->high_water);
    return slots < REGION_SLOTS ? (unsigned)slots : REGION_SLOTS;
}

/* ---- Slots ---- */

/* The number of devices with limits: the pages of the others stay untouched. */
static unsigned devices(void) {
    const struct fgpu_limits *limits = fgpu_limits();
    return limits == NULL ? 0 : limits->device_count;
}

/* A slot's cells are cleared under a read lock, which is available only if no process has the write lock. Several may
 * clear at once, as all write zeros. With a write lock the second one would take the first for the living owner and
 * refuse a free slot. */
static void clear(struct region *region, unsigned slot) {
    for (unsigned device = 0; device < devices(); device++) {
        atomic_store(&region->cell[device][slot].pending, 0);
        atomic_store(&region->cell[device][slot].committed, 0);
        atomic_store(&region->cell[device][slot].code, 0);
    }
    atomic_store(&region->owner[slot].behind, 0);
    atomic_store(&region->owner[slot].pid, 0);
}

static bool holds_anything(struct region *region, unsigned slot) {
    for (unsigned device = 0; device < devices(); device++) {
        struct region_cell *cell = &region->cell[device][slot];
        if (atomic_load(&cell->pending) | atomic_load(&cell->committed) | atomic_load(&cell->code))
            return true;
    }
    return false;
}

static void clear_dead(struct process *process, struct region *region) {
    unsigned own = atomic_load(&process->slot_plus_one);
    int descriptor = -1;
    bool inside = false;
    for (unsigned slot = 0; slot < high_water(region); slot++) {
        if (slot + 1 == own || !holds_anything(region, slot))
            continue;
        if (!inside && !(inside = begin_opening(process)))
            return;
        if (descriptor < 0 && (descriptor = open_region()) < 0)
            break;
        if (set_lock(descriptor, F_RDLCK, slot)) {
            clear(region, slot);
            set_lock(descriptor, F_UNLCK, slot);
        }
    }
    if (descriptor >= 0)
        fgpu_close(descriptor);
    if (inside)
        end_opening(process);
}

/* The inode of this process's PID namespace; 0 without /proc. */
static uint64_t pid_namespace(void) {
    struct stat status;
    return syscall(SYS_newfstatat, AT_FDCWD, "/proc/self/ns/pid", &status, 0) == 0 ? (uint64_t)status.st_ino : 0;
}

/* Locks a free slot's byte, cleared: first read-locked and cleared, then write-locked, so that a write lock never
 * covers what a dead process left. Two processes at one slot block each other's write lock; both then let go, and
 * passes of different speed separate them. */
static int lock_free_slot(struct region *region, int descriptor) {
    for (int pass = 0; pass < CLAIM_PASSES; pass++) {
        bool met = false;
        for (unsigned slot = 0; slot < REGION_SLOTS; slot++) {
            if (!set_lock(descriptor, F_RDLCK, slot)) {
                if (errno != EAGAIN && errno != EACCES)
                    return UNUSABLE;
                continue;
            }
            clear(region, slot);
            if (set_lock(descriptor, F_WRLCK, slot))
                return (int)slot;
            met = true;
            set_lock(descriptor, F_UNLCK, slot);
        }
        if (!met)
            break;
        pause_for(10000L + (long)(syscall(SYS_getpid) * 7919 % 100) * 1000);
    }
    return ALL_TAKEN;
}

/* The lock lives as long as its file description, and that as long as this mapping: until the process ends or executes
 * another program. No descriptor is left for the program to close, and no child inherits the mapping. */
static int claim_with(struct region *region, int descriptor) {
    size_t size = (size_t)sysconf(_SC_PAGESIZE);
    void *life = mmap(NULL, size, PROT_NONE, MAP_SHARED, descriptor, 0);
    if (life == MAP_FAILED) {
        fgpu_log("map", "the file accounting cannot be mapped (error %d); every allocation is refused", errno);
        return -1;
    }
    int slot = madvise(life, size, MADV_DONTFORK) == 0 ? lock_free_slot(region, descriptor) : UNUSABLE;
    if (slot == UNUSABLE)
        fgpu_log("lock", "the file accounting cannot be locked (error %d); every allocation is refused", errno);
    if (slot == ALL_TAKEN)
        fgpu_log("slots", "all %d slots are taken: so many processes of the session use a GPU; this one is refused",
                 REGION_SLOTS);
    if (slot < 0) {
        munmap(life, size);
        return -1;
    }
    uint64_t water = atomic_load(&region->high_water);
    while (water < (uint64_t)slot + 1 &&
           !atomic_compare_exchange_weak(&region->high_water, &water, (uint64_t)slot + 1))
        ;
    atomic_store(&region->owner[slot].namespace, pid_namespace());
    uint32_t pid = (uint32_t)syscall(SYS_getpid);
    atomic_store(&region->owner[slot].pid, pid);
    /* After its end this still shows that it was counted. */
    atomic_store(&region->lately[atomic_fetch_add(&region->started, 1) % REGION_LATELY], pid);
    return slot;
}

static int claim_slot(struct process *process, struct region *region) {
    if (!begin_opening(process))
        return -1;
    int slot = (int)atomic_load(&process->slot_plus_one) - 1; /* another thread may have been faster */
    if (slot < 0) {
        int descriptor = open_region();
        if (descriptor >= 0) {
            slot = claim_with(region, descriptor);
            if (slot >= 0)
                atomic_store(&process->slot_plus_one, (uint32_t)slot + 1);
            fgpu_close(descriptor);
        }
    }
    end_opening(process);
    return slot;
}

/* This process's slot, taken now if it has none; -1, with the reason in the log, if it cannot have one. */
static inline int this_slot(struct process *process, struct region *region) {
    int slot = (int)atomic_load_explicit(&process->slot_plus_one, memory_order_acquire) - 1;
    return __builtin_expect(slot >= 0, 1) ? slot : claim_slot(process, region);
}

/* The cells of one device, one for each slot, and which slot is this process's (-1: not looked for). */
struct row {
    struct process *process;
    struct region *region;
    struct region_cell *cells; /* of the device */
    uint64_t code; /* the least that is charged for the code of kernels */
    int slot;
    int device;
};

static inline bool find_row(int device, struct row *row) {
    const struct fgpu_limits *limits = fgpu_limits();
    if (__builtin_expect(limits == NULL || device < 0 || (unsigned)device >= limits->device_count, 0))
        return false;
    row->process = this_process();
    row->region = row->process ? this_region() : NULL;
    if (__builtin_expect(row->region == NULL, 0))
        return false;
    row->cells = row->region->cell[device];
    row->code = limits->devices[device].code_bytes;
    row->device = device;
    row->slot = -1;
    return true;
}

static inline bool find_own_row(int device, struct row *row) {
    return find_row(device, row) && (row->slot = this_slot(row->process, row->region)) >= 0;
}

/* ---- Sums ---- */

struct sums {
    uint64_t pending, committed; /* `committed` with the code of kernels */
    uint64_t fingerprint; /* of all `committed`: if equal, the state is assumed to be the same */
    bool lower_announced; /* a slot before this process's has something pending */
};

static inline struct sums sum(const struct row *row) {
    struct sums sums = {0};
    uint64_t code = 0;
    int slots = (int)high_water(row->region);
    for (int slot = 0; slot < slots; slot++) {
        uint64_t pending = atomic_load(&row->cells[slot].pending); /* before committed: see the top of the file */
        uint64_t committed = atomic_load(&row->cells[slot].committed);
        sums.pending += pending;
        sums.committed += committed;
        code += atomic_load_explicit(&row->cells[slot].code, memory_order_relaxed);
        sums.fingerprint = sums.fingerprint * UINT64_C(0x9e3779b97f4a7c15) + committed;
        sums.lower_announced |= pending != 0 && slot < row->slot;
    }
    /* The host and the processes count the same memory. */
    sums.committed += code > row->code ? code : row->code;
    return sums;
}

static inline void raise_peak(const struct row *row, uint64_t bytes) {
    _Atomic(uint64_t) *peak = &row->region->peak[row->device];
    uint64_t before = atomic_load_explicit(peak, memory_order_relaxed);
    while (before < bytes && !atomic_compare_exchange_weak(peak, &before, bytes))
        ;
}

static inline enum fgpu_verdict commit(const struct row *row, uint64_t bytes, struct sums sums) {
    struct region_cell *own = &row->cells[row->slot];
    atomic_fetch_add(&own->committed, bytes);
    atomic_fetch_sub(&own->pending, bytes);
    raise_peak(row, sums.committed + bytes);
    return FGPU_GRANTED;
}

/* ---- Reservations ---- */

/* Examines a sum above the limit, in one thread of each process at a time. Dead slots are cleared. If only other
 * processes' announcements are in the way, it waits for their decision: the lowest slot stays announced, the others
 * step back, so it gets through, and then the next one. It ends after PATIENCE_NS, as an announced process may be
 * stopped. "Over" is returned if two consecutive sums saw the same state and were both over. */
static enum fgpu_verdict reserve_patiently(const struct row *row, uint64_t bytes, uint64_t limit,
                                           int64_t deadline) {
    struct region_cell *own = &row->cells[row->slot];
    bool announced = false, over_before = false;
    uint64_t fingerprint_before = 0;
    for (unsigned tries = 0; tries == 0 || now_ns() < deadline; tries++) {
        if (tries % 16 == 0)
            clear_dead(row->process, row->region);
        struct sums sums = sum(row);
        if (announced == sums.lower_announced) {
            if (announced)
                atomic_fetch_sub(&own->pending, bytes);
            else
                atomic_fetch_add(&own->pending, bytes);
            announced = !announced;
            sums = sum(row);
        }
        if (announced && sums.pending + sums.committed <= limit)
            return commit(row, bytes, sums);
        bool over = sums.committed + bytes > limit;
        if (over && over_before && sums.fingerprint == fingerprint_before)
            break;
        over_before = over;
        fingerprint_before = sums.fingerprint;
        if (!over && tries < 16)
            syscall(SYS_sched_yield);
        else if (!over)
            pause_for(50000);
    }
    if (announced)
        atomic_fetch_sub(&own->pending, bytes);
    return FGPU_OVER;
}

static __attribute__((noinline)) enum fgpu_verdict reserve_contended(const struct row *row, uint64_t bytes,
                                                                     uint64_t limit) {
    int64_t deadline = now_ns() + PATIENCE_NS;
    while (atomic_exchange(&row->process->contender, 1) != 0) {
        if (now_ns() >= deadline)
            return FGPU_OVER;
        pause_for(20000);
    }
    enum fgpu_verdict verdict = reserve_patiently(row, bytes, limit, deadline);
    atomic_store(&row->process->contender, 0);
    return verdict;
}

enum fgpu_verdict fgpu_reserve(int device, uint64_t bytes, uint64_t limit) {
    struct row row;
    if (!find_own_row(device, &row))
        return FGPU_REFUSED;
    if (bytes > limit)
        return FGPU_OVER; /* not announced: that would only make others wait */
    struct region_cell *own = &row.cells[row.slot];
    atomic_fetch_add(&own->pending, bytes);
    struct sums sums = sum(&row);
    if (__builtin_expect(sums.pending + sums.committed <= limit, 1))
        return commit(&row, bytes, sums);
    atomic_fetch_sub(&own->pending, bytes);
    return reserve_contended(&row, bytes, limit);
}

void fgpu_charge_anyway(int device, uint64_t bytes) {
    struct row row;
    if (!find_own_row(device, &row))
        return;
    atomic_fetch_add(&row.cells[row.slot].committed, bytes);
    raise_peak(&row, sum(&row).committed);
}

void fgpu_release(int device, uint64_t bytes) {
    struct row row;
    if (!find_row(device, &row))
        return;
    int slot = (int)atomic_load_explicit(&row.process->slot_plus_one, memory_order_acquire) - 1;
    uint64_t held = slot < 0 ? 0 : atomic_load_explicit(&row.cells[slot].committed, memory_order_relaxed);
    while (held > 0) {
        uint64_t left = held > bytes ? held - bytes : 0;
        if (atomic_compare_exchange_weak(&row.cells[slot].committed, &held, left))
            break;
    }
    if (held < bytes)
        fgpu_log("release", "%llu bytes of device %d were to be released where %llu are held",
                 (unsigned long long)bytes, device, (unsigned long long)held);
}

/* ---- Questions ---- */

uint64_t fgpu_used(int device) {
    struct row row;
    if (!find_row(device, &row))
        return 0;
    clear_dead(row.process, row.region);
    struct sums sums = sum(&row), before;
    int collects = 0;
    do {
        before = sums;
        sums = sum(&row);
    } while (sums.fingerprint != before.fingerprint && ++collects < COLLECTS);
    return sums.committed;
}

uint64_t fgpu_used_by_this_process(int device) {
    struct row row;
    if (!find_row(device, &row))
        return 0;
    uint32_t slot_plus_one = atomic_load(&row.process->slot_plus_one);
    return slot_plus_one == 0 ? 0 : atomic_load(&row.cells[slot_plus_one - 1].committed);
}

void fgpu_set_code(int device, uint64_t bytes) {
    struct row row;
    if (find_own_row(device, &row))
        atomic_store(&row.cells[row.slot].code, bytes);
}

static bool is_write_locked(int descriptor, unsigned slot) {
    struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = (off_t)slot, .l_len = 1};
    return fcntl(descriptor, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_WRLCK;
}

/* The living processes in this PID namespace: all (`pid` 0), or the one with this id. */
static unsigned list_living(int device, uint32_t pid, struct fgpu_process *out, unsigned room) {
    struct row row;
    if (!find_row(device, &row) || !begin_opening(row.process))
        return 0;
    unsigned count = 0, slots = high_water(row.region);
    uint64_t namespace = pid_namespace();
    int descriptor = open_region();
    for (unsigned slot = 0; descriptor >= 0 && slot < slots; slot++) {
        struct region_owner *owner = &row.region->owner[slot];
        uint32_t its = atomic_load(&owner->pid);
        if (its == 0 || (pid != 0 && its != pid) || atomic_load(&owner->namespace) != namespace ||
            !is_write_locked(descriptor, slot))
            continue;
        if (count < room)
            out[count] = (struct fgpu_process){
                its, atomic_load(&row.cells[slot].committed) + atomic_load(&row.cells[slot].code)};
        count++;
    }
    if (descriptor >= 0)
        fgpu_close(descriptor);
    end_opening(row.process);
    return count;
}

unsigned fgpu_processes(int device, struct fgpu_process *out, unsigned room) {
    return list_living(device, 0, out, room);
}

bool fgpu_is_ours(uint32_t pid) {
    return pid != 0 && list_living(0, pid, NULL, 0) > 0;
}

/* A process that computes has a slot, even if its context is free: the watchdog treats processes without one as running
 * without libfgpu. */
struct fgpu_time_account *fgpu_time_account(int device) {
    struct row row;
    if (!find_row(device, &row))
        return NULL;
    this_slot(row.process, row.region);
    return &row.region->time[device];
}

/* Does not ask for the limits, as it is called while they are read. */
void fgpu_say_behind(bool behind) {
    struct process *process = atomic_load(&process_page);
    struct region *region = atomic_load(&region_pages);
    uint32_t slot_plus_one = process == NULL || region == NULL ? 0 : atomic_load(&process->slot_plus_one);
    if (slot_plus_one != 0)
        atomic_store(&region->owner[slot_plus_one - 1].behind, behind);
}
