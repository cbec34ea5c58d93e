/* Interleaves processes instruction by instruction, through ptrace. x86-64 only: elsewhere a load-exclusive and its
 * store do not survive a single step. Everything is about device 0 and a LIMIT of 1,000 bytes.
 *
 *   region_steps pairs N     two processes want 600 each: the first runs j instructions, the second k, the first as
 *                            many as it needs without a rival, then both continue: exactly one gets it. For every N-th
 *                            pair of j and k, from the announcement to its withdrawal
 *   region_steps kills       a process is killed after k instructions of taking and giving back 600: then 1,000 are
 *                            available
 *   region_steps claims      the same, from before it has a slot
 *   region_steps contended   the same, where it first finds the limit reached
 *   region_steps stops       a process is stopped there instead: others still get the 400 that it does not want, and an
 *                            answer about 1,000; and it gets its own when it continues. But while it is stopped exactly
 *                            where it moves its 600 from announced to held, they count twice, and others do not get 400
 *   region_steps heirs       a killed process has left 1,000; another one is stopped anywhere in taking 600 of them:
 *                            the other 400 are available
 *   region_steps newcomers   the same, and it has no slot before, so it takes the dead one's
 *   region_steps moves       400 move from one process to another while a third sums, anywhere in taking the other 600
 *                            with a closer look: it gets them, although it can see the 400 twice
 *
 * Prints a line of JSON with what was tried; otherwise ends with 1 and prints what went wrong. 77: ptrace is not
 * allowed. */
#include "region.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LIMIT 1000
#define WANTED 600
#define PATIENCE_MS 90 /* slightly less than the longest closer look */
#define FAR 400 /* instructions: more than a reservation without a rival takes */
#define MOVING 3 /* the most instructions between the two that move an announced amount to the held one */

#if defined(__x86_64__)
#define BREAK __asm__ volatile("int3" ::: "memory")
#else
#define BREAK raise(SIGTRAP)
#endif

struct subject {
    pid_t pid;
    volatile int done; /* the verdict is known */
    volatile int verdict; /* of the reservation */
};

static struct subject *subjects; /* shared */
static struct region *region;
static const char *doing = "starting";
static long first, second;

__attribute__((noreturn)) static void fail(const char *what) {
    fprintf(stderr, "%s, j=%ld k=%ld: %s\n", doing, first, second, what);
    exit(1);
}

/* ---- The subjects ---- */

static void begin(void) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0)
        _exit(77);
}

/* Takes and gives back repeatedly: stops before each time, and when there is a verdict. */
__attribute__((noreturn)) static void reserve_on_command(struct subject *self) {
    begin();
    if (fgpu_reserve(0, 1, LIMIT) == FGPU_GRANTED)
        fgpu_release(0, 1);
    for (;;) {
        BREAK;
        self->verdict = (int)fgpu_reserve(0, WANTED, LIMIT);
        self->done = 1;
        BREAK;
        if (self->verdict == FGPU_GRANTED)
            fgpu_release(0, WANTED);
        self->done = 0;
    }
}

__attribute__((noreturn)) static void reserve_once(struct subject *self, bool with_slot) {
    begin();
    self->done = 0;
    if (with_slot && fgpu_reserve(0, 1, LIMIT) == FGPU_GRANTED)
        fgpu_release(0, 1);
    BREAK;
    self->verdict = (int)fgpu_reserve(0, WANTED, LIMIT);
    if (self->verdict == FGPU_GRANTED)
        fgpu_release(0, WANTED);
    self->done = 1;
    BREAK;
    _exit(0);
}

/* ---- Controlling them ---- */

static void expect_trap(struct subject *subject) {
    int status;
    if (waitpid(subject->pid, &status, __WALL) != subject->pid)
        fail(strerror(errno));
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
        exit(77);
    if (!WIFSTOPPED(status) || WSTOPSIG(status) != SIGTRAP)
        fail("a subject did something else than stopping");
}

static void lead(struct subject *subject, enum __ptrace_request how) {
    if (ptrace(how, subject->pid, NULL, NULL) != 0)
        fail(strerror(errno));
}

/* Runs up to `count` instructions, fewer if the subject ends. Returns their number. */
static long step(struct subject *subject, long count) {
    long steps = 0;
    for (; steps < count && !subject->done; steps++) {
        lead(subject, PTRACE_SINGLESTEP);
        expect_trap(subject);
    }
    return steps;
}

static void finish(struct subject *subject) {
    if (subject->done) /* reached by steps, just before its break */
        return;
    lead(subject, PTRACE_CONT);
    expect_trap(subject);
    if (!subject->done)
        fail("a subject stopped before its verdict");
}

