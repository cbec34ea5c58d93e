/* The session's limits: read in full or not at all, and again when their revision changes.
 *
 * A limits file has exactly one spelling: no leading zeros, one order of fields, one space between them. So a file is
 * either what the spawner wrote or refused. */
#include "fgpu.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FILE_BYTES (16 << 10)
#define SESSION_DIGITS 18
#define MIB_DIGITS 10 /* so that the sum of 1,024 processes' requests stays below 2^64 bytes */

/* ---- The parser ---- */

struct parser {
    const char *at, *end;
    unsigned line;
    char *reason;
    size_t reason_size;
};

__attribute__((format(printf, 2, 3))) static bool malformed(const struct parser *parser, const char *format, ...) {
    if (parser->reason_size == 0)
        return false;
    int size = snprintf(parser->reason, parser->reason_size, "line %u: ", parser->line);
    if (size > 0 && (size_t)size < parser->reason_size) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(parser->reason + size, parser->reason_size - (size_t)size, format, arguments);
        va_end(arguments);
    }
    return false;
}

static size_t line_left(const struct parser *parser) {
    const char *newline = memchr(parser->at, '\n', (size_t)(parser->end - parser->at));
    return (size_t)((newline ? newline : parser->end) - parser->at);
}

/* The length of the text to show in a message. */
static int shown(size_t size) {
    return size > 40 ? 40 : (int)size;
}

/* The length of the word here, up to the next space or comma. */
static int word_left(const struct parser *parser) {
    size_t size = 0, most = line_left(parser);
    while (size < most && parser->at[size] != ' ' && parser->at[size] != ',')
        size++;
    return shown(size);
}

static bool take(struct parser *parser, const char *word) {
    size_t size = strlen(word);
    if ((size_t)(parser->end - parser->at) < size || memcmp(parser->at, word, size) != 0)
        return false;
    parser->at += size;
    return true;
}

static bool expect(struct parser *parser, const char *word) {
    if (take(parser, word))
        return true;
    if (parser->at == parser->end)
        return malformed(parser, "the file ends here, where '%s' should stand: it is not complete", word);
    return malformed(parser, "'%s' should stand where '%.*s' does", word, word_left(parser), parser->at);
}

static bool expect_newline(struct parser *parser) {
    if (parser->at == parser->end)
        return malformed(parser, "the file ends here, within a line: it is not complete");
    if (!take(parser, "\n"))
        return malformed(parser, "the line should end where '%.*s' stands", shown(line_left(parser)), parser->at);
    parser->line++;
    return true;
}

static bool expect_number(struct parser *parser, const char *field, size_t most_digits, uint64_t *out) {
    size_t digits = 0;
    uint64_t value = 0;
    while (parser->at + digits < parser->end && parser->at[digits] >= '0' && parser->at[digits] <= '9') {
        if (digits < most_digits)
            value = value * 10 + (uint64_t)(parser->at[digits] - '0');
        digits++;
    }
    if (digits == 0)
        return malformed(parser, "%s is '%.*s'; only digits are a number here", field, word_left(parser), parser->at);
    if (digits > most_digits)
        return malformed(parser, "%s has %zu digits; at most %zu are allowed", field, digits, most_digits);
    if (digits > 1 && parser->at[0] == '0')
        return malformed(parser, "%s is '%.*s'; a number has no leading zeros", field, (int)digits, parser->at);
    parser->at += digits;
    *out = value;
    return true;
}

static bool expect_field(struct parser *parser, const char *key, uint64_t from, uint64_t to, uint64_t *out) {
    char name[32];
    size_t size = strlen(key) - 2; /* without the space and the equals sign */
    memcpy(name, key + 1, size);
    name[size] = '\0';
    if (!expect(parser, key) || !expect_number(parser, name, MIB_DIGITS, out))
        return false;
    if (*out < from || *out > to)
        return malformed(parser, "%s is %llu; it must be from %llu to %llu", name, (unsigned long long)*out,
                         (unsigned long long)from, (unsigned long long)to);
    return true;
}

