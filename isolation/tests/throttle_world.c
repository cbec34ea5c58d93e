/* A simulated world for the throttle, in which time passes only while every process waits: libfgpu's throttle as it is
 * shipped, one copy for each process of each tenant, with a device, a driver, a host and a clock that are simulated
 * here in one thread. So results are exact and repeatable, however busy the machine is.
 *
 *     throttle_world THROTTLE.so [policy=fifo|sliced] [seconds=N] [seed=N] [late_us=N] [stall_permille=N] TENANT...
 *
 * policy: fifo serves kernels in the order of their launches, as the simulated driver does; sliced gives each process
 * with work 2 ms in turn and interrupts kernels for it, as GPUs do. late_us: how late a sleeper wakes up, on average;
 * stall_permille: how often it is 3 ms more.
 *
 *     tenant:slots=0-25,kernel_us=500[,OPTION=N]...
 *
 * Slots are separated by +. Options:
 * - mix_us: one kernel in four has this length; later_us: all have it in the second half; change_us and every: of one
 *   function every N-th launch has this length, unpredictably
 * - processes, streams; contexts: a new context after each 50 launches
 * - wait_each: wait after this number of launches, as by cuStreamSynchronize; poll_each: likewise, by polling
 * - host_us: time between launches; idle_ms: pause after each burst; burst: launches in one (50)
 * - kill_ms: the first process dies then; start_ms: the programs begin then
 * - capture: some launches are captured into graphs; cig: likewise, into a graphics library's list
 * - collective: kernels that wait for each other; free: compute is not limited
 * - task_ms: notebook cells of exponential length with this mean, in ms of a whole device; gap_ms: the mean pause
 *   between them
 * - lending: it lends and borrows; most: percent including borrowed compute
 * - tenants that lie about their work: liar (always claims some), silent (never), future (from 2 s on its word is ten
 *   minutes ahead), unread (its word cannot be read), flicker (each reading finds its word, or nothing)
 *
 * words_us is the time to read one neighbour's word. The answer is one line of JSON. */
#include "hooks.h"
#include "slots.h"
#include "throttle.h"
#include "words.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <ucontext.h>
#include <unistd.h>

#define US UINT64_C(1000)
#define MS UINT64_C(1000000)
#define SECOND UINT64_C(1000000000)
#define START (1000 * SECOND) /* the clock's time at first */
#define SLICE (2 * MS)
#define MOST_TENANTS 12
#define MOST_PROCESSES 16
#define MOST_THREADS 32
#define OPS 4096
#define MOST_IN_FLIGHT 2048
#define QUEUE 1024 /* launches after which the driver itself waits */
#define COLLECTIVE 6 /* kernels that wait for each other run once this number is there */
#define STACK (256 * 1024)
#define NEVER UINT64_MAX

static void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    exit(2);
}

/* ---- The world's state ---- */

struct CUevent_st {
    struct process *process;
    uint64_t done_at; /* NEVER: recorded and not done */
    bool recorded, destroyed;
};

struct op {
    uint64_t number; /* of all launches: their order */
    uint64_t left;
    CUevent event;
    struct process *process;
};

struct tenant {
    const char *text;
    struct fgpu_limits limits;
    struct fgpu_time_account account;
    uint64_t kernel, mix, later, change, every, host, idle, burst, wait_each, poll_each, kill;
    unsigned processes, streams;
    uint64_t start, task, gap, word;
    bool capture, cig, contexts, collective, liar, silent, future, unread, flicker;
    double stretched; /* sum over cells of the factor by which one took longer than on a whole device */
    uint64_t cells, cell_time, cell_work;
    uint64_t busy, kernels, *busy_by_ms;
};

