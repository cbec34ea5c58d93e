/* The simulated machine: its devices (the file `machine`) and who holds what of them (the file `ledger`). Shared by
 * the two libraries. README.md one folder up describes both files. */
#ifndef MACHINE_H
#define MACHINE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define MACHINE_MIB (UINT64_C(1) << 20)
#define MACHINE_DEVICES 32 /* GPUs and MIG instances together */
#define MACHINE_GPUS 16
#define MACHINE_INSTANCES 7 /* of one GPU */
#define MACHINE_UUID_BYTES 96

struct machine_device {
    char uuid[MACHINE_UUID_BYTES];
    char name[MACHINE_UUID_BYTES];
    unsigned char uuid_bytes[16];
    uint64_t memory_bytes, context_bytes, code_bytes, granularity_bytes;
    unsigned sm_count, major, minor;
    int parent;         /* the index of the GPU that this is an instance of; -1: a GPU */
    unsigned instances; /* a GPU's MIG instances */
    unsigned ordinal;   /* among the GPUs, or among its GPU's instances */
    unsigned block;     /* its place in the ledger */
};

struct machine {
    char driver[32];
    unsigned driver_major;
    int cuda_version; /* 13000 */
    uint64_t kernel_ns;
    uint64_t checkpoint_mib_s; /* how fast a checkpoint moves memory; 0: at once */
    enum machine_checkpoint { CHECKPOINTS, NO_CHECKPOINTS, LOCK_STUCK, CHECKPOINT_FAILS, RESTORE_FAILS } checkpoint;
    unsigned count, gpu_count;
    struct machine_device devices[MACHINE_DEVICES];
};

/* The machine, read once; NULL if its file cannot be read in full (the reason is in the log). */
const struct machine *machine_load(void);

/* Parses a machine's text; false with a reason that names the line. Pure. */
bool machine_parse(const char *text, struct machine *out, char *reason, size_t reason_size);

/* The folder of machine, ledger and log. NULL if it cannot be told. */
const char *machine_folder(void);

