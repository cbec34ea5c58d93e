/* Sentinel events. sentinel.h explains their use.
 *
 * The driver only measures the time between two events. So each event's time follows from the one before it, and is
 * kept between the moment before it was recorded and the moment when it was seen to be done. Both bounds are close
 * whenever the device waits for the host or the host for the device, so the two clocks cannot drift apart. Steps are
 * short: a float of milliseconds is exact to a microsecond up to 16 seconds. */
#include "sentinel.h"

#include "clock.h"

#define STEP_MS 100000.0f /* after this long the clocks have drifted by milliseconds */

bool sentinel_record(struct sentinels *sentinels, struct sentinel *sentinel, CUstream stream) {
    *sentinel = (struct sentinel){.recorded_at = fgpu_now()};
    if (sentinels->spare_count > 0)
        sentinel->event = sentinels->spare[--sentinels->spare_count];
    else if (DRIVER(cuEventCreate) == NULL ||
             DRIVER(cuEventCreate)(&sentinel->event, CU_EVENT_DEFAULT) != CUDA_SUCCESS)
        sentinel->event = NULL;
    if (sentinel->event == NULL)
        return false;
    if (DRIVER(cuEventRecord)(sentinel->event, stream) == CUDA_SUCCESS)
        return true;
    sentinel_drop(sentinels, sentinel);
    return false;
}

enum sentinel_state sentinel_ask(const struct sentinel *sentinel) {
    if (sentinel->event == NULL)
        return SENTINEL_LOST;
    CUresult result = DRIVER(cuEventQuery)(sentinel->event);
    return result == CUDA_SUCCESS ? SENTINEL_DONE : result == CUDA_ERROR_NOT_READY ? SENTINEL_PENDING : SENTINEL_LOST;
}

bool sentinel_when(struct sentinels *sentinels, struct sentinel *sentinel, uint64_t now, uint64_t *when) {
    float ms = 0;
    *when = sentinel->recorded_at;
    if (sentinels->reference != NULL) {
        if (DRIVER(cuEventElapsedTime)(&ms, sentinels->reference, sentinel->event) != CUDA_SUCCESS)
            return false;
        if (ms < STEP_MS)
            *when = sentinels->reference_at + (uint64_t)(int64_t)((double)ms * 1e6);
    }
    if (*when < sentinel->recorded_at)
        *when = sentinel->recorded_at;
    if (*when > now)
        *when = now;
    struct sentinel before = {.event = sentinels->reference};
    sentinels->reference = sentinel->event;
    sentinels->reference_at = *when;
    sentinel->event = NULL;
    sentinel_drop(sentinels, &before);
    return true;
}

void sentinel_drop(struct sentinels *sentinels, struct sentinel *sentinel) {
    if (sentinel->event != NULL && sentinels->spare_count < SENTINEL_SPARE)
        sentinels->spare[sentinels->spare_count++] = sentinel->event;
    else if (sentinel->event != NULL && DRIVER(cuEventDestroy_v2) != NULL)
        DRIVER(cuEventDestroy_v2)(sentinel->event);
    sentinel->event = NULL;
}
