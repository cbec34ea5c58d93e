/* Moves the GPU memory of all processes of a session to the host's memory, and back: all of them or none. Each step can
 * run again after a crash at any point: what it does depends only on the state of each process.
 *
 * The driver's states: running, locked (its calls wait), checkpointed (its memory is on the host), failed. */
#include "probe_cuda.h"

#include "../libfgpu/region.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

/* A thread that passed libfgpu's gate before it closed has reached the driver after this time. */
#define ON_ITS_WAY_MS 20
#define AGAIN_MS 50

struct process {
    int pid;
    CUprocessState first, state;
    CUresult error;
    int64_t ms;
};

static struct process processes[REGION_SLOTS];
static unsigned count;

static __typeof__(&cuCheckpointProcessGetState) get_state;
static __typeof__(&cuCheckpointProcessLock) lock;
static __typeof__(&cuCheckpointProcessCheckpoint) checkpoint;
static __typeof__(&cuCheckpointProcessRestore) restore;
static __typeof__(&cuCheckpointProcessUnlock) unlock;

static int64_t now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void pause_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

/* ---- one process ---- */

/* Notes the result of a step; a process that has ended since has nothing left to move. */
static bool took(struct process *process, CUresult result, CUprocessState then)
{
    process->error = result;
    if (result == CUDA_SUCCESS)
        process->state = then;
    else if (get_state(process->pid, &process->state) != CUDA_SUCCESS)
        process->pid = 0;
    return result == CUDA_SUCCESS || process->pid == 0;
}

static bool lock_one(struct process *process, int64_t until_ms)
{
    int64_t left_ms = until_ms - now_ms();
    /* 0 would mean without a limit. */
    CUcheckpointLockArgs arguments = {.timeoutMs = left_ms < 1 ? 1 : (unsigned)left_ms};

    *probe_step = "cuCheckpointProcessLock";
    return process->state != CU_PROCESS_STATE_RUNNING ||
           took(process, lock(process->pid, &arguments), CU_PROCESS_STATE_LOCKED);
}

static bool checkpoint_one(struct process *process, int64_t until_ms)
{
    (void)until_ms;
    *probe_step = "cuCheckpointProcessCheckpoint";
    return process->state == CU_PROCESS_STATE_CHECKPOINTED ||
           took(process, checkpoint(process->pid, NULL), CU_PROCESS_STATE_CHECKPOINTED);
}

/* Not tried again without room: after one such failure driver 580 can never restore the process (NVIDIA/cuda-checkpoint,
 * issue 44). The host looks for room before. */
static bool restore_one(struct process *process, int64_t until_ms)
{
    (void)until_ms;
    *probe_step = "cuCheckpointProcessRestore";
    return process->state != CU_PROCESS_STATE_CHECKPOINTED || /* of one that has failed nothing can be restored */
           took(process, restore(process->pid, NULL), CU_PROCESS_STATE_LOCKED);
}

static bool unlock_one(struct process *process, int64_t until_ms)
{
    (void)until_ms;
    *probe_step = "cuCheckpointProcessUnlock";
    return process->state != CU_PROCESS_STATE_LOCKED ||
           took(process, unlock(process->pid, NULL), CU_PROCESS_STATE_RUNNING);
}

/* Whether all processes took the step; those after the first one that did not are left as they are. */
static bool each(bool (*step)(struct process *, int64_t), int64_t until_ms)
{
    for (unsigned i = 0; i < count; i++) {
        int64_t began_ms = now_ms();
        bool done = processes[i].pid == 0 || step(&processes[i], until_ms);

        processes[i].ms += now_ms() - began_ms;
        if (!done)
            return false;
    }
    return true;
}

/* ---- all of them ---- */

/* A refusal is kept: undoing it sets no other error. */
static void undo(bool (*step)(struct process *, int64_t), CUprocessState from, bool (*is_undone)(const struct process *),
                 int64_t until_ms)
{
    for (unsigned i = 0; i < count; i++) {
        CUresult error = processes[i].error;

        if (processes[i].pid != 0 && processes[i].state == from && is_undone(&processes[i]))
            step(&processes[i], until_ms);
        if (error != CUDA_SUCCESS)
            processes[i].error = error;
    }
}

static bool any(const struct process *process)
{
    (void)process;
    return true;
}

static bool was_checkpointed(const struct process *process)
{
    return process->first == CU_PROCESS_STATE_CHECKPOINTED;
}

/* After a refusal all run, as it is the session's own time. */
static bool park(int64_t began_ms, int64_t limit_ms)
{
    pause_ms(ON_ITS_WAY_MS);
    if (each(lock_one, began_ms + limit_ms / 3) && each(checkpoint_one, 0))
        return true;
    undo(restore_one, CU_PROCESS_STATE_CHECKPOINTED, any, began_ms + limit_ms);
    undo(unlock_one, CU_PROCESS_STATE_LOCKED, any, 0);
    return false;
}

/* After a refusal those that were parked are parked again. */
static bool resume(int64_t began_ms, int64_t limit_ms)
{
    if (each(restore_one, began_ms + limit_ms / 2))
        return each(unlock_one, 0);
    undo(checkpoint_one, CU_PROCESS_STATE_LOCKED, was_checkpointed, 0);
    return false;
}

