/* The interfaces between the parts of libfgpu. README.md one folder up explains the design. */
#ifndef FGPU_H
#define FGPU_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FGPU_EXPORT __attribute__((visibility("default")))
#define FGPU_MIB (UINT64_C(1) << 20)
#define FGPU_MAX_DEVICES 16
#define FGPU_MAX_SLOTS 50 /* the most separate slots in a hundred */
#define FGPU_UUID_BYTES 96

/* ---- folder.c: where the library is, and its log ------------------------------------------------ */

/* The absolute folder that this library was loaded from, without a trailing slash. NULL if unknown: then nothing can be
 * read, and everything is refused. */
const char *fgpu_folder(void);

/* Writes one line into the folder's `log`, with time and pid; each distinct `reason` (a literal, compared by
 * address) at most once per process. Never writes anywhere else, never fails, never touches errno. */
void fgpu_log(const char *reason, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Opens a regular file of the folder without blocking, and without following a link unless `flags` has FGPU_FOLLOW.
 * Returns a close-on-exec descriptor with its `status`; or -1 with `why`, words that follow the file's name. */
#define FGPU_FOLLOW (1 << 30)
struct stat;
int fgpu_open(const char *name, int flags, struct stat *status, const char **why);

/* The same for a file that the session writes. If the folder does not have it, it is in FGPU_WRITTEN, the session's own
 * tmpfs, and is created there with `size` zeros if missing. Without that folder the file does not exist. */
#define FGPU_WRITTEN "written/"
int fgpu_open_written(const char *name, int flags, size_t size, struct stat *status, const char **why);

/* Closes it; not a cancellation point. */
void fgpu_close(int descriptor);

/* ---- limits.c ----------------------------------------------------------------------------------- */

struct fgpu_device {
    char uuid[FGPU_UUID_BYTES];
    uint64_t memory_bytes;  /* the limit */
    uint64_t device_bytes;  /* of the whole device, as the scheduler knows it */
    uint64_t context_bytes; /* charged for each context; 0: free */
    bool counts_code;       /* whether memory that the driver takes for kernels' code is charged */
    uint64_t code_bytes;    /* that memory, as the host last counted it for the whole session */
    unsigned compute_percent;
    bool compute; /* whether compute is limited (mode memory+compute and less than 100 percent) */
    unsigned lending; /* the session's number among the sessions that lend each other slots; 0: it does not lend */
    unsigned most_percent; /* the most it gets, with borrowed compute */
    unsigned slot_count;
    struct {
        uint8_t from, to; /* hundredths of the period */
    } slots[FGPU_MAX_SLOTS];
};

struct fgpu_limits {
    uint64_t revision; /* of the file `revision`, at the time of reading */
    uint64_t session;
    bool managed_refused;
    unsigned device_count;
    struct fgpu_device devices[FGPU_MAX_DEVICES];
};

/* Parses the text of a limits file. Returns false with a reason that names line, field and what would be valid. Pure.
 */
bool fgpu_limits_parse(const char *text, size_t size, struct fgpu_limits *out, char *reason, size_t reason_size);

/* This session's limits; NULL, with the reason in the log, if they cannot be read in full: then everything is refused.
 * They are read again when their revision changes. If that fails, the known ones still hold for everything but
 * allocations. Session, devices and their order never change. Thread-safe; a returned object stays valid. */
const struct fgpu_limits *fgpu_limits(void);

/* The revision of the limits in force: it differs after each change. 0 if they cannot change. */
uint64_t fgpu_revision(void);

/* Where the revision is stored, once limits are known, for callers that cannot afford a function call. It never moves.
 */
const _Atomic(uint64_t) *fgpu_revision_word(void);

/* The word after it: 0 while the session may use its GPUs, 1 while it is parked. NULL if it cannot be found. */
const _Atomic(uint64_t) *fgpu_gate_word(void);

/* Whether these limits are of the revision in force. */
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

/* Charges what the driver has already taken, whatever the limit. */
void fgpu_charge_anyway(int device, uint64_t bytes);

/* Gives back a part of this process's charge. More than the charge is an error of the caller: clamped and logged. */
void fgpu_release(int device, uint64_t bytes);

/* The sum over all live processes of the session, with the code of kernels. Clears the slots of dead processes first.
 */
uint64_t fgpu_used(int device);

/* The charge of this process, without the code of kernels. */
uint64_t fgpu_used_by_this_process(int device);

/* Sets what this process holds for the code of kernels. */
void fgpu_set_code(int device, uint64_t bytes);

/* Whether this process id (as seen in this PID namespace) is a live process of the session with a slot. */
bool fgpu_is_ours(uint32_t pid);

/* The live processes of the session with a slot that have a number in this PID namespace, and what they hold of the
 * device. Fills in up to `room` of them and returns how many there are. */
struct fgpu_process {
    uint32_t pid;
    uint64_t bytes;
};
unsigned fgpu_processes(int device, struct fgpu_process *out, unsigned room);

/* True exactly once in each process that was forked with this library's memory, before the child uses anything else of
 * this library: the parent's tables are not the child's. Cheap: two loads if not forked. */
bool fgpu_forked_perhaps(void);
extern _Atomic(uint32_t) *_Atomic fgpu_process_known; /* 0 in an unnoticed child; NULL before the first use */

static inline bool fgpu_forked(void) {
    _Atomic(uint32_t) *known = atomic_load_explicit(&fgpu_process_known, memory_order_acquire);
    return __builtin_expect(known == NULL || atomic_load_explicit(known, memory_order_relaxed) == 0, 0) &&
           fgpu_forked_perhaps();
}

/* Records in this process's slot, if any, that it could not read its changed limits. Until it can, it is granted no
 * memory and computes in its old slots; the watchdog treats it as a process without libfgpu. */
void fgpu_say_behind(bool behind);

/* The session's shared account of GPU time on a device, in the region; NULL if there is none. For throttle.c. Zero at
 * first. Only atomics, as processes die at any instruction. */
struct fgpu_time_account {
    _Atomic(uint64_t) words[32];
};
struct fgpu_time_account *fgpu_time_account(int device);

/* ---- resolve.c: the real functions ---------------------------------------------------------------- */

/* libc's own dlsym and similar functions, from its symbol table; usable any time after the first call. */
void *fgpu_real_dlsym(void *handle, const char *name);

/* The driver's own function of this name (such as "cuEventRecord" or "nvmlDeviceGetUUID"), NULL if missing. Slow: keep
 * the result. */
void *fgpu_driver_symbol(const char *name);

/* opencl.c: whether this object is NVIDIA's OpenCL library and the session may not use it. */
struct fgpu_object;
bool fgpu_hides(const struct fgpu_object *object);

/* The index in `devices` of the current context's device; -1 without a context, -2 for a device outside the limits.
 * Cheap enough for every call. */
int fgpu_current_device(void);

/* ---- parking.c ------------------------------------------------------------------------------------- */

/* The gate, once it was found; before, a word that is not 0. */
extern const _Atomic(uint64_t) *_Atomic fgpu_gate;

static inline bool fgpu_gate_is_open(void) {
    return __builtin_expect(atomic_load_explicit(atomic_load_explicit(&fgpu_gate, memory_order_relaxed),
                                                 memory_order_relaxed) == 0, 1);
}

/* Waits until the session may use its GPUs again. False if a signal ended the wait: CUDA_ERROR_DEVICE_UNAVAILABLE. The
 * caller holds no lock. */
bool fgpu_wait_at_gate(void);

static inline bool fgpu_pass_gate(void) {
    return fgpu_gate_is_open() || fgpu_wait_at_gate();
}

/* ---- throttle.c ------------------------------------------------------------------------------------ */

/* Every launch hook calls these around the real launch. `stream` is the CUstream; `per_thread` means that a NULL stream
 * is the per-thread one (the _ptsz functions). `begin` may wait. Both do nothing in mode memory, at 100 percent, and
 * during stream capture. `kind` distinguishes work of different length: the CUfunction or CUgraphExec. */
struct fgpu_launch {
    void *stream;
    void *kind;
    bool per_thread;
    /* Filled in by begin. */
    bool follow_up; /* end has work to do, even if the launch was taken */
    int device;     /* -1: not throttled */
    uint64_t private_words[5];
};
void fgpu_launch_begin(struct fgpu_launch *launch);
void fgpu_launch_follow_up(const struct fgpu_launch *launch, int result);

static inline void fgpu_launch_end(const struct fgpu_launch *launch, int result) {
    if (__builtin_expect(launch->follow_up || result != 0, 0) && launch->device >= 0)
        fgpu_launch_follow_up(launch, result);
}

/* Called before the real wait for a stream. Its last launches are measured then, as nothing follows them while the
 * program waits. */
void fgpu_wait_begins(void *stream, bool per_thread);

/* True while no device of this session has a compute limit: launch hooks then call straight through. Constant after the
 * first launch, as a session of whole GPUs keeps them. Loaded on every launch. */
extern _Atomic(bool) fgpu_unthrottled;

/* A context was destroyed, or (`context` NULL) the primary one and everything else on the device: its events are gone.
 */
void fgpu_throttle_context_ended(const void *context, int device);

/* In a forked child: forget the parent's launches. Part of fgpu_forget(). */
void fgpu_throttle_forget(void);

/* The stream-capture hooks report here, so that launches ask the driver about capture only while there is one. */
void fgpu_capture_begins(void);
void fgpu_capture_ends(void);

#endif
