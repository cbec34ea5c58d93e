/* Apart from what uses it, so that the tests of throttle.c bring a clock of their own. */
#include "clock.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS UINT64_C(1000000000)

uint64_t fgpu_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * SECOND_NS + (uint64_t)now.tv_nsec;
}

void fgpu_sleep_until(uint64_t time) {
    struct timespec until = {(time_t)(time / SECOND_NS), (long)(time % SECOND_NS)};
    syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
}
