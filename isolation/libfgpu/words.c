/* The words of the sessions that share a device, one file each, which only its session can write; and the owner of each
 * hundredth of the period, which only the host writes. words.h explains their use.
 *
 * Files are read, never mapped: the owner of a file may truncate it at any time, which would kill every process with a
 * mapping. They are opened for each reading, as programs close descriptors that they do not know. */
#include "words.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

bool fgpu_say_busy(int device, uint64_t now) {
    char name[32];
    struct stat status;
    const char *why;
    snprintf(name, sizeof name, "lending/own-%d", device);
    int file = fgpu_open(name, O_RDWR, &status, &why);
    if (file < 0)
        return false;
    uint64_t word = 0;
    if (syscall(SYS_pread64, file, &word, sizeof word, (off_t)0) != sizeof word)
        word = 0;
    word = lending_word(word, now);
    bool said = syscall(SYS_pwrite64, file, &word, sizeof word, (off_t)0) == sizeof word;
    fgpu_close(file);
    return said;
}

/* An unreadable word counts as "has work": its session's slots are not lent. An empty file was never written. */
static uint64_t read_word(int device, unsigned number, uint64_t now) {
    char name[32];
    struct stat status;
    const char *why;
    uint64_t word = 0;
    snprintf(name, sizeof name, "lending/%d/%u", device, number);
    int file = fgpu_open(name, O_RDONLY, &status, &why);
    if (file < 0)
        return lending_word_unread(now);
    if (syscall(SYS_pread64, file, &word, sizeof word, (off_t)0) != sizeof word)
        word = 0;
    fgpu_close(file);
    return word;
}

void fgpu_read_words(int device, struct lending *lending, uint64_t now) {
    char name[32];
    struct stat status;
    const char *why;
    uint8_t owner[sizeof lending->owner];
    bool known[LENDING_SLICES + 1] = {false};
    int saved = errno;
    snprintf(name, sizeof name, "lending/%d/owners", device);
    int file = fgpu_open(name, O_RDONLY, &status, &why);
    long size = file < 0 ? 0 : syscall(SYS_pread64, file, owner, sizeof owner, (off_t)0);
    if (file >= 0)
        fgpu_close(file);
    if (size != sizeof owner)
        memset(owner, LENDING_KEPT, sizeof owner);
    memcpy(lending->owner, owner, sizeof owner);
    for (unsigned n = 0; n < sizeof owner; n++)
        if (owner[n] <= LENDING_SLICES)
            known[owner[n]] = true;
    for (unsigned n = 1; n <= LENDING_SLICES; n++)
        lending_hear(lending, n, known[n] ? read_word(device, n, now) : 0, now);
    lending->read_at = now;
    errno = saved;
}
