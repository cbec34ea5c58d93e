/* The storm: keeps WORKERS processes running that take and give back something limited, and kills them at random times.
 *
 *   storm LEDGER LIMIT WORKERS KILLS SEED PROGRAM [ARGUMENT...]
 *
 * A worker is PROGRAM with its arguments and, as the last one, its seed; it runs until it is killed. One that uses
 * storm.h writes what it really holds into the LEDGER, in which each grant is checked against LIMIT; others are only
 * killed. A worker is killed under the ledger's lock, and its entry is removed once it is dead, so at each check the
 * ledger has exactly what living processes hold. It may be killed anywhere outside the ledger's own few lines, even
 * while it is stopped. STORM_PACE=N in the environment waits N times as long between kills: for a driver with which a
 * worker starts slowly. Prints a line of JSON; ends with 1 if a worker ended on its own or a grant exceeded the limit.
 */
#include "storm.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static struct storm_ledger *ledger;
static const char *ledger_path;
static int ledger_lock;
static pid_t workers[STORM_WORKERS];
static char **program; /* with room for the seed */
static int program_size;
static uint64_t state;

static void wait_us(uint64_t us) {
    struct timespec time = {.tv_sec = (time_t)(us / 1000000), .tv_nsec = (long)(us % 1000000) * 1000};
    nanosleep(&time, NULL);
}

static void start(int index) {
    char seed[24], number[24];
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)storm_random(&state, UINT64_C(1) << 62) + 1);
    snprintf(number, sizeof number, "%d", index);
    pid_t storm = getpid();
    workers[index] = fork();
    if (workers[index] < 0) {
        perror("storm: fork");
        exit(2);
    }
    if (workers[index] > 0)
        return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != storm)
        _exit(2);
    setenv("STORM_LEDGER", ledger_path, 1);
    setenv("STORM_INDEX", number, 1);
    program[program_size] = seed;
    execv(program[0], program);
    perror(program[0]);
    _exit(127);
}

/* Under the ledger's lock: a worker dies while it waits for the lock, or anywhere else, but never within the ledger's
 * lines. */
static void kill_worker(int index) {
    int status;
    kill(workers[index], SIGKILL);
    if (waitpid(workers[index], &status, 0) < 0 || !WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) {
        fprintf(stderr, "storm: worker %d ended by itself: status %#x\n", index, status);
        exit(1);
    }
    ledger->held[index] = 0;
}

/* Stops the worker for a moment anywhere but in the ledger's lines: it must not stop with the lock. */
static void stop_for_a_moment(int index) {
    int status;
    storm_lock(ledger_lock);
    kill(workers[index], SIGSTOP);
    if (waitpid(workers[index], &status, WUNTRACED) < 0 || !WIFSTOPPED(status)) {
        fprintf(stderr, "storm: worker %d ended by itself: status %#x\n", index, status);
        exit(1);
    }
    storm_unlock(ledger_lock);
    wait_us(storm_random(&state, 3000));
}

int main(int argc, char **argv) {
    if (argc < 7) {
        fputs("storm LEDGER LIMIT WORKERS KILLS SEED PROGRAM [ARGUMENT...]\n", stderr);
        return 2;
    }
    ledger_path = argv[1];
    int descriptor = open(ledger_path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (descriptor < 0 || ftruncate(descriptor, sizeof *ledger) != 0) {
        perror(ledger_path);
        return 2;
    }
    close(descriptor);
    ledger_lock = storm_open(ledger_path, &ledger);
    ledger->limit = strtoull(argv[2], NULL, 10);
    const char *slower = getenv("STORM_PACE");
    const uint64_t pace = slower ? strtoull(slower, NULL, 10) : 1;
    int count = atoi(argv[3]), stops = 0;
    long kills = atol(argv[4]);
    state = strtoull(argv[5], NULL, 10) * UINT64_C(0x9e3779b97f4a7c15) + 1;
    program_size = argc - 6;
    program = calloc((size_t)program_size + 2, sizeof *program);
    memcpy(program, argv + 6, (size_t)program_size * sizeof *program);
    if (count < 1 || count > STORM_WORKERS || program == NULL)
        return 2;
    for (int i = 0; i < count; i++)
        start(i);
    for (long done = 0; done < kills; done++) {
        int index = (int)storm_random(&state, (uint64_t)count);
        /* Often soon after a start, while slots are taken; seldom later. */
        wait_us(pace * storm_random(&state, storm_random(&state, 4) == 0 ? 10000 : 1500));
        if (storm_random(&state, 8) == 0) {
            stop_for_a_moment(index);
            stops++;
            if (storm_random(&state, 2) == 0)
                kill(workers[index], SIGCONT);
        }
        storm_lock(ledger_lock);
        kill_worker(index);
        storm_unlock(ledger_lock);
        start(index);
    }
    for (int i = 0; i < count; i++) {
        storm_lock(ledger_lock);
        kill_worker(i);
        storm_unlock(ledger_lock);
    }
    printf("{\"kills\": %ld, \"stops\": %d, \"grants\": %llu, \"refusals\": %llu, \"most\": %llu, \"violations\": %llu}\n",
           kills + count, stops, (unsigned long long)ledger->grants, (unsigned long long)ledger->refusals,
           (unsigned long long)ledger->most, (unsigned long long)ledger->violations);
    return ledger->violations > 0;
}
