/* This process's part in the ledger. */
#ifndef CUDA_LEDGER_H
#define CUDA_LEDGER_H

#include "machine.h"

/* Takes a slot for this process unless it has one. False if all are taken. */
bool ledger_join(void);

/* Takes bytes of the device, or not if it (or a limit of this process's cgroup) has less left. */
bool ledger_take(const struct machine_device *device, uint64_t bytes);
void ledger_give(const struct machine_device *device, uint64_t bytes);

/* Returns when this process is not locked for a checkpoint; false if one has failed, and broken it. Before each call that
 * needs a device. */
bool ledger_wait_unlocked(void);

/* Counts what cannot be checkpointed. */
void ledger_count_obstacle(int change);

/* Held while a process changes its checkpoint state, so that no memory is taken at the same time. */
void ledger_lock_memory(void);
void ledger_unlock_memory(void);

/* Whether the memory of this slot's checkpointed process fits on its devices again. Memory is locked. */
bool ledger_fits_again(struct ledger_slot *slot);

/* When the last kernel of this slot's process will be done; `now` if none runs. */
uint64_t ledger_work_ends(unsigned slot, uint64_t now);

/* Counts contexts, so that NVML lists processes that hold no memory. */
void ledger_count_context(const struct machine_device *device, int change);

/* Queues work of a duration behind all of the device's, not before `earliest`; when it will be done. */
uint64_t ledger_queue(const struct machine_device *device, uint64_t earliest, uint64_t duration, uint64_t kernels);

/* When another process's kernel that runs now will be done; `now` if none does. */
uint64_t ledger_foreign_turn_ends(const struct machine_device *device, uint64_t now);

/* What this process may hold of the device, and holds: a limit of exactly its cgroup, or the whole device. */
void ledger_view(const struct machine_device *device, uint64_t *free_bytes, uint64_t *total_bytes);

/* In a forked child: nothing of the parent's slot is its own. */
void ledger_leave_to_parent(void);

#endif