struct process {
    struct tenant *tenant;
    __typeof__(&cuLaunchKernel) launch;
    __typeof__(&cuStreamBeginCapture_v2) begin_capture;
    __typeof__(&cuStreamEndCapture) end_capture;
    __typeof__(&cuStreamBeginCaptureToCig) begin_cig;
    __typeof__(&cuStreamEndCaptureToCig) end_cig;
    void (*context_ended)(const void *, int);
    void (*waits_for)(void *, bool);
    uint64_t (*word)(uint64_t, uint64_t);
    void (*hear)(struct lending *, unsigned, uint64_t, uint64_t);
    uint64_t (*word_unread)(uint64_t);
    uint64_t changed; /* length of the current launch, if it differs from its function's; 0: it does not */
    struct op queue[OPS]; /* a ring; a process's streams are served in the order of launches */
    unsigned head, length;
    bool dead, capturing, relaxed;
    unsigned queued, gathered; /* kernels; of those that wait for each other, how many may run */
    unsigned incarnation; /* of its context */
    uint64_t events;
};

struct thread {
    ucontext_t state;
    struct process *process;
    uint64_t wake_at; /* NEVER: it waits for the device */
    uint64_t waits_for; /* op number; 0: none */
    unsigned held_locks;
    bool over;
};

static struct tenant tenants[MOST_TENANTS];
static struct process processes[MOST_PROCESSES];
static struct thread threads[MOST_THREADS];
static unsigned tenant_count, process_count, thread_count;
static struct thread *running;
static ucontext_t scheduler;
static uint64_t now = START, until = START + 10 * SECOND, late = 60 * US, words_time = US;
static unsigned stall_permille;
static bool sliced;
static uint64_t seed = 1, op_count, disturbed;

static uint64_t random_below(uint64_t limit) {
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return limit == 0 ? 0 : (seed >> 33) % limit;
}

/* ---- The device ---- */

static struct process *served;
static uint64_t slice_end;

static struct op *first_op(struct process *process) {
    struct op *op = &process->queue[process->head];
    if (process->length == 0 || (process->tenant->collective && op->event == NULL && process->gathered == 0))
        return NULL;
    return op;
}

/* The process whose turn it is; NULL if none has work. */
static struct process *turn(void) {
    struct process *best = NULL;
    if (sliced) {
        unsigned at = served == NULL ? 0 : (unsigned)(served - processes);
        bool stay = served != NULL && now < slice_end;
        for (unsigned n = stay ? 0 : 1; n <= process_count && best == NULL; n++)
            if (first_op(&processes[(at + n) % process_count]) != NULL)
                best = &processes[(at + n) % process_count];
        if (best != NULL && (best != served || now >= slice_end))
            slice_end = now + SLICE;
    } else {
        for (unsigned n = 0; n < process_count; n++) {
            struct op *op = first_op(&processes[n]);
            if (op != NULL && (best == NULL || op->number < first_op(best)->number))
                best = &processes[n];
        }
        if (served != NULL && first_op(served) != NULL && first_op(served)->left > 0 && first_op(served)->event == NULL)
            best = served; /* a kernel in progress is not interrupted */
    }
    return best;
}

static void account_busy(struct tenant *tenant, uint64_t from, uint64_t to) {
    tenant->busy += to - from;
    while (from < to) {
        uint64_t ms = (from - START) / MS, end = START + (ms + 1) * MS;
        if (end > to)
            end = to;
        tenant->busy_by_ms[ms] += end - from;
        from = end;
    }
}

static void finished(struct process *process, struct op *op) {
    for (unsigned n = 0; n < thread_count; n++)
        if (threads[n].waits_for == op->number) {
            threads[n].waits_for = 0;
            threads[n].wake_at = now + 5 * US + random_below(late);
        }
    if (op->event != NULL)
        op->event->done_at = now;
    else
        process->queued--;
    if (op->event == NULL && process->gathered > 0)
        process->gathered--;
    process->head = (process->head + 1) % OPS;
    process->length--;
}

/* Serves the device up to `to`, but stops at the end of an op, as a process may be waiting for it. */
static void serve(uint64_t to) {
    while (now < to) {
        served = turn();
        if (served == NULL) {
            now = to;
            return;
        }
        struct op *op = first_op(served);
        uint64_t end = now + op->left;
        if (sliced && end > slice_end)
            end = slice_end;
        if (end > to)
            end = to;
        if (op->event == NULL)
            account_busy(served->tenant, now, end);
        op->left -= end - now;
        now = end;
        if (op->left == 0) {
            finished(served, op);
            return;
        }
    }
}

