/* park_worker SEED MIB: a program that uses its GPU all the time and checks each byte that it reads back, until its
 * standard input ends. Prints "ready", and at the end how many rounds it made. Ends with 1 at the first wrong byte or
 * error. */
#include "sim_client.h"

#include <poll.h>
#include <unistd.h>

#define CHUNK ((size_t)64 << 10)
#define BUFFERS 3

static uint64_t random_state;

static uint64_t random_number(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static CUdeviceptr buffers[BUFFERS];
static unsigned char *copies[BUFFERS], chunk[CHUNK];
static size_t bytes;

static void check(unsigned buffer, size_t at)
{
    OK(cuMemcpyDtoH_v2(chunk, buffers[buffer] + at, CHUNK));
    TRUE(memcmp(chunk, copies[buffer] + at, CHUNK) == 0);
}

static void change(unsigned buffer, size_t at, CUstream stream)
{
    for (size_t i = 0; i < CHUNK; i += 8) {
        uint64_t word = random_number();
        memcpy(copies[buffer] + at + i, &word, 8);
    }
    OK(cuMemcpyHtoDAsync_v2(buffers[buffer] + at, copies[buffer] + at, CHUNK, stream));
}

static void make_buffers(CUstream stream)
{
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    CUmemAccessDesc access = {.location = properties.location, .flags = 3};
    CUmemGenericAllocationHandle handle;
    OK(cuMemAlloc_v2(&buffers[0], bytes));
    OK(cuMemAllocAsync(&buffers[1], bytes, stream));
    OK(cuMemCreate(&handle, bytes, &properties, 0));
    OK(cuMemAddressReserve(&buffers[2], bytes, 0, 0, 0));
    OK(cuMemMap(buffers[2], bytes, 0, handle, 0));
    OK(cuMemSetAccess(buffers[2], bytes, &access, 1));
    for (unsigned buffer = 0; buffer < BUFFERS; buffer++) {
        TRUE(copies[buffer] = malloc(bytes));
        for (size_t at = 0; at < bytes; at += CHUNK)
            change(buffer, at, stream);
    }
}

static void one_round(CUfunction kernel, CUstream stream)
{
    unsigned buffer = (unsigned)(random_number() % BUFFERS);
    size_t at = random_number() % (bytes / CHUNK) * CHUNK;
    CUdeviceptr more;
    switch (random_number() % 5) {
    case 0:
        check(buffer, at);
        break;
    case 1:
        change(buffer, at, stream);
        break;
    case 2:
        sim_launch(kernel, stream);
        break;
    case 3:
        OK(cuMemAlloc_v2(&more, 4096));
        OK(cuMemFree_v2(more));
        break;
    default:
        OK(cuStreamSynchronize(stream));
    }
}

int main(int count, char **words)
{
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    unsigned long rounds = 0;
    CUstream stream;
    TRUE(count == 3);
    random_state = strtoull(words[1], NULL, 10) + 88172645463325252u;
    bytes = strtoull(words[2], NULL, 10) * MIB;
    sim_start();
    OK(cuStreamCreate(&stream, 1));
    CUfunction kernel = sim_kernel("spin_50us");
    make_buffers(stream);
    puts("ready");
    fflush(stdout);
    while (poll(&input, 1, 0) == 0) {
        one_round(kernel, stream);
        rounds++;
        usleep(200);
    }
    for (unsigned buffer = 0; buffer < BUFFERS; buffer++)
        for (size_t at = 0; at < bytes; at += CHUNK)
            check(buffer, at);
    printf("%lu\n", rounds);
    return 0;
}
