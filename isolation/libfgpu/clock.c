/* A separate file, so that the tests of throttle.c can replace the clock. */
#include "clock.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS UINT64_C(1000000000)

static uint64_t read_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * SECOND_NS + (uint64_t)now.tv_nsec;
}

#ifdef __x86_64__
#include <cpuid.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <x86intrin.h>

/* Each launch needs the time, and the kernel's clock costs as much as everything else that a launch costs here. So for
 * 2^16 ticks of the processor's counter after a reading, about 25 us, the counter gives the time. It lags by less than
 * 0.1 us and is never ahead, so time does not go back. If processors count differently, the error is at most that
 * period. */
#define TICKS (UINT64_C(1) << 16)
#define QUICK_TICKS (UINT64_C(1) << 12) /* a reading that took longer was interrupted, so its ticks are useless */
#define MEASURE_NS UINT64_C(1000000)
#define ONE (UINT64_C(1) << 32)

static _Thread_local struct {
    uint64_t at, ticks;          /* the last reading; ticks 0: the counter is not used */
    uint64_t since, since_ticks; /* begin of the rate's next measurement */
    uint64_t rate; /* nanoseconds of 2^32 ticks; 0: unknown */
} here __attribute__((tls_model("initial-exec")));

/* Whether it counts at one rate, and continues while the processor sleeps. */
static bool is_steady(void) {
    static _Atomic(int) known;
    int steady = atomic_load_explicit(&known, memory_order_relaxed);
    if (steady == 0) {
        unsigned a, b, c, d;
        steady = __get_cpuid(0x80000007, &a, &b, &c, &d) && (d >> 8 & 1) != 0 ? 1 : -1;
        atomic_store_explicit(&known, steady, memory_order_relaxed);
    }
    return steady > 0;
}

static __attribute__((noinline)) uint64_t read_both(void) {
    uint64_t before = __rdtsc(), now = read_clock(), ticks = __rdtsc();
    here.ticks = 0;
    if (ticks - before > QUICK_TICKS || !is_steady())
        return now;
    uint64_t passed = now - here.since, counted = ticks - here.since_ticks;
    if (passed >= MEASURE_NS) {
        uint64_t rate = passed < SECOND_NS && counted > 0 ? passed * ONE / counted : here.rate;
        here.rate = rate < ONE / 8 || rate > 2 * ONE ? 0 : rate - rate / 256;
        here.since = now;
        here.since_ticks = ticks;
    }
    here.at = now;
    here.ticks = here.rate == 0 ? 0 : ticks;
    return now;
}

uint64_t fgpu_now(void) {
    uint64_t ticks = __rdtsc() - here.ticks;
    return __builtin_expect(ticks < TICKS, 1) ? here.at + (ticks * here.rate >> 32) : read_both();
}
#else
uint64_t fgpu_now(void) {
    return read_clock();
}
#endif

void fgpu_sleep_until(uint64_t time) {
    struct timespec until = {(time_t)(time / SECOND_NS), (long)(time % SECOND_NS)};
    syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
}