/* Back to where it stops before the next time. */
static void reset(struct subject *subject) {
    do {
        lead(subject, PTRACE_CONT);
        expect_trap(subject);
    } while (subject->done);
}

static void start(struct subject *subject, bool on_command, bool with_slot) {
    subject->done = 0;
    pid_t child = fork(); /* not directly into the shared memory, where the child's zero could overwrite it */
    if (child == 0) {
        if (on_command)
            reserve_on_command(subject);
        reserve_once(subject, with_slot);
    }
    subject->pid = child;
    expect_trap(subject);
}

static void end(struct subject *subject) {
    kill(subject->pid, SIGKILL);
    while (waitpid(subject->pid, NULL, __WALL) < 0 && errno == EINTR)
        ;
}

static void expect_all_free(void) {
    if (fgpu_reserve(0, LIMIT, LIMIT) != FGPU_GRANTED)
        fail("not all is free");
    fgpu_release(0, LIMIT);
    if (fgpu_used(0) != 0)
        fail("something is used");
}

/* ---- The scenarios ---- */

/* By any process: no other is about to reserve. */
static bool announced(void) {
    bool any = false;
    for (int slot = 0; slot < 4; slot++)
        any |= region->cell[0][slot].pending != 0;
    return any;
}

struct span {
    long from, to, end; /* in instructions: announced from here to there, and the total */
};

static struct span announced_span(struct subject *subject) {
    struct span span = {.from = -1};
    for (; !subject->done; span.end += step(subject, 1)) {
        if (announced() && span.from < 0)
            span.from = span.end;
        if (announced())
            span.to = span.end + 1;
        if (span.end > FAR)
            fail("a reservation that meets nobody takes longer than expected");
    }
    reset(subject);
    return span;
}

static void try_pair(struct subject *a, struct subject *b, struct span span) {
    step(a, first);
    step(b, second);
    step(a, span.end - first);
    bool a_runs = !a->done, b_runs = !b->done;
    if (a_runs)
        lead(a, PTRACE_CONT);
    if (b_runs)
        lead(b, PTRACE_CONT);
    if (a_runs)
        expect_trap(a);
    if (b_runs)
        expect_trap(b);
    if (!a->done || !b->done)
        fail("a subject stopped before its verdict");
    int granted = (a->verdict == FGPU_GRANTED) + (b->verdict == FGPU_GRANTED);
    if (granted != 1)
        fail(granted ? "both got it" : "neither got it");
    if (fgpu_used(0) != WANTED)
        fail("the account is wrong");
    reset(a);
    reset(b);
}

static void pairs(long stride) {
    struct span span;
    long tried = 0;
    for (int order = 0; order < 2; order++) { /* first the one with the lower slot begins, then the other */
        struct subject *a = &subjects[order], *b = &subjects[!order];
        start(&subjects[0], true, true);
        start(&subjects[1], true, true);
        span = announced_span(a);
        for (first = span.from - 1; first <= span.to; first++)
            for (second = span.from - 1 + first % stride; second <= span.to; second += stride, tried++)
                try_pair(a, b, span);
        end(a);
        end(b);
    }
    printf("{\"instructions\": %ld, \"announced\": %ld, \"tried\": %ld}\n", span.end, span.to - span.from, tried);
}

static void kills(bool with_slot, bool contended, long stride) {
    struct subject *a = &subjects[0];
    long tried = 0;
    for (second = 0;; second += stride, tried++) {
        if (contended && fgpu_reserve(0, WANTED, LIMIT) != FGPU_GRANTED)
            fail("the first part was not granted");
        start(a, false, with_slot);
        step(a, second);
        bool over = a->done;
        end(a);
        if (contended)
            fgpu_release(0, WANTED);
        expect_all_free();
        if (over)
            break;
    }
    printf("{\"instructions\": %ld, \"tried\": %ld}\n", second, tried);
}

static void stops(void) {
    struct subject *a = &subjects[0];
    long tried = 0, over = 0, moving = 0;
    start(a, true, true);
    struct span span = announced_span(a);
    for (second = span.from - 1; second <= span.to; second++, tried++) {
        step(a, second);
        if (fgpu_reserve(0, LIMIT - WANTED, LIMIT) == FGPU_GRANTED)
            fgpu_release(0, LIMIT - WANTED);
        else if (++moving > MOVING || !announced() || fgpu_used(0) != WANTED)
            fail("what the stopped one does not want was not granted");
        enum fgpu_verdict verdict = fgpu_reserve(0, LIMIT, LIMIT);
        if (verdict == FGPU_GRANTED)
            fgpu_release(0, LIMIT);
        over += verdict == FGPU_OVER;
        finish(a);
        if (a->verdict != FGPU_GRANTED)
            fail("the stopped one was not granted its own");
        reset(a);
    }
    end(a);
    expect_all_free();
    printf("{\"tried\": %ld, \"over\": %ld, \"moving\": %ld}\n", tried, over, moving);
}