static struct op *enqueue(struct process *process, uint64_t length, CUevent event) {
    if (process->length == OPS || process->queued > MOST_IN_FLIGHT)
        fail("more than %d launches in flight: the throttle does not hold them back", MOST_IN_FLIGHT);
    struct op *op = &process->queue[(process->head + process->length++) % OPS];
    *op = (struct op){++op_count, length, event, process};
    process->queued += event == NULL;
    if (process->gathered == 0 && process->queued >= COLLECTIVE)
        process->gathered = COLLECTIVE;
    return op;
}

/* ---- The host ---- */

static void yield_until(uint64_t time) {
    running->wake_at = time;
    swapcontext(&running->state, &scheduler);
}

static void use_host(uint64_t time) {
    yield_until(now + time);
}

static void wait_for_device(void) {
    struct process *process = running->process;
    if (process->length == 0)
        return;
    running->waits_for = process->queue[(process->head + process->length - 1) % OPS].number;
    yield_until(NEVER);
}

uint64_t fgpu_now(void);
void fgpu_sleep_until(uint64_t time);

uint64_t fgpu_now(void) {
    return now;
}

void fgpu_sleep_until(uint64_t time) {
    if (running->held_locks != 0)
        fail("a thread sleeps with a lock held");
    if (time > now + 100 * SECOND)
        fail("a thread sleeps for more than 100 seconds");
    uint64_t lateness = late / 2 + random_below(late);
    if (random_below(1000) < stall_permille)
        lateness += 3 * MS;
    yield_until((time > now ? time : now) + lateness);
}

/* All in one thread: a taken lock belongs to a process that waits. */
int pthread_mutex_lock(pthread_mutex_t *lock) {
    unsigned char *taken = (unsigned char *)lock;
    if (*taken)
        fail("a lock is held by a thread that waits");
    *taken = 1;
    running->held_locks++;
    return 0;
}

int pthread_mutex_unlock(pthread_mutex_t *lock) {
    *(unsigned char *)lock = 0;
    running->held_locks--;
    return 0;
}

_Thread_local char throttle_thread;

/* Everything is one thread here, so no process holds a context's lock with plain stores, which this would not notice.
 */
void throttle_begin_lock(struct lock *lock) {
    lock->owner = NULL;
}

void throttle_lock_slowly(struct lock *lock) {
    if (lock->taken)
        fail("a context's lock is held by a thread that waits");
    lock->taken = 1;
}

/* ---- The rest of libfgpu ---- */

_Atomic(void *) fgpu_reals[FGPU_REAL_COUNT];

void *fgpu_find_real(unsigned number) {
    (void)number;
    return NULL;
}

static const _Atomic(uint64_t) open_gate;
const _Atomic(uint64_t) *_Atomic fgpu_gate = &open_gate;

bool fgpu_wait_at_gate(void) {
    return true;
}

const struct fgpu_limits *fgpu_limits(void) {
    return &running->process->tenant->limits;
}

const _Atomic(uint64_t) *fgpu_revision_word(void) {
    return (const _Atomic(uint64_t) *)&fgpu_limits()->revision;
}

struct fgpu_time_account *fgpu_time_account(int device) {
    (void)device;
    return &running->process->tenant->account;
}

int fgpu_current_device(void) {
    return 0;
}

_Atomic(uint32_t) *_Atomic fgpu_process_known;

bool fgpu_forked_perhaps(void) {
    return false;
}

void fgpu_forget(void) {
}

void fgpu_log(const char *reason, const char *format, ...) {
    (void)format;
    fail("logged: %s", reason);
}


/* Like words.c, with one file for each tenant. */
bool fgpu_say_busy(int device, uint64_t time) {
    struct tenant *tenant = running->process->tenant;
    (void)device;
    use_host(2 * US);
    if (!tenant->silent)
        tenant->word = running->process->word(tenant->word, tenant->future && now > START + 2 * SECOND
                                                                ? time + 600 * SECOND : time);
    return true;
}

