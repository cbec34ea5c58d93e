/* Threads that take one context's lock: the one that launched first, which holds it with plain stores while no other
 * thread wants it, and others now and then.
 *     lock_turns THREADS MS [deny] deny: once the lock exists, the system refuses membarrier and sleep. Prints how
 *     often the threads took it, how often that was counted under it (less if two were inside at once), and how often
 *     the favour ended. The owner writes to scattered places first, so that its stores wait for memory. */
#include "../libfgpu/throttle.h"
#include "../libfgpu/clock.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/syscall.h>

static struct context context;
static uint64_t until;
static volatile uint64_t counted; /* under the lock, like the two below */
static bool was_favoured;
static uint64_t ended;
static uint64_t taken[16];
static volatile char cold[1 << 26];

static void deny(void) {
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_membarrier, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clock_nanosleep, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof rules / sizeof *rules, rules};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
        exit(2);
}

static void take(unsigned number) {
    throttle_lock(&context);
    counted = counted + 1;
    ended += was_favoured && !context.lock.favoured;
    was_favoured = context.lock.favoured;
    throttle_unlock(&context);
    taken[number]++;
}

/* Bursts of varying length, then a pause: the owner is favoured again in between. */
static void *work(void *argument) {
    unsigned number = (unsigned)(uintptr_t)argument;
    do { /* at least once, however late the thread is */
        for (unsigned n = 0; n < (number == 0 ? 2000u : number); n++) {
            for (unsigned line = 0; number == 0 && line < 4; line++)
                cold[(counted * 4 + line) * 40503 * 64 % sizeof cold] = 1;
            take(number);
        }
        if (number > 0)
            select(0, NULL, NULL, NULL, &(struct timeval){.tv_usec = 20 * number});
    } while (fgpu_now() < until);
    return NULL;
}

int main(int argc, char **argv) {
    unsigned threads = argc > 2 ? (unsigned)atoi(argv[1]) : 0;
    if (threads == 0 || threads > 16)
        return 2;
    throttle_begin_lock(&context.lock);
    was_favoured = context.lock.favoured;
    if (argc > 3 && strcmp(argv[3], "deny") == 0)
        deny();
    until = fgpu_now() + (uint64_t)atoi(argv[2]) * 1000000;
    pthread_t others[16];
    for (unsigned n = 1; n < threads; n++)
        if (pthread_create(&others[n], NULL, work, (void *)(uintptr_t)n) != 0)
            return 2;
    work(NULL);
    for (unsigned n = 1; n < threads; n++)
        pthread_join(others[n], NULL);
    uint64_t sum = 0;
    for (unsigned n = 0; n < threads; n++)
        sum += taken[n];
    printf("%llu %llu %llu\n", (unsigned long long)sum, (unsigned long long)counted, (unsigned long long)ended);
    return 0;
}