/* ---- the report ---- */

/* The processes that hold a slot of libfgpu's accounting file and that the driver knows. */
static const char *find_processes(const struct options *options, int64_t until_ms)
{
    static struct region_owner owners[REGION_SLOTS];
    int descriptor = open(options->moved, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
    CUresult result = CUDA_SUCCESS;

    if (descriptor < 0)
        /* No process was counted yet: libfgpu makes the file. */
        return errno == ENOENT ? NULL : "libfgpu's accounting file cannot be opened";
    /* Another one, of a Hub that has ended, may not be done yet. Kept open until the end. */
    while (options->move != MOVE_STATE && flock(descriptor, LOCK_EX | LOCK_NB) != 0)
        if (now_ms() >= until_ms)
            return "the session's memory is being moved by another program";
        else
            pause_ms(AGAIN_MS);
    bool complete = pread(descriptor, owners, sizeof(owners), offsetof(struct region, owner)) == sizeof(owners);
    for (unsigned slot = 0; complete && slot < REGION_SLOTS && result != CUDA_ERROR_NOT_SUPPORTED; slot++) {
        struct process *process = &processes[count];

        if (!slot_is_held(descriptor, slot) || (int)owners[slot].pid <= 0)
            continue;
        *process = (struct process){.pid = (int)owners[slot].pid};
        *probe_step = "cuCheckpointProcessGetState";
        result = get_state(process->pid, &process->first);
        process->state = process->first;
        count += result == CUDA_SUCCESS;
    }
    return !complete ? "libfgpu's accounting file cannot be read"
           : result == CUDA_ERROR_NOT_SUPPORTED ? "the driver cannot checkpoint processes" : NULL;
}

static const char *open_driver(struct library *library)
{
    /* The section that library_open() writes on failure is not part of this report. */
    static struct json unused;

    if (!library_open(library, "libcuda.so.1", &unused))
        return "the driver's library cannot be loaded";
    __typeof__(&cuInit) init = (__typeof__(&cuInit))library_function(library, "cuInit");

    get_state = (__typeof__(get_state))library_function(library, "cuCheckpointProcessGetState");
    lock = (__typeof__(lock))library_function(library, "cuCheckpointProcessLock");
    checkpoint = (__typeof__(checkpoint))library_function(library, "cuCheckpointProcessCheckpoint");
    restore = (__typeof__(restore))library_function(library, "cuCheckpointProcessRestore");
    unlock = (__typeof__(unlock))library_function(library, "cuCheckpointProcessUnlock");
    if (get_state == NULL || lock == NULL || checkpoint == NULL || restore == NULL || unlock == NULL)
        return "the driver cannot checkpoint processes: that needs version 570 or newer";
    *probe_step = "cuInit";
    return init == NULL || init(0) != CUDA_SUCCESS ? "the driver cannot be initialised" : NULL;
}

static void tell(struct json *json, const struct library *library, const struct process *process)
{
    static const char *const states[] = {"running", "locked", "checkpointed", "failed"};
    __typeof__(&cuGetErrorName) error_name = (__typeof__(&cuGetErrorName))library_function(library, "cuGetErrorName");
    const char *name = NULL;

    if (process->error != CUDA_SUCCESS &&
        (error_name == NULL || error_name(process->error, &name) != CUDA_SUCCESS || name == NULL))
        name = "an error that the driver does not name";
    json_next(json);
    json_raw(json, "{");
    json_name(json, "pid");
    json_number(json, (uint64_t)process->pid);
    json_name(json, "state");
    json_string(json, (unsigned)process->state < 4 ? states[process->state] : "being moved");
    json_name(json, "error");
    json_string(json, name);
    json_name(json, "ms");
    json_number(json, (uint64_t)process->ms);
    json_raw(json, "}");
}

void probe_checkpoint(struct json *json, const struct options *options)
{
    struct library library = {0};
    int64_t began_ms = now_ms(), limit_ms = (int64_t)options->timeout_s * 1000;
    const char *why = open_driver(&library);
    bool done = false;
    char words[128];

    if (why == NULL)
        why = find_processes(options, began_ms + limit_ms / 3);
    if (why == NULL) {
        done = options->move == MOVE_PARK     ? park(began_ms, limit_ms)
               : options->move == MOVE_RESUME ? resume(began_ms, limit_ms)
                                              : true;
        for (unsigned i = 0; i < count && !done && why == NULL; i++)
            if (processes[i].pid != 0 &&
                (processes[i].error != CUDA_SUCCESS || processes[i].state == CU_PROCESS_STATE_FAILED)) {
                snprintf(words, sizeof(words), "the driver refuses process %d (error %d)", processes[i].pid,
                         (int)processes[i].error);
                why = words;
            }
    }
    json_name(json, "done");
    json_raw(json, done ? "true" : "false");
    json_name(json, "processes");
    json_raw(json, "[");
    for (unsigned i = 0; i < count; i++)
        if (processes[i].pid != 0)
            tell(json, &library, &processes[i]);
    json_raw(json, "]");
    json_name(json, "why");
    json_string(json, why);
}
