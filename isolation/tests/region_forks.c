/* Forks beside a thread that takes its slot: region_forks BYTES LIMIT One thread reserves BYTES for the first time
 * while another forks children, which stay. Prints the verdict (0: granted), then waits to be killed; what its children
 * have inherited must not keep the bytes reserved. */
#include "fgpu.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define CHILDREN 12

static atomic_bool go;
static uint64_t bytes, limit;

static void *reserve(void *unused) {
    (void)unused;
    while (!atomic_load(&go))
        ;
    printf("%d\n", (int)fgpu_reserve(0, bytes, limit));
    fflush(stdout);
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t thread;
    if (argc != 3)
        return 2;
    bytes = strtoull(argv[1], NULL, 10);
    limit = strtoull(argv[2], NULL, 10);
    fgpu_used(0); /* maps the region and binds all functions; only the slot is left to take */
    if (pthread_create(&thread, NULL, reserve, NULL) != 0)
        return 2;
    for (int i = 0; i < CHILDREN; i++) {
        if (i == 2)
            atomic_store(&go, true);
        if (fork() == 0) {
            close(1);
            for (;;)
                pause();
        }
    }
    pthread_join(thread, NULL);
    for (;;)
        pause();
}
