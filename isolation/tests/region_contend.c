/* Processes that want the same bytes at the same time: region_contend PROCESSES GREEDY ROUNDS BYTES LIMIT One byte
 * above LIMIT is available and held by another process; GREEDY more processes want everything, in vain. Prints a line
 * of JSON: in how many rounds fewer, and in how many more were granted than fit into the limit. */
#include "fgpu.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <signal.h>
#include <unistd.h>

struct shared {
    atomic_ulong arrived;
    atomic_ulong winners;
    unsigned long fewer, more, refused, greedy;
};

static struct shared *shared;
static unsigned long processes, greedy, meetings;

static void meet(void) {
    meetings++;
    atomic_fetch_add(&shared->arrived, 1);
    while (atomic_load(&shared->arrived) < meetings * (processes + greedy))
        sched_yield();
}

static void contend(unsigned long number, unsigned long rounds, uint64_t bytes, uint64_t limit) {
    unsigned long fit = (unsigned long)(limit / bytes) < processes ? (unsigned long)(limit / bytes) : processes;
    for (unsigned long round = 0; round < rounds; round++) {
        meet();
        enum fgpu_verdict verdict = fgpu_reserve(0, number < processes ? bytes : limit + 1, limit + 1);
        if (verdict == FGPU_GRANTED && number >= processes)
            shared->greedy++;
        else if (verdict == FGPU_GRANTED)
            atomic_fetch_add(&shared->winners, 1);
        else if (verdict == FGPU_REFUSED)
            shared->refused++;
        meet();
        if (number == 0) {
            unsigned long winners = atomic_exchange(&shared->winners, 0);
            shared->fewer += winners < fit;
            shared->more += winners > fit;
        }
        if (verdict == FGPU_GRANTED)
            fgpu_release(0, number < processes ? bytes : limit + 1);
    }
}

int main(int argc, char **argv) {
    if (argc != 6)
        return 2;
    processes = strtoul(argv[1], NULL, 10);
    greedy = strtoul(argv[2], NULL, 10);
    uint64_t limit = strtoull(argv[5], NULL, 10);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (fgpu_reserve(0, 1, limit + 1) != FGPU_GRANTED)
        return 1;
    for (unsigned long number = 0; number < processes + greedy; number++) {
        if (fork() == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            contend(number, strtoul(argv[3], NULL, 10), strtoull(argv[4], NULL, 10), limit);
            _exit(0);
        }
    }
    while (wait(NULL) > 0)
        ;
    fgpu_release(0, 1);
    printf("{\"fewer\": %lu, \"more\": %lu, \"refused\": %lu, \"greedy\": %lu, \"left\": %llu}\n", shared->fewer,
           shared->more, shared->refused, shared->greedy, (unsigned long long)fgpu_used(0));
    return 0;
}
