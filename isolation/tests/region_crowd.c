/* More processes than there are slots: region_crowd PROCESSES BYTES LIMIT Each takes BYTES and stays. Then a tenth is
 * killed and replaced. Prints a line of JSON. */
#include "fgpu.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static unsigned counts[3];

static pid_t start(uint64_t bytes, uint64_t limit) {
    int ends[2];
    unsigned char verdict;
    if (pipe(ends) != 0)
        exit(2);
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        verdict = (unsigned char)fgpu_reserve(0, bytes, limit);
        if (write(ends[1], &verdict, 1) != 1)
            _exit(2);
        for (;;)
            pause();
    }
    if (child < 0 || read(ends[0], &verdict, 1) != 1) {
        perror("region_crowd");
        exit(2);
    }
    counts[verdict]++;
    close(ends[0]);
    close(ends[1]);
    return child;
}

static void report(const char *name) {
    printf("\"%s\": {\"granted\": %u, \"over\": %u, \"refused\": %u, \"used\": %llu}", name, counts[FGPU_GRANTED],
           counts[FGPU_OVER], counts[FGPU_REFUSED], (unsigned long long)fgpu_used(0));
    for (int i = 0; i < 3; i++)
        counts[i] = 0;
}

int main(int argc, char **argv) {
    if (argc != 4)
        return 2;
    unsigned processes = (unsigned)atoi(argv[1]);
    uint64_t bytes = strtoull(argv[2], NULL, 10), limit = strtoull(argv[3], NULL, 10);
    pid_t *children = calloc(processes, sizeof *children);
    for (unsigned i = 0; i < processes; i++)
        children[i] = start(bytes, limit);
    fputs("{", stdout);
    report("first");
    for (unsigned i = 0; i < processes / 10; i++) {
        kill(children[i * 10], SIGKILL);
        waitpid(children[i * 10], NULL, 0);
    }
    for (unsigned i = 0; i < processes / 10; i++)
        children[i * 10] = start(bytes, limit);
    fputs(", ", stdout);
    report("second");
    for (unsigned i = 0; i < processes; i++) {
        kill(children[i], SIGKILL);
        waitpid(children[i], NULL, 0);
    }
    fputs(", ", stdout);
    report("last");
    puts("}");
    return 0;
}
