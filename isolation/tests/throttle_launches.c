/* Launches kernels of 1 ms in one of the driver's ways for a number of milliseconds, waits for them, and prints their
 * number and the milliseconds that they took.
 *     throttle_launches WAY MILLISECONDS The last four ways first do something after which launches must still work:
 *     capture, fork, context, threads. */
#include "sim_client.h"

#include <pthread.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define STREAM_NON_BLOCKING 1

static CUfunction kernel;
static CUstream stream;
static CUgraphExec graph;

static unsigned long long now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (unsigned long long)now.tv_sec * 1000 + (unsigned long long)now.tv_nsec / 1000000;
}

static void *parameters[1];

static void plain(void) {
    OK(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
}

static void own_stream(void) {
    OK(cuLaunchKernel_ptsz(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
}

static void null_stream(void) {
    OK(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
}

static CUlaunchConfig configuration(CUstream where) {
    return (CUlaunchConfig){.gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1, .blockDimY = 1,
                            .blockDimZ = 1, .hStream = where};
}

static void extended(void) {
    CUlaunchConfig one = configuration(stream);
    OK(cuLaunchKernelEx(&one, kernel, parameters, NULL));
}

static void extended_own_stream(void) {
    CUlaunchConfig one = configuration(NULL);
    OK(cuLaunchKernelEx_ptsz(&one, kernel, parameters, NULL));
}

static void cooperative(void) {
    OK(cuLaunchCooperativeKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, parameters));
}

static void cooperative_own_stream(void) {
    OK(cuLaunchCooperativeKernel_ptsz(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, parameters));
}

static void on_several(void) {
    CUDA_LAUNCH_PARAMS one = {.function = kernel, .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1,
                              .blockDimY = 1, .blockDimZ = 1, .hStream = stream, .kernelParams = parameters};
    OK(cuLaunchCooperativeKernelMultiDevice(&one, 1, 0));
}

static void oldest(void) {
    OK(cuLaunch(kernel));
}

static void old_grid(void) {
    OK(cuLaunchGrid(kernel, 1, 1));
}

static void old_grid_async(void) {
    OK(cuLaunchGridAsync(kernel, 1, 1, stream));
}

static void graph_launch(void) {
    OK(cuGraphLaunch(graph, stream));
}

static void graph_own_stream(void) {
    OK(cuGraphLaunch_ptsz(graph, NULL));
}

static const struct {
    const char *name;
    void (*launch)(void);
} ways[] = {
    {"plain", plain},           {"own-stream", own_stream},
    {"null-stream", null_stream}, {"extended", extended},
    {"extended-own-stream", extended_own_stream}, {"cooperative", cooperative},
    {"cooperative-own-stream", cooperative_own_stream}, {"on-several", on_several},
    {"oldest", oldest},         {"old-grid", old_grid},
    {"old-grid-async", old_grid_async}, {"graph", graph_launch},
    {"graph-own-stream", graph_own_stream},
};

static unsigned long launch_for(void (*launch)(void), unsigned long long ms) {
    unsigned long count = 0;
    for (unsigned long long began = now_ms(); now_ms() - began < ms; count++)
        launch();
    OK(cuCtxSynchronize());
    return count;
}

static void launch_and_tell(void (*launch)(void), unsigned long long ms) {
    unsigned long long began = now_ms();
    unsigned long count = launch_for(launch, ms);
    printf("%lu %llu\n", count, now_ms() - began);
}

/* A graph of one kernel, captured from a stream while other launches go on in another one. */
static void make_graph(void (*launch_elsewhere)(void)) {
    CUstream other = stream;
    CUgraph captured;
    OK(cuStreamCreate(&stream, STREAM_NON_BLOCKING));
    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    plain();
    CUstream capturing = stream;
    stream = other;
    for (int n = 0; n < 30 && launch_elsewhere != NULL; n++)
        launch_elsewhere();
    stream = capturing;
    for (int n = 0; n < 30 && launch_elsewhere != NULL; n++)
        plain();
    OK(cuStreamEndCapture(stream, &captured));
    OK(cuGraphInstantiateWithFlags(&graph, captured, 0));
    stream = other;
}

static void *thread(void *context) {
    OK(cuCtxSetCurrent(context));
    return (void *)launch_for(own_stream, 300);
}

int main(int argc, char **argv) {
    unsigned long long length = 0, ms = argc > 2 ? strtoull(argv[2], NULL, 10) : 300;
    const char *way = argc > 1 ? argv[1] : "plain";
    unsigned long before = 0;
    CUcontext context = sim_start();
    parameters[0] = &length;
    kernel = sim_kernel("spin_1ms");
    OK(cuStreamCreate(&stream, STREAM_NON_BLOCKING));
    if (strncmp(way, "graph", 5) == 0)
        make_graph(NULL);
    for (size_t n = 0; n < sizeof ways / sizeof *ways; n++) {
        if (strcmp(ways[n].name, way) == 0) {
            launch_and_tell(ways[n].launch, ms);
            return 0;
        }
    }
    launch_for(plain, 60);
    unsigned long long began = now_ms();
    if (strcmp(way, "capture") == 0) {
        make_graph(plain);
        graph_launch();
    } else if (strcmp(way, "fork") == 0) {
        pid_t child = fork();
        if (child == 0) /* CUDA does not work here, but nothing may hang or crash */
            _exit(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL) == CUDA_SUCCESS);
        int status = -1;
        TRUE(waitpid(child, &status, 0) == child && WIFEXITED(status));
    } else if (strcmp(way, "context") == 0) {
        for (int n = 0; n < 10; n++) {
            for (int i = 0; i < 8; i++)
                plain();
            OK(cuDevicePrimaryCtxReset_v2(0));
            context = sim_start();
            kernel = sim_kernel("spin_1ms");
            OK(cuStreamCreate(&stream, STREAM_NON_BLOCKING));
        }
    } else if (strcmp(way, "threads") == 0) {
        pthread_t threads[4];
        for (int n = 0; n < 4; n++)
            pthread_create(&threads[n], NULL, thread, context);
        for (int n = 0; n < 4; n++) {
            void *count;
            pthread_join(threads[n], &count);
            before += (unsigned long)count;
        }
    } else {
        fprintf(stderr, "%s is no way to launch\n", way);
        return 2;
    }
    before += launch_for(plain, ms);
    printf("%lu %llu\n", before, now_ms() - began);
    return 0;
}