static bool expect_uuid(struct parser *parser, const struct fgpu_limits *limits, char *uuid) {
    if (!expect(parser, "device="))
        return false;
    size_t size = 0, most = line_left(parser);
    while (size < most && parser->at[size] != ' ')
        size++;
    if (size < 5 || (memcmp(parser->at, "GPU-", 4) != 0 && memcmp(parser->at, "MIG-", 4) != 0))
        return malformed(parser, "device is '%.*s'; it must be a UUID that begins with GPU- or MIG-", shown(size),
                         parser->at);
    if (size >= FGPU_UUID_BYTES)
        return malformed(parser, "device has %zu characters; at most %d are allowed", size, FGPU_UUID_BYTES - 1);
    memcpy(uuid, parser->at, size);
    uuid[size] = '\0';
    for (unsigned i = 0; i < limits->device_count; i++)
        if (strcmp(limits->devices[i].uuid, uuid) == 0)
            return malformed(parser, "device %s stands on line %u already", uuid, i + 4);
    parser->at += size;
    return true;
}

static bool expect_slots(struct parser *parser, unsigned percent, struct fgpu_device *device) {
    unsigned sum = 0, before = 0;
    do {
        uint64_t from, to;
        if (device->slot_count == FGPU_MAX_SLOTS)
            return malformed(parser, "slots has more than %d parts", FGPU_MAX_SLOTS);
        if (!expect_number(parser, "slots", 3, &from) || !expect(parser, "-") ||
            !expect_number(parser, "slots", 3, &to))
            return false;
        if (from >= to || to > 100 || from < before)
            return malformed(parser, "slots has %llu-%llu after %u; parts ascend from 0 to 100 and do not overlap",
                             (unsigned long long)from, (unsigned long long)to, before);
        device->slots[device->slot_count].from = (uint8_t)from;
        device->slots[device->slot_count].to = (uint8_t)to;
        device->slot_count++;
        sum += (unsigned)(to - from);
        before = (unsigned)to;
    } while (take(parser, ","));
    if (sum != percent)
        return malformed(parser, "slots add up to %u; compute_percent is %u", sum, percent);
    return true;
}

static bool expect_device(struct parser *parser, struct fgpu_limits *limits) {
    uint64_t memory_mib, device_mib, context_mib, percent;
    if (limits->device_count == FGPU_MAX_DEVICES)
        return malformed(parser, "there are more than %d devices", FGPU_MAX_DEVICES);
    struct fgpu_device *device = &limits->devices[limits->device_count];
    if (!expect_uuid(parser, limits, device->uuid) ||
        !expect_field(parser, " memory_mib=", 1, UINT64_C(9999999999), &memory_mib) ||
        !expect_field(parser, " device_mib=", 1, UINT64_C(9999999999), &device_mib))
        return false;
    if (memory_mib > device_mib)
        return malformed(parser, "memory_mib is %llu; the device has device_mib=%llu only",
                         (unsigned long long)memory_mib, (unsigned long long)device_mib);
    if (!expect_field(parser, " context_mib=", 0, UINT64_C(9999999999), &context_mib) ||
        !expect_field(parser, " compute_percent=", 0, 100, &percent) || !expect(parser, " mode=memory"))
        return false;
    bool timed = take(parser, "+compute");
    if (!expect(parser, " slots=") || !(timed ? expect_slots(parser, (unsigned)percent, device) : expect(parser, "-")))
        return false;
    device->memory_bytes = memory_mib * FGPU_MIB;
    device->device_bytes = device_mib * FGPU_MIB;
    device->context_bytes = context_mib * FGPU_MIB;
    device->compute_percent = (unsigned)percent;
    device->compute = timed && percent < 100;
    if (take(parser, " lending=")) {
        uint64_t number, most;
        if (!expect_number(parser, "lending", 3, &number) ||
            !expect_field(parser, " most_percent=", percent, 100, &most))
            return false;
        if (!timed || number < 1 || number > 100)
            return malformed(parser, "lending is %llu; it must be from 1 to 100, and needs mode=memory+compute",
                             (unsigned long long)number);
        device->lending = (unsigned)number;
        device->most_percent = (unsigned)most;
    }
    if (parser->at < parser->end && *parser->at == ' ') {
        uint64_t code_mib;
        if (!expect_field(parser, " code_mib=", 0, UINT64_C(9999999999), &code_mib))
            return false;
        device->counts_code = true;
        device->code_bytes = code_mib * FGPU_MIB;
    }
    if (!expect_newline(parser))
        return false;
    limits->device_count++;
    return true;
}

