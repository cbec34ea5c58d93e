/* The functions that start work on a device, each behind the gate of throttle.c; and stream capture, during which a
 * launch starts nothing. */
#include "hooks.h"
#include "parts.h"

/* Without a compute limit a launch costs three more loads and a jump: that there is none, where the gate is, and the
 * gate. */
static inline bool free_to_go(void) {
    return __builtin_expect(atomic_load_explicit(&fgpu_unthrottled, memory_order_relaxed), 1) && fgpu_gate_is_open();
}

/* A function does larger work in more blocks, so each power of two of blocks has its own length. The top byte of an
 * address is free. */
static void *kind_of(const void *function, uint64_t grid_x, uint64_t grid_y, uint64_t grid_z) {
    uint64_t blocks = grid_x * grid_y * grid_z;
    uint64_t power = blocks == 0 ? 0 : (uint64_t)(64 - __builtin_clzll(blocks));
    return (void *)(uintptr_t)((uint64_t)(uintptr_t)function | power << 56);
}

/* `call` behind both gates: of a parked session, and of a compute limit. */
#define GATED(kind_, stream_, per_thread_, call) \
    do { \
        fgpu_enter(); \
        if (!fgpu_pass_gate()) \
            return CUDA_ERROR_DEVICE_UNAVAILABLE; \
        struct fgpu_launch launch; /* not all of it needs clearing */ \
        launch.kind = (kind_); \
        launch.stream = (stream_); \
        launch.per_thread = (per_thread_); \
        fgpu_launch_begin(&launch); /* may wait for a slot; the session can be parked during that time */ \
        CUresult result = fgpu_pass_gate() ? (call) : CUDA_ERROR_DEVICE_UNAVAILABLE; \
        fgpu_launch_end(&launch, (int)result); \
        return result; \
    } while (0)

/* It has the parameters of the driver's own function, so that the hook can jump here without moving them. */
static __attribute__((noinline)) CUresult gated_kernel(FGPU_LAUNCH_PARAMETERS, void **extra) {
    GATED(kind_of(function, grid_x, grid_y, grid_z), stream, false,
          DRIVER(cuLaunchKernel)(FGPU_LAUNCH_ARGUMENTS, extra));
}

static __attribute__((noinline)) CUresult gated_kernel_ptsz(FGPU_LAUNCH_PARAMETERS, void **extra) {
    GATED(kind_of(function, grid_x, grid_y, grid_z), stream, true,
          DRIVER(cuLaunchKernel_ptsz)(FGPU_LAUNCH_ARGUMENTS, extra));
}

static inline CUresult launch_kernel(__typeof__(&cuLaunchKernel) real, bool per_thread, FGPU_LAUNCH_PARAMETERS,
                                     void **extra) {
    if (free_to_go())
        return real(FGPU_LAUNCH_ARGUMENTS, extra);
    return per_thread ? gated_kernel_ptsz(FGPU_LAUNCH_ARGUMENTS, extra) : gated_kernel(FGPU_LAUNCH_ARGUMENTS, extra);
}

static CUresult launch_kernel_ex(__typeof__(&cuLaunchKernelEx) real, bool per_thread,
                                 const CUlaunchConfig *configuration, CUfunction function, void **parameters,
                                 void **extra) {
    if (free_to_go() || configuration == NULL)
        return real(configuration, function, parameters, extra);
    GATED(kind_of(function, configuration->gridDimX, configuration->gridDimY, configuration->gridDimZ),
          configuration->hStream, per_thread, real(configuration, function, parameters, extra));
}

static CUresult launch_cooperative(__typeof__(&cuLaunchCooperativeKernel) real, bool per_thread,
                                   FGPU_LAUNCH_PARAMETERS) {
    if (free_to_go())
        return real(FGPU_LAUNCH_ARGUMENTS);
    GATED(kind_of(function, grid_x, grid_y, grid_z), stream, per_thread, real(FGPU_LAUNCH_ARGUMENTS));
}

static CUresult launch_legacy(__typeof__(&cuLaunch) real, CUfunction function) {
    if (free_to_go())
        return real(function);
    GATED(kind_of(function, 1, 1, 1), NULL, false, real(function));
}

static CUresult launch_legacy_grid(__typeof__(&cuLaunchGrid) real, CUfunction function, int width, int height) {
    if (free_to_go())
        return real(function, width, height);
    GATED(kind_of(function, (unsigned)width, (unsigned)height, 1), NULL, false, real(function, width, height));
}

static CUresult launch_legacy_grid_async(__typeof__(&cuLaunchGridAsync) real, CUfunction function, int width,
                                         int height, CUstream stream) {
    if (free_to_go())
        return real(function, width, height, stream);
    GATED(kind_of(function, (unsigned)width, (unsigned)height, 1), stream, false,
          real(function, width, height, stream));
}

