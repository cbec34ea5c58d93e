/* Linked against the driver: prints the driver's answer about the device, 0 for an error, and how this program was
 * started. */
#include "cuda_abi.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int count, char **words) {
    size_t linked = 0, found = 0;
    char name[32] = "";
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    __typeof__(&cuDeviceTotalMem_v2) total = NULL;
    if (driver != NULL)
        total = (__typeof__(total))dlsym(driver, "cuDeviceTotalMem_v2");
    if (cuInit(0) != CUDA_SUCCESS || cuDeviceTotalMem_v2(&linked, 0) != CUDA_SUCCESS)
        linked = 0;
    if (total == NULL || total(&found, 0) != CUDA_SUCCESS)
        found = 0;
    FILE *file = fopen("/proc/self/comm", "r");
    if (file == NULL || fgets(name, sizeof name, file) == NULL)
        return 1;
    printf("linked %zu\nfound %zu\npid %d\nname %s", linked >> 20, found >> 20, (int)getpid(), name);
    printf("kept %s\n", getenv("KEPT") ? getenv("KEPT") : "");
    for (int i = 0; i < count; i++)
        printf("word %s\n", words[i]);
    return 0;
}