void fgpu_read_words(int device, struct lending *lending, uint64_t time) {
    (void)device;
    use_host(US);
    memset(lending->owner, 0, sizeof lending->owner);
    uint64_t words[LENDING_SLICES + 1] = {0};
    for (unsigned n = 0; n < tenant_count; n++) {
        const struct fgpu_device *limits = &tenants[n].limits.devices[0];
        for (unsigned slot = 0; slot < limits->slot_count; slot++)
            for (unsigned h = limits->slots[slot].from; h < limits->slots[slot].to; h++)
                lending->owner[h] = limits->lending == 0 ? LENDING_KEPT : (uint8_t)limits->lending;
        if (limits->lending == 0)
            continue;
        use_host(words_time);
        bool unread = tenants[n].unread && &tenants[n] != running->process->tenant;
        words[limits->lending] = unread ? running->process->word_unread(time) : tenants[n].word;
        if (tenants[n].flicker && random_below(2) == 0)
            words[limits->lending] = 0;
    }
    for (unsigned n = 1; n <= LENDING_SLICES; n++)
        running->process->hear(lending, n, words[n], time);
    lending->read_at = time;
}

CUresult fgpu_graph_before_launch(CUgraphExec executable);
void fgpu_graph_after_launch(CUgraphExec executable, CUresult result);

CUresult fgpu_graph_before_launch(CUgraphExec executable) {
    (void)executable;
    return CUDA_SUCCESS;
}

void fgpu_graph_after_launch(CUgraphExec executable, CUresult result) {
    (void)executable;
    (void)result;
}

/* ---- The driver ---- */

static CUresult get_current(CUcontext *context) {
    struct process *process = running->process;
    *context = (CUcontext)((char *)process + process->incarnation % 2);
    return CUDA_SUCCESS;
}

static CUresult event_create(CUevent *event, unsigned int flags) {
    (void)flags;
    *event = calloc(1, sizeof **event);
    (*event)->process = running->process;
    (*event)->destroyed = false;
    if (++running->process->events > 160)
        fail("the throttle uses up events");
    return CUDA_SUCCESS;
}

static void check_event(CUevent event) {
    if (event->destroyed || event->process != running->process)
        fail("an event is used that is gone, or another context's");
}

static CUresult event_destroy(CUevent event) {
    check_event(event);
    event->destroyed = true;
    running->process->events--;
    return CUDA_SUCCESS;
}

static CUresult event_record(CUevent event, CUstream stream) {
    check_event(event);
    if (running->process->capturing && stream == (CUstream)0x1000)
        disturbed++;
    use_host(US);
    event->recorded = true;
    event->done_at = NEVER;
    enqueue(running->process, 0, event);
    return CUDA_SUCCESS;
}