/* One line into the log, if there is one. */
void machine_log(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* CLOCK_MONOTONIC in nanoseconds: the clock of everything simulated. */
uint64_t machine_now(void);

/* ---- machine_ledger.c ---------------------------------------------------------------------------- */

#define LEDGER_SLOTS 1024
#define LEDGER_TURNS 16384
#define LEDGER_SPELLS 256
#define LEDGER_LIMITS 64
#define LEDGER_CGROUPS 12

/* Byte locks of the ledger file: POSIX locks, since these belong to a process: no forked child keeps them alive, a
 * death ends them before the locks that a mapping holds, and F_GETLK names the holder in the reader's PID namespace. */
#define LEDGER_LOCK_MEMORY 0 /* held while memory is given out */
#define LEDGER_LOCK_LIMITS 1 /* held while a cgroup's limits are changed */
#define LEDGER_LOCK_SLOT 64  /* + slot: held while its process lives */

/* The offsets of header and devices are for tests too: keep tests/isolation/ledgers.py the same. */
struct ledger_header {
    char magic[8];
    _Atomic(uint32_t) watermark;          /* slots in use are below */
    _Atomic(uint32_t) limits_generation;  /* counts the changes of cgroups' limits */
    char unused[4080];
};

struct ledger_device { /* at 4096 + 256 * block */
    char uuid[MACHINE_UUID_BYTES];
    _Atomic(uint64_t) bytes; /* 96: its size */
    _Atomic(uint64_t) peak;  /* 104: the most that was ever held, summed inside the lock */
    _Atomic(uint64_t) over;  /* 112: how often more than its size was found held; a defect unless 0 */
    _Atomic(uint64_t) grants; /* 120: how often memory was given out */
    _Atomic(uint64_t) busy_ns; /* 128: kernel time ever queued */
    _Atomic(uint64_t) kernels; /* 136 */
    char unused[48];
    _Atomic(uint64_t) busy_until; /* 192: when the last kernel queued will be done */
    _Atomic(uint64_t) turns;      /* 200: how many entered `turns`, ever */
    char unused_too[48];
};

/* A kernel's turn on its device, the last LEDGER_TURNS of them; `kernels` of one launch (a graph) are one turn. */
struct ledger_turn {
    _Atomic(uint64_t) start, end;
    _Atomic(uint32_t) slot;
    uint32_t unused[3];
};

/* A stretch of time in which a process kept a device busy for `busy`, for the utilisation that NVML reports. */
struct ledger_spell {
    _Atomic(uint64_t) start, end, busy;
    _Atomic(uint32_t) block;
    uint32_t unused;
};

struct ledger_holding {
    _Atomic(uint64_t) bytes;
    _Atomic(uint64_t) busy_ns;
    _Atomic(uint64_t) kernels;
    _Atomic(uint32_t) contexts;
    uint32_t unused;
};

struct ledger_slot {
    _Atomic(uint32_t) touched; /* bit by block: which holdings are not all zero */
    _Atomic(uint32_t) spell_count;
    _Atomic(uint64_t) cgroups[LEDGER_CGROUPS]; /* its cgroup and those above, as inodes, up to the first 0 */
    _Atomic(uint32_t) checkpoint; /* a CUprocessState; changed only while memory is locked */
    _Atomic(uint32_t) obstacles;  /* what it has that cannot be checkpointed */
    uint64_t unused[2];
    struct ledger_holding holdings[MACHINE_DEVICES];
    struct ledger_spell spells[LEDGER_SPELLS];
};

struct ledger_limit {
    _Atomic(uint64_t) cgroup; /* inode; 0: free */
    char path[248];
    struct {
        _Atomic(uint64_t) soft, hard; /* bytes; LEDGER_NO_LIMIT */
    } devices[MACHINE_DEVICES];
};

#define LEDGER_NO_LIMIT UINT64_MAX

struct ledger {
    struct ledger_header header;
    struct ledger_device devices[MACHINE_DEVICES];
    struct ledger_limit limits[LEDGER_LIMITS];
    struct ledger_slot slots[LEDGER_SLOTS];
    struct ledger_turn turns[MACHINE_DEVICES][LEDGER_TURNS];
};

/* Maps the ledger and finds each of the machine's devices its block. NULL with the reason in the log. Once. */
struct ledger *ledger_open(struct machine *machine);

/* The ledger once it is open. */
struct ledger *ledger_mapped(void);

/* Whether the descriptor still is the ledger's: programs close what they do not know, and the number may be another
 * file's by then. */
bool ledger_descriptor_holds(void);

/* Opens the file again. The locks taken through the old descriptor are gone. */
bool ledger_reopen(void);


/* Takes or drops an exclusive POSIX lock on one byte; with `wait` false only if nobody else holds it. */
bool ledger_lock_byte(int byte, bool wait);
void ledger_unlock_byte(int byte);

/* The process that holds a slot, as a pid of the caller's PID namespace (0: in none that the caller sees); -1: none. */
pid_t ledger_owner(unsigned slot);

/* What a slot's process has on the device now: nothing while it is checkpointed. */
bool ledger_is_checkpointed(const struct ledger_slot *slot);
uint64_t ledger_held(const struct ledger_slot *slot, unsigned block);

/* What the live processes hold of the device. */
uint64_t ledger_used(const struct machine_device *device);

/* How many of the last `window` nanoseconds before `now` a slot kept the device busy. */
uint64_t ledger_busy_in(const struct ledger_slot *slot, unsigned block, uint64_t now, uint64_t window);

/* ---- machine_cgroup.c: r615's memory limits ---------------------------------------------------------- */

/* The inodes of this process's cgroup (v2) and of those above it, ended by 0. */
void cgroup_chain(uint64_t chain[LEDGER_CGROUPS]);

/* The inode of the cgroup with this path, which starts at the cgroup file system's root; 0: there is none. */
uint64_t cgroup_inode(const char *path);

/* The hard limit of exactly this cgroup on the device, LEDGER_NO_LIMIT without one. */
uint64_t cgroup_limit(const struct machine_device *device, uint64_t cgroup);

/* What other cgroups' soft limits keep from this process: their memory that is not taken. A cgroup that was removed with
 * a soft limit keeps it, as its parents do with kernels from 6.14 on. */
uint64_t cgroup_reserved(const struct machine_device *device, const struct ledger_slot *slot);

/* What the live processes at or below the cgroup hold of the device. */
uint64_t cgroup_used(const struct machine_device *device, uint64_t cgroup);

#endif
