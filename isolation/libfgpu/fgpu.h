/* What the parts of libfgpu know of each other. README.md one folder up explains the design. */
#ifndef FGPU_H
#define FGPU_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FGPU_EXPORT __attribute__((visibility("default")))
#define FGPU_MIB (UINT64_C(1) << 20)
#define FGPU_MAX_DEVICES 16
#define FGPU_MAX_SLOTS 50 /* as many as there can be apart in a hundred */
#define FGPU_UUID_BYTES 96

/* ---- folder.c: where the library is, and its log ------------------------------------------------ */

/* The absolute folder that this library was loaded from, without a trailing slash; NULL if it cannot be told
 * (then nothing can be read, and everything is refused). */
const char *fgpu_folder(void);

/* Writes one line into the folder's `log`, with time and pid; each distinct `reason` (a literal, compared by
 * address) at most once per process. Never writes anywhere else, never fails, never touches errno. */
void fgpu_log(const char *reason, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Opens a regular file of the folder, never through a link unless `flags` has FGPU_FOLLOW, never waiting for anything.
 * Returns a close-on-exec descriptor with its `status`, or -1 with `why`, words that follow the file's name. */
#define FGPU_FOLLOW (1 << 30)
struct stat;
int fgpu_open(const char *name, int flags, struct stat *status, const char **why);

/* The same for a file that the session writes. Where the folder has none, it is in FGPU_WRITTEN, a file system in memory
 * of the session's own, and made there if need be: of `size` zeros. Where the folder has no such place either, there is
 * no such file. */
#define FGPU_WRITTEN "written/"
int fgpu_open_written(const char *name, int flags, size_t size, struct stat *status, const char **why);

/* Closes it; not a point where a thread can be cancelled. */
void fgpu_close(int descriptor);

/* ---- limits.c ----------------------------------------------------------------------------------- */

struct fgpu_device {
    char uuid[FGPU_UUID_BYTES];
    uint64_t memory_bytes;  /* the limit */
    uint64_t device_bytes;  /* of the whole device, as the scheduler knows it */
    uint64_t context_bytes; /* charged for each context; 0: nothing */
    unsigned compute_percent;
    bool compute; /* whether compute is limited (mode memory+compute and less than 100 percent) */
    unsigned lending;      /* the session's number among those that lend each other their slots; 0: it does not */
    unsigned most_percent; /* with what is lent to it */
    unsigned slot_count;
    struct {
        uint8_t from, to; /* hundredths of the period */
    } slots[FGPU_MAX_SLOTS];
};

struct fgpu_limits {
    uint64_t revision; /* of the file `revision`, when they were read */
    uint64_t session;
    bool managed_refused;
    unsigned device_count;
    struct fgpu_device devices[FGPU_MAX_DEVICES];
};

/* Parses a limits file's text. Returns false, with a reason that names line, field and what would do. Pure. */
bool fgpu_limits_parse(const char *text, size_t size, struct fgpu_limits *out, char *reason, size_t reason_size);

/* The limits of this session; NULL if they cannot be read in full: refuse everything. The reason is in the log by then.
 * They are read again when their revision changes; those that can then not be read stay those that were known before, for
 * what is not an allocation. Session, devices and their order never change. Thread-safe, and what was returned stays. */
const struct fgpu_limits *fgpu_limits(void);

/* Which revision of the limits is in force: another number after each change. 0 where they cannot change. */
uint64_t fgpu_revision(void);

/* Where it is counted, once limits are known: for who asks so often that a call is too long. The place never changes. */
const _Atomic(uint64_t) *fgpu_revision_word(void);

/* Whether these are of the revision that is in force. */
bool fgpu_limits_in_force(const struct fgpu_limits *limits);

/* The index in `devices` of this UUID, or -1. */
int fgpu_device_by_uuid(const char *uuid);

/* ---- region.c: what the session's processes hold ------------------------------------------------- */

#define FGPU_REGION_BYTES (UINT64_C(2) << 20)

enum fgpu_verdict {
    FGPU_GRANTED,
    FGPU_OVER,    /* the session would hold more than its limit */
    FGPU_REFUSED, /* limits or region cannot be used; the reason is in the log */
};

/* Charges `bytes` of a device (an index in `devices`) to this process if the session stays within `limit` bytes. */
enum fgpu_verdict fgpu_reserve(int device, uint64_t bytes, uint64_t limit);

/* Charges what the driver has taken already, whatever the limit. */
void fgpu_charge_anyway(int device, uint64_t bytes);

/* Takes back part of what this process was charged. More than that is an error of the caller: clamped, and logged. */
void fgpu_release(int device, uint64_t bytes);

/* What all live processes of the session hold of the device. Clears what dead ones left first. */
uint64_t fgpu_used(int device);

/* What this process holds of the device. */
uint64_t fgpu_used_by_this_process(int device);

/* Whether this process id (as seen in this PID namespace) is a live process of the session with a slot. */
bool fgpu_is_ours(uint32_t pid);

/* The live processes of the session with a slot, as far as this PID namespace can name them, and what they hold of the
 * device. Fills in up to `room` of them and returns how many there are. */
struct fgpu_process {
    uint32_t pid;
    uint64_t bytes;
};
unsigned fgpu_processes(int device, struct fgpu_process *out, unsigned room);

/* True exactly once in each process that inherited this library's memory through fork, and before anything else of
 * this library is used in it: what the parent's tables hold is not the child's. Cheap: two loads when not forked. */
bool fgpu_forked_perhaps(void);
extern _Atomic(uint32_t) *_Atomic fgpu_process_known; /* 0 in a child that nobody has noticed yet; NULL: there is none yet */

static inline bool fgpu_forked(void) {
    _Atomic(uint32_t) *known = atomic_load_explicit(&fgpu_process_known, memory_order_acquire);
    return __builtin_expect(known == NULL || atomic_load_explicit(known, memory_order_relaxed) == 0, 0) &&
           fgpu_forked_perhaps();
}

/* Writes into this process's slot, if it has one, whether it could not read its changed limits. Until it can it is granted
 * no memory and computes in the slots that it knows: the watchdog takes it for one without libfgpu. */
void fgpu_say_behind(bool behind);

/* The session's common account of GPU time on a device, in the region; NULL if there is none. For throttle.c.
 * Zero-filled at first. Only atomics, as processes die at any instruction. */
struct fgpu_time_account {
    _Atomic(uint64_t) words[32];
};
struct fgpu_time_account *fgpu_time_account(int device);

/* ---- resolve.c: the real functions ---------------------------------------------------------------- */

/* libc's own dlsym and friends, found in its symbol table; usable at any time after the first call. */
void *fgpu_real_dlsym(void *handle, const char *name);

/* The driver's own function of this name (such as "cuEventRecord" or "nvmlDeviceGetUUID"), NULL if it has none.
 * Not for hot paths: keep the result. */
void *fgpu_driver_symbol(const char *name);

/* opencl.c: whether this object is NVIDIA's OpenCL, and the session may not use it. */
struct fgpu_object;
bool fgpu_hides(const struct fgpu_object *object);

/* The index in `devices` of the current context's device; -1 without a context, -2 for a device that the limits do
 * not name. Cheap enough for every call. */
int fgpu_current_device(void);

/* ---- throttle.c ------------------------------------------------------------------------------------ */

/* Called by every launch hook around the real launch. `stream` is the CUstream, `per_thread` says that a NULL stream
 * means the per-thread one (the _ptsz functions). `begin` may wait; both do nothing in mode memory, at 100 percent, and
 * during stream capture. `kind` distinguishes work of different length: the CUfunction or CUgraphExec. */
struct fgpu_launch {
    void *stream;
    void *kind;
    bool per_thread;
    /* Filled in by begin. */
    bool follow_up; /* end has something to do, even if the launch was taken */
    int device;     /* -1: not throttled */
    uint64_t private_words[5];
};
void fgpu_launch_begin(struct fgpu_launch *launch);
void fgpu_launch_follow_up(const struct fgpu_launch *launch, int result);

static inline void fgpu_launch_end(const struct fgpu_launch *launch, int result) {
    if (__builtin_expect(launch->follow_up || result != 0, 0) && launch->device >= 0)
        fgpu_launch_follow_up(launch, result);
}

/* Called before the real wait for a stream. What was launched into it last is measured then, as nothing is launched
 * behind it for as long as the program waits. */
void fgpu_wait_begins(void *stream, bool per_thread);

/* True while no device of this session is limited in compute: then launch hooks call straight through. Constant after
 * the first launch: a session whose slices are whole GPUs keeps them. Loaded on every launch. */
extern _Atomic(bool) fgpu_unthrottled;

/* A context was destroyed, or (`context` NULL) the primary one and whatever else the device had: its events are gone. */
void fgpu_throttle_context_ended(const void *context, int device);

/* In a forked child: forget the parent's launches. Part of fgpu_forget(). */
void fgpu_throttle_forget(void);

/* The stream-capture hooks report here, so that a launch asks the driver about capture only while there is one. */
void fgpu_capture_begins(void);
void fgpu_capture_ends(void);

#endif
