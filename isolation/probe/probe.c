/* Prints one line of JSON about what this process sees of the GPUs and of the limits. README.md has the format.
 *
 * Each part that calls into a driver runs in a child: a crash or hang is reported, and the line is printed in any case.
 */
#include "probe.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LONGEST_NONCE 128
#define USAGE                                                                                                      \
    "usage: probe [--nonce WORD] [--timeout SECONDS] [--allocate UUID=MIB]...\n"                                     \
    "       probe [--nonce WORD] [--timeout SECONDS] --park FILE | --resume FILE | --state FILE\n"                   \
    "       probe [--nonce WORD] --accounting FILE [--processes N,N...]\n"                                           \
    "Prints one line of JSON: what this process sees of the GPUs, and whether libfgpu is loaded into it.\n"         \
    "  --nonce WORD         is repeated in the line; at most 128 bytes\n"                                            \
    "  --timeout SECONDS    the longest that it may take, 1 to 600; 20 unless told\n"                                \
    "  --allocate UUID=MIB  tries to exceed this limit, and to use half of it; at most 16 times\n"  \
    "  --park FILE          moves the GPU memory of the processes in this file of libfgpu's to the host\n"           \
    "  --resume FILE        moves it back\n"                                                                         \
    "  --state FILE         prints only where it is\n"                                                               \
    "  --accounting FILE    prints only who holds a slot of this file of libfgpu's\n"                                \
    "  --processes N,N...   and which of these run\n"

const char *volatile *probe_step;

static struct json report;
static struct json part;
static int64_t deadline_ms;

static int64_t now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static bool write_all(int descriptor, const char *text, size_t size)
{
    while (size > 0) {
        ssize_t written = write(descriptor, text, size);

        if (written <= 0)
            return false;
        text += written;
        size -= (size_t)written;
    }
    return true;
}

static bool to_number(const char *text, size_t length, uint64_t largest, uint64_t *number)
{
    *number = 0;
    for (size_t i = 0; i < length; i++) {
        if (text[i] < '0' || text[i] > '9' || *number > largest)
            return false;
        *number = *number * 10 + (uint64_t)(text[i] - '0');
    }
    return length > 0 && *number >= 1 && *number <= largest;
}

static bool to_limit(const char *text, struct limit *limit)
{
    const char *equals = strrchr(text, '=');

    if (equals == NULL || (strncmp(text, "GPU-", 4) != 0 && strncmp(text, "MIG-", 4) != 0))
        return false;
    limit->uuid = text;
    limit->uuid_length = (size_t)(equals - text);
    /* 2^40 MiB: far above every device, and as bytes far below 2^64. */
    return limit->uuid_length > 4 && to_number(equals + 1, strlen(equals + 1), UINT64_C(1) << 40, &limit->memory_mib);
}

static int move_of(const char *word)
{
    return strcmp(word, "--park") == 0     ? MOVE_PARK
           : strcmp(word, "--resume") == 0 ? MOVE_RESUME
           : strcmp(word, "--state") == 0  ? MOVE_STATE
                                           : MOVE_NOT;
}

static bool read_options(int count, char **words, struct options *options)
{
    uint64_t number;

    for (int i = 1; i < count; i += 2) {
        const char *value = i + 1 < count ? words[i + 1] : NULL;

        if (value == NULL) {
            return false;
        } else if (strcmp(words[i], "--nonce") == 0 && strlen(value) <= LONGEST_NONCE) {
            options->nonce = value;
        } else if (strcmp(words[i], "--timeout") == 0 && to_number(value, strlen(value), 600, &number)) {
            options->timeout_s = (unsigned)number;
        } else if (strcmp(words[i], "--allocate") == 0 && options->limit_count < PROBE_MAX_LIMITS &&
                   to_limit(value, &options->limits[options->limit_count])) {
            options->limit_count++;
        } else if (options->move == MOVE_NOT && (options->move = move_of(words[i])) != MOVE_NOT) {
            options->moved = value;
        } else if (strcmp(words[i], "--accounting") == 0) {
            options->accounting = value;
        } else if (strcmp(words[i], "--processes") == 0 && value[strspn(value, "0123456789,")] == '\0') {
            options->processes = value;
        } else {
            return false;
        }
    }
    return true;
}

static void child(int pipe_end, void (*fill)(struct json *, const struct options *), const struct options *options)
{
    int nowhere = open("/dev/null", O_RDWR | O_CLOEXEC);

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    /* Output of a driver must not get into the line. */
    if (nowhere < 0 || dup2(nowhere, STDOUT_FILENO) < 0)
        _exit(1);
    part.used = 0;
    fill(&part, options);
    json_raw(&part, "\n");
    /* No exit handlers: a driver's may hang. */
    _exit(!part.full && write_all(pipe_end, part.text, part.used) ? 0 : 1);
}

/* Reads a child's output until its line ends, the child ends, or time is up. */
static bool gather(int pipe_end)
{
    struct pollfd waiting = {.fd = pipe_end, .events = POLLIN};

    part.used = 0;
    for (;;) {
        int64_t left_ms = deadline_ms - now_ms();
        ssize_t got;

        if (left_ms <= 0 || poll(&waiting, 1, (int)left_ms) <= 0)
            return false;
        got = read(pipe_end, part.text + part.used, sizeof(part.text) - 1 - part.used);
        if (got <= 0)
            return false;
        part.used += (size_t)got;
        part.text[part.used] = '\0';
        if (part.text[part.used - 1] == '\n') {
            part.text[part.used - 1] = '\0';
            return true;
        }
    }
}