/* Nothing but the launch may be between `before` and `after`: graphs.c. */
static CUresult launch_graph_now(__typeof__(&cuGraphLaunch) real, CUgraphExec executable, CUstream stream) {
    fgpu_enter();
    CUresult result = fgpu_graph_before_launch(executable);
    if (result != CUDA_SUCCESS)
        return result;
    result = real(executable, stream);
    fgpu_graph_after_launch(executable, result);
    return result;
}

static CUresult launch_graph(__typeof__(&cuGraphLaunch) real, bool per_thread, CUgraphExec executable,
                             CUstream stream) {
    if (free_to_go())
        return launch_graph_now(real, executable, stream);
    GATED(executable, stream, per_thread, launch_graph_now(real, executable, stream));
}

/* One kernel on each of several devices, which needs all of them at once: passes each device's gate in turn. */
#define MOST_DEVICES 64

static bool enter_context_of(CUstream stream) {
    CUcontext context;
    return stream != NULL && DRIVER(cuStreamGetCtx) != NULL &&
           DRIVER(cuStreamGetCtx)(stream, &context) == CUDA_SUCCESS && DRIVER(cuCtxPushCurrent_v2) != NULL &&
           DRIVER(cuCtxPushCurrent_v2)(context) == CUDA_SUCCESS;
}

static void leave_context(void) {
    CUcontext context;
    DRIVER(cuCtxPopCurrent_v2)(&context);
}

static CUresult launch_on_several(__typeof__(&cuLaunchCooperativeKernelMultiDevice) real, CUDA_LAUNCH_PARAMS *launches,
                                  unsigned int count, unsigned int flags) {
    struct fgpu_launch gated[MOST_DEVICES];
    if (free_to_go() || launches == NULL || count > MOST_DEVICES)
        return real(launches, count, flags);
    fgpu_enter();
    if (!fgpu_pass_gate())
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    for (unsigned n = 0; n < count; n++) {
        const CUDA_LAUNCH_PARAMS *one = &launches[n];
        gated[n] = (struct fgpu_launch){.kind = kind_of(one->function, one->gridDimX, one->gridDimY, one->gridDimZ),
                                        .stream = one->hStream, .device = -1};
        if (enter_context_of(one->hStream)) {
            fgpu_launch_begin(&gated[n]);
            leave_context();
        }
    }
    CUresult result = fgpu_pass_gate() ? real(launches, count, flags) : CUDA_ERROR_DEVICE_UNAVAILABLE;
    for (unsigned n = 0; n < count; n++) {
        if (gated[n].device >= 0 && enter_context_of(launches[n].hStream)) {
            fgpu_launch_end(&gated[n], (int)result);
            leave_context();
        }
    }
    return result;
}

static CUresult capture_begins(CUresult result) {
    fgpu_enter();
    if (result == CUDA_SUCCESS)
        fgpu_capture_begins();
    return result;
}

static bool is_capturing(CUstream stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    return DRIVER(cuStreamIsCapturing) != NULL && DRIVER(cuStreamIsCapturing)(stream, &status) == CUDA_SUCCESS &&
           status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* Some failures end the capture, others do not, for example in a thread that has not begun it. */
static CUresult capture_ends(__typeof__(&cuStreamEndCapture) real, bool per_thread, CUstream stream, CUgraph *graph) {
    fgpu_enter();
    CUstream asked = stream == NULL && per_thread ? CU_STREAM_PER_THREAD : stream;
    bool was_capturing = is_capturing(asked);
    CUresult result = real(stream, graph);
    if (was_capturing && (result == CUDA_SUCCESS || !is_capturing(asked)))
        fgpu_capture_ends();
    return result;
}

static CUresult capture_to_cig_ends(CUresult result) {
    fgpu_enter();
    if (result == CUDA_SUCCESS)
        fgpu_capture_ends();
    return result;
}

/* Unlike other hooks these register the caller only if they use state that a forked child must forget: a launch that
 * goes straight through does not, and saves no register for it. */
#define EXPORT_LAUNCH_HOOK(library, name, parameters, call) \
    FGPU_EXPORT CUresult name parameters { \
        __typeof__(&name) real = DRIVER(name); \
        return __builtin_expect(real == NULL, 0) ? FGPU_MISSING_CUDA : (call); \
    }

FGPU_LAUNCH_HOOKS(EXPORT_LAUNCH_HOOK)
FGPU_CAPTURE_HOOKS(FGPU_EXPORT_GATED_HOOK)