static void leave_everything_to_nobody(void) {
    pid_t child = fork();
    if (child == 0)
        _exit(fgpu_reserve(0, LIMIT, LIMIT) == FGPU_GRANTED ? 0 : 1);
    int status;
    if (waitpid(child, &status, 0) != child || status != 0)
        fail("the one that dies did not get it");
}

static void heirs(bool with_slot, long stride) {
    struct subject *a = &subjects[0];
    long tried = 0, moving = 0;
    bool finished = false;
    for (second = 0; !finished; second += stride, tried++) {
        if (with_slot)
            start(a, false, true);
        leave_everything_to_nobody();
        if (!with_slot)
            start(a, false, false); /* and it takes the dead one's */
        step(a, second);
        finished = a->done;
        bool granted = fgpu_reserve(0, LIMIT - WANTED, LIMIT) == FGPU_GRANTED;
        if (!granted && (++moving > MOVING || !announced() || fgpu_used(0) != WANTED))
            fail("what is nobody's was not granted");
        finish(a);
        if (a->verdict != FGPU_GRANTED)
            fail("the heir was not granted its part");
        if (granted)
            fgpu_release(0, LIMIT - WANTED);
        end(a);
        expect_all_free();
    }
    printf("{\"instructions\": %ld, \"tried\": %ld}\n", second, tried);
}

static double milliseconds_since(const struct timespec *begun) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)(now.tv_sec - begun->tv_sec) * 1e3 + (double)(now.tv_nsec - begun->tv_nsec) / 1e6;
}

/* The tracer has slot 0, the one that sums has 1, an idle process 2: what these hold is set here, as if they moved it
 * at this very instruction. */
static void moves(long stride) {
    struct subject *a = &subjects[0], *b = &subjects[1];
    struct region_cell *cells = region->cell[0];
    long tried = 0, hurried = 0;
    bool finished = false;
    start(a, true, true);
    start(b, true, true);
    for (second = 0; !finished; second += stride, tried++) {
        struct timespec begun;
        clock_gettime(CLOCK_MONOTONIC, &begun);
        cells[0].committed = cells[2].committed = LIMIT - WANTED;
        while (!announced())
            step(a, 1);
        while (announced()) /* it has seen too much, and begins its closer look */
            step(a, 1);
        cells[2].committed = 0;
        step(a, second);
        finished = a->done;
        cells[0].committed = 0;
        cells[2].committed = LIMIT - WANTED;
        finish(a);
        if (a->verdict != FGPU_GRANTED) {
            if (milliseconds_since(&begun) < PATIENCE_MS || ++hurried > 200)
                fail("it was not granted what is free");
            /* Stepping took longer than its patience, which proves nothing: try again. */
            finished = false;
            second -= stride;
        }
        reset(a);
        cells[2].committed = 0;
    }
    end(a);
    end(b);
    printf("{\"instructions\": %ld, \"tried\": %ld}\n", second, tried);
}

static void map_region(void) {
    char path[4096];
    snprintf(path, sizeof path, "%s/accounting", fgpu_folder());
    int descriptor = open(path, O_RDWR);
    region = mmap(NULL, sizeof *region, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (region == MAP_FAILED)
        fail(path);
}

int main(int argc, char **argv) {
    if (argc < 2)
        return 2;
    doing = argv[1];
    subjects = mmap(NULL, 2 * sizeof *subjects, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    map_region();
    expect_all_free(); /* binds all functions before any fork */
    if (strcmp(doing, "pairs") == 0)
        pairs(argc > 2 ? atol(argv[2]) : 1);
    else if (strcmp(doing, "kills") == 0)
        kills(true, false, 1);
    else if (strcmp(doing, "claims") == 0)
        kills(false, false, 23);
    else if (strcmp(doing, "contended") == 0)
        kills(true, true, 23);
    else if (strcmp(doing, "heirs") == 0)
        heirs(true, 7);
    else if (strcmp(doing, "newcomers") == 0)
        heirs(false, 7);
    else if (strcmp(doing, "moves") == 0)
        moves(5);
    else if (strcmp(doing, "stops") == 0)
        stops();
    else
        return 2;
    return 0;
}
