/* Single actions with the simulated driver, for tests that observe from outside:
 *   sim_tool hold MIB...    allocates each, prints "held N" with the number granted, waits for its input to end
 *   sim_tool queue NAME N   queues a kernel N times, prints "queued", waits for its input to end
 *   sim_tool run NAME N     queues a kernel N times, waits, prints the microseconds from first to last
 *   sim_tool steps          prints "ready"; for each line MIB of its input, the result of that allocation
 *   sim_tool info           prints free and total MiB
 *   sim_tool devices        prints each device's name and total MiB
 *   sim_tool init           prints the result of cuInit */
#include "sim_client.h"

#include <unistd.h>

static void wait_for_end(void)
{
    char byte;
    fflush(stdout);
    while (read(0, &byte, 1) > 0)
        ;
}

static void hold(int count, char **sizes)
{
    CUdeviceptr address;
    int got = 0;
    for (int i = 0; i < count; i++) {
        int result = (int)cuMemAlloc_v2(&address, strtoull(sizes[i], NULL, 10) * MIB);
        got += result == CUDA_SUCCESS;
        if (result != CUDA_SUCCESS)
            SAME(result, CUDA_ERROR_OUT_OF_MEMORY);
    }
    printf("held %d\n", got);
    wait_for_end();
}

static void steps(void)
{
    char line[64];
    CUdeviceptr address;
    puts("ready");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        printf("%d\n", (int)cuMemAlloc_v2(&address, strtoull(line, NULL, 10) * MIB));
        fflush(stdout);
    }
}

static void queue(const char *name, int count, int wait)
{
    CUstream stream;
    CUevent first, last;
    float milliseconds = 0;
    CUfunction kernel = sim_kernel(name);
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuEventCreate(&first, 0));
    OK(cuEventCreate(&last, 0));
    OK(cuEventRecord(first, stream));
    for (int i = 0; i < count; i++)
        sim_launch(kernel, stream);
    OK(cuEventRecord(last, stream));
    if (!wait) {
        EXPECT(cuEventQuery(last), CUDA_ERROR_NOT_READY);
        puts("queued");
        wait_for_end();
        return;
    }
    OK(cuEventSynchronize(last));
    OK(cuEventElapsedTime(&milliseconds, first, last));
    printf("%.0f\n", (double)milliseconds * 1000);
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    if (!strcmp(what, "init")) {
        printf("%d\n", (int)cuInit(0));
        return 0;
    }
    if (!strcmp(what, "devices")) {
        int count;
        OK(cuInit(0));
        OK(cuDeviceGetCount(&count));
        for (int i = 0; i < count; i++) {
            char name[128];
            size_t bytes;
            OK(cuDeviceGetName(name, sizeof name, i));
            OK(cuDeviceTotalMem_v2(&bytes, i));
            printf("%s %zu\n", name, bytes / MIB);
        }
        return 0;
    }
    sim_start();
    if (!strcmp(what, "hold"))
        hold(argc - 2, argv + 2);
    else if (!strcmp(what, "steps"))
        steps();
    else if (!strcmp(what, "queue"))
        queue(argv[2], atoi(argv[3]), 0);
    else if (!strcmp(what, "run"))
        queue(argv[2], atoi(argv[3]), 1);
    else if (!strcmp(what, "info")) {
        size_t left, total;
        OK(cuMemGetInfo_v2(&left, &total));
        printf("%zu %zu\n", left / MIB, total / MIB);
    } else
        return 2;
    return 0;
}