static CUresult event_query(CUevent event) {
    check_event(event);
    if (running->process->capturing && !running->process->relaxed)
        disturbed++;
    return event->done_at == NEVER ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

static CUresult event_elapsed(float *ms, CUevent start, CUevent end) {
    check_event(start);
    check_event(end);
    if (start->done_at == NEVER || end->done_at == NEVER)
        return CUDA_ERROR_NOT_READY;
    *ms = (float)((double)(int64_t)(end->done_at - start->done_at) / 1e6);
    return CUDA_SUCCESS;
}

static CUresult is_capturing(CUstream stream, CUstreamCaptureStatus *status) {
    *status = running->process->capturing && stream == (CUstream)0x1000 ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                                                       : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

static CUresult exchange_mode(CUstreamCaptureMode *mode) {
    bool before = running->process->relaxed;
    running->process->relaxed = *mode == CU_STREAM_CAPTURE_MODE_RELAXED;
    *mode = before ? CU_STREAM_CAPTURE_MODE_RELAXED : CU_STREAM_CAPTURE_MODE_GLOBAL;
    return CUDA_SUCCESS;
}

static CUresult begin_capture(CUstream stream, CUstreamCaptureMode mode) {
    (void)stream;
    (void)mode;
    running->process->capturing = true;
    return CUDA_SUCCESS;
}

static CUresult end_capture(CUstream stream, CUgraph *graph) {
    (void)stream;
    if (graph == NULL) /* stands for all cases in which a capture is not ended */
        return CUDA_ERROR_INVALID_VALUE;
    *graph = NULL;
    running->process->capturing = false;
    return CUDA_SUCCESS;
}

static CUresult begin_cig(CUstream stream, CUstreamCigCaptureParams *parameters) {
    (void)parameters;
    return begin_capture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

static CUresult end_cig(CUstream stream) {
    CUgraph graph;
    return end_capture(stream, &graph);
}

/* The function's address encodes its length, at first. */
static CUresult launch(FGPU_LAUNCH_PARAMETERS, void **extra) {
    (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z, (void)shared;
    (void)parameters, (void)extra;
    struct process *process = running->process;
    use_host(2 * US);
    if (process->capturing && stream == (CUstream)0x1000)
        return CUDA_SUCCESS;
    while (process->tenant->limits.devices[0].compute == false && process->queued >= QUEUE)
        use_host(20 * US);
    bool grown = process->tenant->later != 0 && now > START + (until - START) / 2;
    uint64_t length = process->changed != 0 ? process->changed : (uint64_t)(uintptr_t)function;
    enqueue(process, grown ? process->tenant->later : length, NULL);
    process->tenant->kernels++;
    return CUDA_SUCCESS;
}

/* ---- The programs ---- */

static void launch_one(struct process *process, uint64_t length, unsigned stream) {
    use_host(process->tenant->host);
    if (process->launch((CUfunction)(uintptr_t)length, 1, 1, 1, 1, 1, 1, 0, (CUstream)(uintptr_t)(0x1000 + 16 * stream),
                        NULL, NULL) != CUDA_SUCCESS)
        fail("a launch is refused");
}

static void capture_some(struct process *process) {
    CUgraph graph;
    if (process->tenant->cig)
        process->begin_cig((CUstream)0x1000, NULL);
    else
        process->begin_capture((CUstream)0x1000, CU_STREAM_CAPTURE_MODE_GLOBAL);
    uint64_t before = now;
    if (process->end_capture((CUstream)0x1000, NULL) == CUDA_SUCCESS)
        fail("a capture is ended where the driver did not");
    for (int n = 0; n < 100; n++)
        launch_one(process, process->tenant->kernel, 0);
    if (now - before > 100 * (process->tenant->host + 2 * US))
        fail("a captured launch waits");
    launch_one(process, process->tenant->kernel, 1); /* into a stream that is not captured */
    if (process->tenant->cig)
        process->end_cig((CUstream)0x1000);
    else
        process->end_capture((CUstream)0x1000, &graph);
}

/* The context ends with its events, and the next one has the same handle, as when a program resets its device. */
static void renew_context(struct process *process) {
    wait_for_device();
    process->context_ended((char *)process + process->incarnation % 2, 0);
    process->events = 0;
    process->incarnation += 2;
}

static uint64_t exponential(uint64_t mean) {
    return (uint64_t)(-log((double)(1 + random_below(1000000)) / 1000001.0) * (double)mean);
}

/* A notebook: cells of a given amount of work, one after another, with pauses between them. */
static void notebook(struct process *process, struct tenant *tenant) {
    for (;;) {
        yield_until(now + exponential(tenant->gap));
        uint64_t kernels = 1 + exponential(tenant->task) / tenant->kernel, began = now;
        for (uint64_t n = 0; n < kernels; n++)
            launch_one(process, tenant->kernel, 0);
        process->waits_for((CUstream)0x1000, false);
        wait_for_device();
        tenant->cells++;
        tenant->cell_time += now - began;
        tenant->cell_work += kernels * tenant->kernel;
        tenant->stretched += (double)(now - began) / (double)(kernels * tenant->kernel);
    }
}

/* Claims without end that it has work. */
static void lie(struct process *process, struct tenant *tenant) {
    for (;;) {
        tenant->word = process->word(tenant->word, now);
        yield_until(now + MS);
    }
}

static void program(void) {
    struct process *process = running->process;
    struct tenant *tenant = process->tenant;
    if (tenant->liar && tenant->kernel == 0)
        lie(process, tenant);
    if (tenant->task != 0)
        notebook(process, tenant);
    for (uint64_t n = 0; !process->dead; n++) {
        uint64_t length = tenant->mix != 0 && random_below(4) == 0 ? tenant->mix : tenant->kernel;
        process->changed = tenant->change != 0 && n % tenant->every == tenant->every - 1 ? tenant->change : 0;
        launch_one(process, length, (unsigned)(n % tenant->streams));
        process->changed = 0;
        bool waits = tenant->wait_each != 0 && n % tenant->wait_each == tenant->wait_each - 1;
        if (waits)
            for (unsigned stream = 0; stream < tenant->streams; stream++)
                process->waits_for((CUstream)(uintptr_t)(0x1000 + 16 * stream), false);
        if (waits || (tenant->poll_each != 0 && n % tenant->poll_each == tenant->poll_each - 1))
            wait_for_device();
        if (tenant->idle != 0 && n % tenant->burst == tenant->burst - 1)
            yield_until(now + tenant->idle + random_below(tenant->idle));
        if ((tenant->capture || tenant->cig) && n % 20 == 19)
            capture_some(process);
        if (tenant->contexts && n % 50 == 49)
            renew_context(process);
        if (tenant->kill != 0 && now > START + tenant->kill && process == running->process &&
            (unsigned)(process - processes) % tenant->processes == 0) {
            process->dead = true; /* its work in flight is lost */
            process->length = process->queued = 0;
        }
    }
    running->over = true;
    yield_until(NEVER);
}

/* ---- Setting up ---- */

static void *copy_of(const char *library, unsigned number) {
    char path[256], buffer[65536];
    snprintf(path, sizeof path, "%s.%d.%u", library, (int)getpid(), number);
    int from = open(library, O_RDONLY), to = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0700);
    for (ssize_t size; (size = read(from, buffer, sizeof buffer)) > 0;)
        if (write(to, buffer, (size_t)size) != size)
            fail("cannot write %s", path);
    close(from);
    close(to);
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    unlink(path);
    if (handle == NULL)
        fail("%s", dlerror());
    return handle;
}

static void add_tenant(char *text, const char *library) {
    struct tenant *tenant = &tenants[tenant_count++];
    struct fgpu_device *device = &tenant->limits.devices[0];
    *tenant = (struct tenant){.text = strdup(text), .host = 2 * US, .burst = 50, .every = 1, .processes = 1, .streams = 1};
    tenant->limits.device_count = 1;
    device->compute = true;
    device->most_percent = 100;
    tenant->busy_by_ms = calloc((until - START) / MS + 1000, sizeof(uint64_t));
    for (char *word = strtok(text, ","); word != NULL; word = strtok(NULL, ",")) {
        char *value = strchr(word, '=');
        if (value == NULL)
            fail("what is %s?", word);
        *value++ = '\0';
        uint64_t number = strtoull(value, NULL, 10);
        if (strcmp(word, "slots") == 0) {
            for (char *slot = value; slot != NULL; slot = strchr(slot, '+') ? strchr(slot, '+') + 1 : NULL) {
                unsigned from, to;
                sscanf(slot, "%u-%u", &from, &to);
                device->slots[device->slot_count].from = (uint8_t)from;
                device->slots[device->slot_count++].to = (uint8_t)to;
                device->compute_percent += to - from;
            }
        } else if (strcmp(word, "kernel_us") == 0)
            tenant->kernel = number * US;
        else if (strcmp(word, "mix_us") == 0)
            tenant->mix = number * US;
        else if (strcmp(word, "later_us") == 0)
            tenant->later = number * US;
        else if (strcmp(word, "host_us") == 0)
            tenant->host = number * US;
        else if (strcmp(word, "idle_ms") == 0)
            tenant->idle = number * MS;
        else if (strcmp(word, "kill_ms") == 0)
            tenant->kill = number * MS;
        else if (strcmp(word, "processes") == 0)
            tenant->processes = (unsigned)number;
        else if (strcmp(word, "streams") == 0)
            tenant->streams = (unsigned)number;
        else if (strcmp(word, "change_us") == 0)
            tenant->change = number * US;
        else if (strcmp(word, "every") == 0)
            tenant->every = number;
        else if (strcmp(word, "burst") == 0)
            tenant->burst = number;
        else if (strcmp(word, "wait_each") == 0)
            tenant->wait_each = number;
        else if (strcmp(word, "poll_each") == 0)
            tenant->poll_each = number;
        else if (strcmp(word, "capture") == 0)
            tenant->capture = number;
        else if (strcmp(word, "cig") == 0)
            tenant->cig = number;
        else if (strcmp(word, "contexts") == 0)
            tenant->contexts = number;
        else if (strcmp(word, "collective") == 0)
            tenant->collective = number;
        else if (strcmp(word, "start_ms") == 0)
            tenant->start = number * MS;
        else if (strcmp(word, "task_ms") == 0)
            tenant->task = number * MS;
        else if (strcmp(word, "gap_ms") == 0)
            tenant->gap = number * MS;
        else if (strcmp(word, "lending") == 0)
            device->lending = number ? tenant_count : 0;
        else if (strcmp(word, "most") == 0)
            device->most_percent = (unsigned)number;
        else if (strcmp(word, "liar") == 0)
            tenant->liar = number;
        else if (strcmp(word, "silent") == 0)
            tenant->silent = number;
        else if (strcmp(word, "future") == 0)
            tenant->future = number;
        else if (strcmp(word, "flicker") == 0)
            tenant->flicker = number;
        else if (strcmp(word, "unread") == 0)
            tenant->unread = number;
        else if (strcmp(word, "free") == 0)
            device->compute = !number;
        else
            fail("what is %s?", word);
    }
    for (unsigned n = 0; n < tenant->processes; n++) {
        struct process *process = &processes[process_count++];
        void *copy = copy_of(library, process_count);
        process->tenant = tenant;
        process->launch = (__typeof__(process->launch))dlsym(copy, "cuLaunchKernel");
        process->begin_capture = (__typeof__(process->begin_capture))dlsym(copy, "cuStreamBeginCapture_v2");
        process->end_capture = (__typeof__(process->end_capture))dlsym(copy, "cuStreamEndCapture");
        process->begin_cig = (__typeof__(process->begin_cig))dlsym(copy, "cuStreamBeginCaptureToCig");
        process->end_cig = (__typeof__(process->end_cig))dlsym(copy, "cuStreamEndCaptureToCig");
        process->context_ended = (__typeof__(process->context_ended))dlsym(copy, "fgpu_throttle_context_ended");
        process->waits_for = (__typeof__(process->waits_for))dlsym(copy, "fgpu_wait_begins");
        process->word = (__typeof__(process->word))dlsym(copy, "lending_word");
        process->hear = (__typeof__(process->hear))dlsym(copy, "lending_hear");
        process->word_unread = (__typeof__(process->word_unread))dlsym(copy, "lending_word_unread");
        struct thread *thread = &threads[thread_count++];
        thread->process = process;
        thread->wake_at = START + tenant->start + random_below(50 * MS);
        getcontext(&thread->state);
        thread->state.uc_stack.ss_sp = malloc(STACK);
        thread->state.uc_stack.ss_size = STACK;
        makecontext(&thread->state, program, 0);
    }
}

static void run(void) {
    while (now < until) {
        struct thread *next = NULL;
        for (unsigned n = 0; n < thread_count; n++)
            if (!threads[n].over && (next == NULL || threads[n].wake_at < next->wake_at))
                next = &threads[n];
        uint64_t wake = next == NULL || next->wake_at > until ? until : next->wake_at;
        if (now < wake) {
            serve(wake);
            continue;
        }
        if (next == NULL || next->wake_at > now)
            continue;
        running = next;
        running->wake_at = NEVER;
        swapcontext(&scheduler, &running->state);
    }
}

/* ---- Results ---- */

/* The largest deviations of the busy time from the share, above and below, over any `stretch` of time, in ms. */
static void deviations(const struct tenant *tenant, uint64_t stretch, double *above, double *below) {
    double share = tenant->limits.devices[0].compute_percent / 100.0, busy = 0;
    uint64_t count = (until - START) / MS, skip = 100;
    *above = *below = 0;
    for (uint64_t ms = skip; ms < count; ms++) {
        busy += (double)tenant->busy_by_ms[ms];
        if (ms >= skip + stretch)
            busy -= (double)tenant->busy_by_ms[ms - stretch];
        if (ms + 1 >= skip + stretch) {
            double off = busy / 1e6 - share * (double)stretch;
            *above = off > *above ? off : *above;
            *below = off < *below ? off : *below;
        }
    }
}

/* Its percent of the device from a given time on. */
static double share_from(const struct tenant *tenant, uint64_t from, uint64_t length) {
    uint64_t busy = 0, first = from / MS, last = (from + length) / MS;
    for (uint64_t ms = first; ms < last && ms < (until - START) / MS; ms++)
        busy += tenant->busy_by_ms[ms];
    return 100.0 * (double)busy / (double)length;
}

int main(int count, char **words) {
    fgpu_reals[FGPU_REAL_cuCtxGetCurrent] = get_current;
    fgpu_reals[FGPU_REAL_cuEventCreate] = event_create;
    fgpu_reals[FGPU_REAL_cuEventDestroy_v2] = event_destroy;
    fgpu_reals[FGPU_REAL_cuEventRecord] = event_record;
    fgpu_reals[FGPU_REAL_cuEventQuery] = event_query;
    fgpu_reals[FGPU_REAL_cuEventElapsedTime] = event_elapsed;
    fgpu_reals[FGPU_REAL_cuStreamIsCapturing] = is_capturing;
    fgpu_reals[FGPU_REAL_cuThreadExchangeStreamCaptureMode] = exchange_mode;
    fgpu_reals[FGPU_REAL_cuStreamBeginCapture_v2] = begin_capture;
    fgpu_reals[FGPU_REAL_cuStreamEndCapture] = end_capture;
    fgpu_reals[FGPU_REAL_cuStreamBeginCaptureToCig] = begin_cig;
    fgpu_reals[FGPU_REAL_cuStreamEndCaptureToCig] = end_cig;
    fgpu_reals[FGPU_REAL_cuLaunchKernel] = launch;
    if (count < 3)
        fail("usage: see the top of %s.c", words[0]);
    for (int n = 2; n < count; n++) {
        unsigned long long number;
        if (strncmp(words[n], "tenant:", 7) == 0)
            add_tenant(words[n] + 7, words[1]);
        else if (strcmp(words[n], "policy=sliced") == 0)
            sliced = true;
        else if (sscanf(words[n], "seconds=%llu", &number) == 1)
            until = START + number * SECOND;
        else if (sscanf(words[n], "seed=%llu", &number) == 1)
            seed = number;
        else if (sscanf(words[n], "late_us=%llu", &number) == 1)
            late = number * US;
        else if (sscanf(words[n], "words_us=%llu", &number) == 1)
            words_time = number * US;
        else if (sscanf(words[n], "stall_permille=%llu", &number) == 1)
            stall_permille = (unsigned)number;
        else if (strcmp(words[n], "policy=fifo") != 0)
            fail("what is %s?", words[n]);
    }
    run();
    printf("{\"disturbed\": %llu, \"tenants\": [", (unsigned long long)disturbed);
    for (unsigned n = 0; n < tenant_count; n++) {
        struct tenant *tenant = &tenants[n];
        printf("%s{\"share\": %.3f, \"kernels\": %llu, \"paid_ms\": %.1f, \"busy_ms\": %.1f, \"off_ms\": {",
               n ? ", " : "", 100.0 * (double)tenant->busy / (double)(until - START),
               (unsigned long long)tenant->kernels, (double)tenant->account.words[1] / 1e6, (double)tenant->busy / 1e6);
        static const uint64_t stretches[] = {50, 200, 1000, 5000, 60000};
        for (unsigned i = 0; i < 5; i++) {
            double above, below;
            deviations(tenant, stretches[i], &above, &below);
            printf("%s\"%llu\": [%.1f, %.1f]", i ? ", " : "", (unsigned long long)stretches[i], below, above);
        }
        printf("}, \"lent_ms\": %.1f, \"cells\": %llu, \"stretched\": %.3f, \"cells_stretched\": %.3f, \"back\": [",
               (double)tenant->account.words[2] / 1e6, (unsigned long long)tenant->cells,
               tenant->cell_work == 0 ? 0 : (double)tenant->cell_time / (double)tenant->cell_work,
               tenant->cells == 0 ? 0 : tenant->stretched / (double)tenant->cells);
        for (unsigned i = 0; i < 5; i++)
            printf("%s%.2f", i ? ", " : "", share_from(tenant, tenant->start + 100 * MS, stretches[i] * MS));
        printf("]}");
    }
    printf("]}\n");
    return 0;
}
