/* A program that computes without libfgpu, linked statically with the simulated driver: kernels of 5 ms, one after
 * another. It takes no memory.
 *
 *   around             in its first thread
 *   around thread      in a second thread, after the first one has ended
 *   around relay       in children of half a second, one after another
 *   around kill        in its first thread, while a child kills every probe that it may kill */
#include "cuda_abi.h"

#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void check(CUresult result, const char *what)
{
    if (result != CUDA_SUCCESS) {
        printf("%s: %d\n", what, (int)result);
        fflush(stdout);
        __builtin_trap();
    }
}

static void *compute(void *nothing)
{
    static const char text[] =
        ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry spin_5ms()\n{\nret;\n}\n";
    CUcontext context;
    CUmodule module;
    CUfunction kernel;

    check(cuInit(0), "cuInit");
    check(cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
    check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    check(cuModuleLoadData(&module, text), "cuModuleLoadData");
    check(cuModuleGetFunction(&kernel, module, "spin_5ms"), "cuModuleGetFunction");
    for (;;) {
        check(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
        check(cuCtxSynchronize(), "cuCtxSynchronize");
    }
    return nothing;
}

static void kill_probes(void)
{
    for (;;) {
        DIR *processes = opendir("/proc");
        const struct dirent *one;

        while ((one = readdir(processes)) != NULL) {
            char path[300], command[64] = "";
            FILE *file;

            snprintf(path, sizeof path, "/proc/%s/cmdline", one->d_name);
            if ((file = fopen(path, "r")) == NULL)
                continue;
            if (fgets(command, sizeof command, file) && strstr(command, "probe-static"))
                kill(atoi(one->d_name), SIGKILL);
            fclose(file);
        }
        closedir(processes);
    }
}

int main(int count, char **words)
{
    const char *way = count > 1 ? words[1] : "";
    pthread_t thread;

    if (strcmp(way, "thread") == 0) {
        pthread_create(&thread, NULL, compute, NULL);
        syscall(SYS_exit, 0);
    }
    if (strcmp(way, "kill") == 0 && fork() == 0)
        kill_probes();
    while (strcmp(way, "relay") == 0) {
        pid_t child = fork();

        if (child == 0)
            compute(NULL);
        usleep(500000);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
    }
    compute(NULL);
}
