/* Threads that take one context's lock: the one that launched first, which has it with plain stores as long as nobody else
 * wants it, and others, now and then.
 *     lock_turns THREADS MS [deny]
 * deny: once the lock is there, the system refuses to say that other processors' stores are seen.
 * Prints how often it was taken, how often somebody else was inside at the same time, and how often the favour ended. */
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
#include <sys/syscall.h>

static struct context context;
static uint64_t until;
static volatile uint64_t inside, taken, together; /* under the lock */
static volatile bool was_favoured;
static uint64_t favours;

static void deny_membarrier(void) {
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_membarrier, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof rules / sizeof *rules, rules};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
        exit(2);
}

static void take(void) {
    throttle_lock(&context);
    together += inside != 0;
    inside = 1;
    bool favoured = context.lock.favoured;
    favours += was_favoured && !favoured;
    was_favoured = favoured;
    taken++;
    inside = 0;
    throttle_unlock(&context);
}

/* Bursts of a length of their own, then nothing for a while: the owner is favoured again in between. */
static void *work(void *argument) {
    unsigned number = (unsigned)(uintptr_t)argument;
    for (uint64_t now = fgpu_now(); now < until; now = fgpu_now()) {
        for (unsigned n = 0; n < (number == 0 ? 2000u : number); n++)
            take();
        if (number > 0)
            fgpu_sleep_until(now + 20000 * number);
    }
    return NULL;
}

int main(int argc, char **argv) {
    unsigned threads = argc > 2 ? (unsigned)atoi(argv[1]) : 0;
    if (threads == 0 || threads > 16)
        return 2;
    throttle_begin_lock(&context.lock);
    if (argc > 3 && strcmp(argv[3], "deny") == 0)
        deny_membarrier();
    until = fgpu_now() + (uint64_t)atoi(argv[2]) * 1000000;
    pthread_t others[16];
    for (unsigned n = 1; n < threads; n++)
        if (pthread_create(&others[n], NULL, work, (void *)(uintptr_t)n) != 0)
            return 2;
    work(NULL);
    for (unsigned n = 1; n < threads; n++)
        pthread_join(others[n], NULL);
    printf("%llu %llu %llu\n", (unsigned long long)taken, (unsigned long long)together, (unsigned long long)favours);
    return 0;
}