static bool expect_heading(struct parser *parser) {
    uint64_t version;
    if (!expect(parser, "fgpu-limits "))
        return false;
    if (!expect_number(parser, "the version", SESSION_DIGITS, &version))
        return false;
    if (version != 1)
        return malformed(parser, "this is version %llu of the limits file, and libfgpu knows version 1 only: "
                         "install the libfgpu of the spawner that wrote it", (unsigned long long)version);
    return expect_newline(parser);
}

/* Allows printable ASCII and newlines: no NUL bytes, tabs or carriage returns. */
static bool expect_text(struct parser parser) {
    for (; parser.at < parser.end; parser.at++) {
        if (*parser.at == '\n')
            parser.line++;
        else if (*parser.at < ' ' || *parser.at > '~')
            return malformed(&parser, "byte 0x%02x is not printable ASCII", (unsigned char)*parser.at);
    }
    return true;
}

bool fgpu_limits_parse(const char *text, size_t size, struct fgpu_limits *out, char *reason, size_t reason_size) {
    struct parser parser = {.at = text, .end = text + size, .line = 1, .reason = reason, .reason_size = reason_size};
    memset(out, 0, sizeof *out);
    if (size == 0)
        return malformed(&parser, "the file is empty");
    if (!expect_text(parser) || !expect_heading(&parser) || !expect(&parser, "session=") ||
        !expect_number(&parser, "session", SESSION_DIGITS, &out->session) || !expect_newline(&parser) ||
        !expect(&parser, "managed="))
        return false;
    out->managed_refused = take(&parser, "refuse");
    if (!out->managed_refused && !take(&parser, "charge"))
        return malformed(&parser, "managed is '%.*s'; it must be charge or refuse", word_left(&parser), parser.at);
    if (!expect_newline(&parser))
        return false;
    do {
        if (!expect_device(&parser, out))
            return false;
    } while (!take(&parser, "end"));
    if (!expect_newline(&parser))
        return false;
    if (parser.at < parser.end)
        return malformed(&parser, "nothing may follow 'end'");
    return true;
}

/* ---- The file ---- */

/* Reads the whole file; -1 with `why` on failure. */
static long read_whole(char *text, size_t size, const char **why) {
    struct stat status;
    struct statvfs mount;
    int descriptor = fgpu_open("limits", O_RDONLY, &status, why);
    if (descriptor < 0)
        return -1;
    long got = 0;
    *why = NULL;
    if ((status.st_mode & 0222) && (fstatvfs(descriptor, &mount) != 0 || !(mount.f_flag & ST_RDONLY)))
        *why = "can be written: it must have no write bit in its mode, or be on a read-only mount";
    else if (status.st_size > FILE_BYTES)
        *why = "is larger than 16 KiB";
    while (*why == NULL && (size_t)got < size) {
        long more = syscall(SYS_read, descriptor, text + got, size - (size_t)got);
        if (more < 0 && errno != EINTR)
            *why = "cannot be read";
        if (more == 0)
            break;
        got += more > 0 ? more : 0;
    }
    if (*why == NULL && got > FILE_BYTES)
        *why = "is larger than 16 KiB";
    fgpu_close(descriptor);
    return *why == NULL ? got : -1;
}

/* ---- Their revision ---- */

/* Two words: the host increments the first after each change of the limits, and sets the second while the session is
 * parked. Without the file neither changes; a file with one word reads as 0 beyond its end. */
static const _Atomic(uint64_t) never[2];
static const _Atomic(uint64_t) *_Atomic revision;

static bool find_revision(void) {
    struct stat status;
    const char *why;
    if (atomic_load_explicit(&revision, memory_order_acquire) != NULL)
        return true;
    const _Atomic(uint64_t) *found = never;
    errno = 0;
    int descriptor = fgpu_open("revision", O_RDONLY, &status, &why);
    if (descriptor >= 0) {
        /* A file that is too short would kill every process that reads the mapping. */
        void *page = status.st_size < (off_t)sizeof *found
                         ? MAP_FAILED
                         : mmap(NULL, sizeof never, PROT_READ, MAP_SHARED, descriptor, 0);
        fgpu_close(descriptor);
        why = "cannot be mapped";
        found = page == MAP_FAILED ? NULL : page;
    } else if (errno != ENOENT) {
        found = NULL;
    }
    if (found == NULL) {
        fgpu_log("revision", "the file revision %s; every allocation is refused", why);
        return false;
    }
    const _Atomic(uint64_t) *nobodys = NULL;
    if (!atomic_compare_exchange_strong(&revision, &nobodys, found) && found != never)
        munmap((void *)(uintptr_t)found, sizeof never);
    return true;
}

