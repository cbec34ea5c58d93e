/* A context's lock where plain stores do not suffice: throttle.h. */
#include "clock.h"
#include "throttle.h"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LOOKS 200 /* some hundred nanoseconds: longer than a launch holds the lock */
#define PAUSE_NS UINT64_C(20000) /* the holder is asking the driver, or is not running */
#define IN_ROW 2048 /* ending a favour takes up to 15 us, as long as this number of atomic instructions */
#define SETTLED_NS UINT64_C(1000000)

_Thread_local char throttle_thread;

/* After it, this processor sees the other's plain stores, and the other's later loads see what was written here before.
 */
static bool membarrier(int command) {
    return syscall(SYS_membarrier, command, 0) == 0;
}

void throttle_begin_lock(struct lock *lock) {
    lock->owner = &throttle_thread;
    lock->favours = membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED);
    atomic_store(&lock->favoured, lock->favours);
}

static void look_again(unsigned *looks) {
    if (++*looks % LOOKS == 0)
        fgpu_sleep_until(fgpu_now() + PAUSE_NS);
}

/* Called with `taken`, so one at a time. Afterwards the owner has either read that the favour is over, or is seen here.
 */
static void end_favour(struct lock *lock) {
    atomic_store(&lock->favoured, false);
    if (!membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED)) { /* the program has since forbidden the call */
        lock->favours = false;
        for (uint64_t settled = fgpu_now() + SETTLED_NS; fgpu_now() < settled;) /* a store takes less time than this */
            fgpu_sleep_until(settled);
    }
    for (unsigned looks = 0; atomic_load_explicit(&lock->here, memory_order_acquire) != 0;)
        look_again(&looks);
}

void throttle_lock_slowly(struct lock *lock) {
    unsigned looks = 0;
    for (int taken = 0; atomic_load_explicit(&lock->taken, memory_order_relaxed) != 0 ||
                        !atomic_compare_exchange_weak_explicit(&lock->taken, &taken, 1, memory_order_acquire,
                                                               memory_order_relaxed);
         taken = 0)
        look_again(&looks);
    if (lock->owner != &throttle_thread) {
        lock->in_row = 0;
        if (atomic_load_explicit(&lock->favoured, memory_order_relaxed))
            end_favour(lock);
    } else if (lock->favours && ++lock->in_row >= IN_ROW) {
        atomic_store_explicit(&lock->favoured, true, memory_order_relaxed);
    }
}
