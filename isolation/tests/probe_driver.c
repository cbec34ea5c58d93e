/* A driver that misbehaves, under both names: MISBEHAVIOUR is a statement in its initialisation. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* For `atexit(hang)`. */
__attribute__((unused)) static void hang(void)
{
    for (;;)
        pause();
}

static int start(void)
{
    MISBEHAVIOUR;
    return 0;
}

int cuInit(unsigned flags)
{
    return flags == 0 ? start() : 1;
}

int nvmlInit_v2(void)
{
    return start();
}

int cuDriverGetVersion(int *version)
{
    *version = 13000;
    return 0;
}

int cuDeviceGetCount(int *count)
{
    *count = 1;
    return 0;
}

int cuDeviceGet(int *device, int index)
{
    *device = index;
    return 0;
}

/* A manipulated driver's name: quotes, a newline, bytes that are not UTF-8. */
int cuDeviceGetName(char *name, int size, int device)
{
    strncpy(name, "\"},\n{\\ \xff\x1b[2J", (size_t)size);
    return device;
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = 0;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    *device = NULL;
    return index == 0 ? 0 : 2;
}

const char *nvmlErrorString(int code)
{
    return code == 9 ? "Driver Not Loaded" : "Unknown Error";
}
