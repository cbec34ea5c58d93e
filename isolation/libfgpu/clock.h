/* CLOCK_MONOTONIC: the same in all containers of a host. */
#ifndef FGPU_CLOCK_H
#define FGPU_CLOCK_H

#include <stdint.h>

uint64_t fgpu_now(void);

/* Returns at that time, or earlier after a signal. Not a cancellation point. */
void fgpu_sleep_until(uint64_t time);

#endif
