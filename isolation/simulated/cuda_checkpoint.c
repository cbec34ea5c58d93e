/* Checkpoints of processes, by any process that shares the machine and sees them: as in NVIDIA's driver, a locked process
 * waits in its next call, and a checkpointed one holds nothing of its devices. What was in its memory stays where it is,
 * as simulated memory is the host's; it waits for the time that moving it would take. */
#include "cuda_driver.h"

#include <time.h>
#include <unistd.h>

#define EVERY_NS 1000000

static void pause_ns(uint64_t ns)
{
    struct timespec time = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    while (nanosleep(&time, &time) != 0)
        ;
}

/* The slot of a process; -1: it has never had a context, or is none of this PID namespace. */
static int slot_of(int pid)
{
    struct ledger *ledger = ledger_mapped();
    for (unsigned slot = 0; pid > 0 && slot < atomic_load(&ledger->header.watermark); slot++)
        if (ledger_owner(slot) == pid)
            return (int)slot;
    return -1;
}

static struct ledger_slot *at(int slot)
{
    return &ledger_mapped()->slots[slot];
}

/* Changes the state if it is `from`, while no memory is taken. */
static CUresult change(int slot, CUprocessState from, CUprocessState to)
{
    ledger_lock_memory();
    CUresult result = atomic_load(&at(slot)->checkpoint) != (uint32_t)from ? CUDA_ERROR_ILLEGAL_STATE
                      : from == CU_PROCESS_STATE_CHECKPOINTED && !ledger_fits_again(at(slot))
                          ? CUDA_ERROR_OUT_OF_MEMORY
                          : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS)
        atomic_store(&at(slot)->checkpoint, (uint32_t)to);
    ledger_unlock_memory();
    return result;
}

static void move_memory(int slot)
{
    uint64_t bytes = 0;
    for (unsigned block = 0; block < MACHINE_DEVICES; block++)
        bytes += atomic_load(&at(slot)->holdings[block].bytes);
    if (machine->checkpoint_mib_s)
        pause_ns((uint64_t)((double)bytes / MACHINE_MIB / (double)machine->checkpoint_mib_s * 1e9));
}

#define SLOT(variable, pid) \
    READY(); \
    if (machine->driver_major < 570 || machine->checkpoint == NO_CHECKPOINTS) \
        return CUDA_ERROR_NOT_SUPPORTED; \
    int variable = slot_of(pid); \
    if (variable < 0) \
    return CUDA_ERROR_INVALID_VALUE

CALL(cuCheckpointProcessGetState, 12080, cuCheckpointProcessGetState, int pid, CUprocessState *state)
{
    SLOT(slot, pid);
    if (!state)
        return CUDA_ERROR_INVALID_VALUE;
    *state = (CUprocessState)atomic_load(&at(slot)->checkpoint);
    return CUDA_SUCCESS;
}

/* Waits for what the process has in flight. In time or not at all. */
CALL(cuCheckpointProcessLock, 12080, cuCheckpointProcessLock, int pid, CUcheckpointLockArgs *args)
{
    SLOT(slot, pid);
    uint64_t limit = args ? args->timeoutMs : 0, began = machine_now();
    CUresult result = change(slot, CU_PROCESS_STATE_RUNNING, CU_PROCESS_STATE_LOCKED);
    while (result == CUDA_SUCCESS &&
           (machine->checkpoint == LOCK_STUCK || ledger_work_ends((unsigned)slot, machine_now()) > machine_now())) {
        if (limit && machine_now() - began >= limit * 1000000u) {
            change(slot, CU_PROCESS_STATE_LOCKED, CU_PROCESS_STATE_RUNNING);
            return CUDA_ERROR_NOT_READY;
        }
        pause_ns(EVERY_NS);
    }
    return result;
}

CALL(cuCheckpointProcessCheckpoint, 12080, cuCheckpointProcessCheckpoint, int pid, CUcheckpointCheckpointArgs *args)
{
    SLOT(slot, pid);
    if (args)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (atomic_load(&at(slot)->checkpoint) != CU_PROCESS_STATE_LOCKED)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (machine->checkpoint == CHECKPOINT_FAILS) {
        change(slot, CU_PROCESS_STATE_LOCKED, CU_PROCESS_STATE_FAILED);
        return CUDA_ERROR_UNKNOWN;
    }
    /* Managed memory, and memory that other processes may have mapped. */
    if (atomic_load(&at(slot)->obstacles))
        return CUDA_ERROR_NOT_SUPPORTED;
    move_memory(slot);
    return change(slot, CU_PROCESS_STATE_LOCKED, CU_PROCESS_STATE_CHECKPOINTED);
}

CALL(cuCheckpointProcessRestore, 12080, cuCheckpointProcessRestore, int pid, CUcheckpointRestoreArgs *args)
{
    SLOT(slot, pid);
    if (args || machine->checkpoint == RESTORE_FAILS)
        return args ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_UNKNOWN;
    CUresult result = change(slot, CU_PROCESS_STATE_CHECKPOINTED, CU_PROCESS_STATE_LOCKED);
    if (result == CUDA_SUCCESS)
        move_memory(slot);
    return result;
}

CALL(cuCheckpointProcessUnlock, 12080, cuCheckpointProcessUnlock, int pid, CUcheckpointUnlockArgs *args)
{
    SLOT(slot, pid);
    return args ? CUDA_ERROR_NOT_SUPPORTED : change(slot, CU_PROCESS_STATE_LOCKED, CU_PROCESS_STATE_RUNNING);
}
