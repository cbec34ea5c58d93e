/* Waiting for a context's lock. Apart from throttle.c, as the worlds of its tests have nobody who waits. */
#include "clock.h"
#include "throttle.h"

#define LOOKS 200           /* some hundred nanoseconds: longer than a launch holds the lock */
#define PAUSE_NS UINT64_C(20000) /* who holds it asks the driver, or is not on a processor */

void throttle_wait_for_lock(struct context *context) {
    for (unsigned looks = 1;; looks++) {
        int taken = 0;
        if (atomic_load_explicit(&context->lock, memory_order_relaxed) == 0 &&
            atomic_compare_exchange_weak_explicit(&context->lock, &taken, 1, memory_order_acquire,
                                                  memory_order_relaxed))
            return;
        if (looks % LOOKS == 0)
            fgpu_sleep_until(fgpu_now() + PAUSE_NS);
    }
}