/* The name of a signal that a crash ends with; its number for another. sigabbrev_np() is newer than old systems are. */
static const char *signal_name(int number)
{
    static const struct {
        int number;
        const char *name;
    } names[] = {{SIGFPE, "SIGFPE"}, {SIGSEGV, "SIGSEGV"}, {SIGBUS, "SIGBUS"}, {SIGILL, "SIGILL"},
                 {SIGABRT, "SIGABRT"}, {SIGTRAP, "SIGTRAP"}, {SIGSYS, "SIGSYS"}};
    static char other[32];

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (names[i].number == number)
            return names[i].name;
    snprintf(other, sizeof(other), "signal %d", number);
    return other;
}

/* Says in words what became of a child that wrote nothing usable, and returns its section's status. */
static const char *failure(pid_t process, char *text, size_t size)
{
    const char *step = *probe_step;
    int status = 0;
    bool hangs = now_ms() >= deadline_ms;

    kill(process, SIGKILL);
    /* A process that hangs in a driver may outlive its SIGKILL, so it is not waited for. */
    if (!hangs)
        waitpid(process, &status, 0);
    if (hangs) {
        snprintf(text, size, "no answer in time, in %s", step);
        return "timed_out";
    }
    if (step == probe_other_glibc && WIFSIGNALED(status)) {
        snprintf(text, size, "%s (%s)", step, signal_name(WTERMSIG(status)));
        return "not_tried";
    }
    if (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL)
        snprintf(text, size, "the probe crashed by %s in %s", signal_name(WTERMSIG(status)), step);
    else
        snprintf(text, size, "the probe ended early in %s", step);
    return "crashed";
}

/* Has a child write its part of the report. Otherwise returns a section's status, and says in words what happened. */
static const char *in_a_child(void (*fill)(struct json *, const struct options *), const struct options *options,
                              char *text, size_t size)
{
    const char *status = NULL;
    int ends[2];
    pid_t process = -1;

    *probe_step = "the beginning";
    if (pipe(ends) == 0) {
        process = fork();
        if (process == 0)
            child(ends[1], fill, options);
        close(ends[1]);
    }
    if (process < 0) {
        snprintf(text, size, "no process could be started for it");
        return "failed";
    }
    if (gather(ends[0])) {
        json_raw(&report, part.text);
        kill(process, SIGKILL);
    } else {
        status = failure(process, text, size);
    }
    close(ends[0]);
    return status;
}

static void section(const char *name, void (*fill)(struct json *, const struct options *),
                    const struct options *options)
{
    char text[256];

    json_name(&report, name);
    const char *status = in_a_child(fill, options, text, sizeof(text));

    if (status != NULL) {
        library_section(&report, status, text, -1, NULL);
        json_raw(&report, "}");
    }
}

static void move_memory(const struct options *options)
{
    char text[256];

    json_raw(&report, ",");
    if (in_a_child(probe_checkpoint, options, text, sizeof(text)) != NULL) {
        json_raw(&report, "\"done\":false,\"processes\":[],\"why\":");
        json_string(&report, text);
    }
}

/* The last resort, when even reading a file hangs. The report so far is useless; the host knows its question. */
static void too_late(int signal_number)
{
    static const char line[] = "{\"probe\":1,\"error\":\"no report in time\"}\n";

    (void)signal_number;
    _exit(write_all(STDOUT_FILENO, line, sizeof(line) - 1) ? 0 : 1);
}

int main(int count, char **words)
{
    static const char *own_step;
    struct options options = {.nonce = NULL, .timeout_s = 20, .processes = ""};
    void *shared = mmap(NULL, sizeof(*probe_step), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (count == 2 && strcmp(words[1], "--help") == 0)
        return fputs(USAGE, stdout) < 0;
    if (!read_options(count, words, &options)) {
        fputs(USAGE, stderr);
        return 2;
    }
    probe_step = shared == MAP_FAILED ? &own_step : (const char *volatile *)shared;
    deadline_ms = now_ms() + (int64_t)options.timeout_s * 1000;
    signal(SIGPIPE, SIG_IGN);
    signal(SIGALRM, too_late);
    alarm(options.timeout_s + 2);

    json_raw(&report, "{\"probe\":1");
    json_name(&report, "nonce");
    json_string(&report, options.nonce);
    if (options.move != MOVE_NOT) {
        move_memory(&options);
        goto print;
    }
    if (options.accounting != NULL) {
        probe_slots(&report, &options);
        goto print;
    }
    json_name(&report, "static");
#ifdef PROBE_STATIC
    json_raw(&report, "true");
#else
    json_raw(&report, "false");
#endif
    json_name(&report, "libfgpu");
    system_mapped(&report, "libfgpu.so");
    json_name(&report, "preload");
    system_preload(&report);
    section("cuda", probe_cuda, &options);
    section("nvml", probe_nvml, &options);
    if (options.limit_count > 0)
        section("allocate", probe_allocate, &options);
print:
    json_raw(&report, "}\n");
    if (report.full)
        return 1;
    return write_all(STDOUT_FILENO, report.text, report.used) ? 0 : 1;
}