const _Atomic(uint64_t) *fgpu_revision_word(void) {
    return atomic_load_explicit(&revision, memory_order_acquire);
}

const _Atomic(uint64_t) *fgpu_gate_word(void) {
    return find_revision() ? fgpu_revision_word() + 1 : NULL;
}

uint64_t fgpu_revision(void) {
    const _Atomic(uint64_t) *word = fgpu_revision_word();
    return word == NULL ? 0 : atomic_load(word);
}

/* ---- The known limits ---- */

static bool read_limits(struct fgpu_limits *limits) {
    char reason[256];
    const char *why;
    bool good = false;
    /* Not on the stack, as a thread's may be small. */
    char *text = mmap(NULL, FILE_BYTES + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (text == MAP_FAILED)
        return false;
    long size = read_whole(text, FILE_BYTES + 1, &why);
    if (size < 0)
        fgpu_log("limits", "the limits file %s; every allocation is refused", why);
    else if (!fgpu_limits_parse(text, (size_t)size, limits, reason, sizeof reason))
        fgpu_log("limits", "the limits file is malformed: %s; every allocation is refused", reason);
    else
        good = true;
    munmap(text, FILE_BYTES + 1);
    return good;
}

/* The order of devices, by which amounts are counted, and the context charges must stay the same. */
static bool follows(const struct fgpu_limits *before, const struct fgpu_limits *after) {
    bool same = before->session == after->session && before->device_count == after->device_count;
    for (unsigned i = 0; same && i < after->device_count; i++)
        same = strcmp(before->devices[i].uuid, after->devices[i].uuid) == 0 &&
               before->devices[i].context_bytes == after->devices[i].context_bytes;
    if (!same)
        fgpu_log("changed", "the limits file has become another session's, or has other devices; every allocation is refused");
    return same;
}

static const struct fgpu_limits unreadable;
static const struct fgpu_limits *_Atomic result;

/* Threads that ask at once each read the file, and the first result counts: there is no lock that a fork could leave
 * locked. The result is on its own read-only pages, which stay, as other threads may be reading them. A first read that
 * fails is final; a later one that fails is tried again each time. */
static __attribute__((noinline)) const struct fgpu_limits *read_again(const struct fgpu_limits *found) {
    if (!find_revision())
        return found;
    struct fgpu_limits *mine = mmap(NULL, sizeof *mine, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mine == MAP_FAILED)
        return found;
    const struct fgpu_limits *outcome = found == NULL ? &unreadable : found;
    uint64_t now = fgpu_revision(); /* before the file, so that the file is of this revision or a later one */
    if (read_limits(mine) && (found == NULL || found == &unreadable || follows(found, mine))) {
        mine->revision = now;
        if (mprotect(mine, sizeof *mine, PROT_READ) == 0)
            outcome = mine;
    }
    fgpu_say_behind(outcome != mine);
    if (outcome != found && atomic_compare_exchange_strong(&result, &found, outcome))
        found = outcome;
    if (found != mine)
        munmap(mine, sizeof *mine);
    return found;
}

const struct fgpu_limits *fgpu_limits(void) {
    const struct fgpu_limits *found = atomic_load_explicit(&result, memory_order_acquire);
    if (__builtin_expect(found == NULL || found->revision != fgpu_revision(), 0))
        found = read_again(found);
    return found == &unreadable ? NULL : found;
}

bool fgpu_limits_in_force(const struct fgpu_limits *limits) {
    return limits->revision == fgpu_revision();
}

int fgpu_device_by_uuid(const char *uuid) {
    const struct fgpu_limits *limits = fgpu_limits();
    for (unsigned i = 0; limits != NULL && i < limits->device_count; i++)
        if (strcmp(limits->devices[i].uuid, uuid) == 0)
            return (int)i;
    return -1;
}
