/* A worker of the storm: takes and gives back device memory through the driver, in several ways, until it is killed.
 * storm_cuda SEED Ends with 1 if the driver returns anything but success or out of memory. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { HELD = 24, OUT_OF_MEMORY = 2 };

static void *cuda;

static void *function(const char *name)
{
    void *found = dlsym(cuda, name);
    if (!found) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    return found;
}

static void expect(int status, int also, const char *what)
{
    if (status != 0 && status != also) {
        fprintf(stderr, "%s: error %d\n", what, status);
        exit(1);
    }
}

int main(int argc, char **argv)
{
    uint64_t state = argc > 1 ? strtoull(argv[1], NULL, 10) * 2654435761u + 1 : 1;
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cuda) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    int (*init)(unsigned) = (int (*)(unsigned))function("cuInit");
    int (*get)(int *, int) = (int (*)(int *, int))function("cuDeviceGet");
    int (*retain)(void **, int) = (int (*)(void **, int))function("cuDevicePrimaryCtxRetain");
    int (*set)(void *) = (int (*)(void *))function("cuCtxSetCurrent");
    int (*alloc)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))function("cuMemAlloc_v2");
    int (*pitched)(uint64_t *, size_t *, size_t, size_t, unsigned) =
        (int (*)(uint64_t *, size_t *, size_t, size_t, unsigned))function("cuMemAllocPitch_v2");
    int (*release)(uint64_t) = (int (*)(uint64_t))function("cuMemFree_v2");
    int (*take)(uint64_t *, size_t, void *) = (int (*)(uint64_t *, size_t, void *))function("cuMemAllocAsync");
    int (*give)(uint64_t, void *) = (int (*)(uint64_t, void *))function("cuMemFreeAsync");
    int device;
    void *context;
    expect(init(0), 0, "cuInit");
    expect(get(&device, 0), 0, "cuDeviceGet");
    /* With a context charged, even this may find the slice full. */
    int status;
    while ((status = retain(&context, device)) != 0)
        expect(status, OUT_OF_MEMORY, "cuDevicePrimaryCtxRetain");
    expect(set(context), 0, "cuCtxSetCurrent");
    struct {
        uint64_t address;
        int asynchronous;
    } held[HELD] = {0};
    for (;;) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        const unsigned i = (unsigned)(state % HELD);
        if (held[i].address) {
            expect(held[i].asynchronous ? give(held[i].address, NULL) : release(held[i].address), 0, "free");
            held[i].address = 0;
        } else {
            const size_t bytes = 1 + (state >> 20) % ((size_t)96 << 20);
            const unsigned way = (unsigned)(state >> 60);
            held[i].asynchronous = way < 3;
            if (way < 3) {
                status = take(&held[i].address, bytes, NULL);
            } else if (way < 8) { /* Narrow rows too: the driver makes them many times as wide. */
                const size_t width = 1 + (state >> 8) % 2000;
                size_t pitch;
                status = pitched(&held[i].address, &pitch, width, 1 + bytes / 2000, 4);
            } else {
                status = alloc(&held[i].address, bytes);
            }
            expect(status, OUT_OF_MEMORY, "allocation");
            if (status)
                held[i].address = 0;
        }
    }
}
