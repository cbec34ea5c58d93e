/* Puts a session's files into a folder where no engine can: as the first container of a pod; the session then has the folder read-only. It runs as any user, without capabilities and on a read-only root.
 *
 * FGPU_FILES has one file or folder in each line; README.md has its format. Files appear atomically, so that a
 * restarted container finds and replaces what it wrote before. */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define VARIABLE "FGPU_FILES"
#define OWN_FILES "/files"
#define DRAFT ".put-files.new"
#define DIGEST_LENGTH 64
#define LONGEST_PATH 1024

enum status { NOT_WRITTEN = 1, MALFORMED = 2, OTHER_VERSION = 3 };

struct line {
    unsigned mode;
    char *path;
    bool folder;
    const char *digest; /* or */
    char *base64;
};

static unsigned number;

__attribute__((noreturn, format(printf, 2, 3))) static void fail(enum status status, const char *format, ...)
{
    va_list words;

    va_start(words, format);
    fputs("put-files: ", stderr);
    vfprintf(stderr, format, words);
    fputc('\n', stderr);
    va_end(words);
    exit(status);
}

__attribute__((noreturn)) static void malformed(const char *why)
{
    fail(MALFORMED, VARIABLE ", line %u: %s", number, why);
}

__attribute__((noreturn)) static void not_written(const char *path)
{
    fail(NOT_WRITTEN, "%s cannot be written: %s", path, strerror(errno));
}

/* A name in a folder, and not a path out of it. */
static void check_path(const char *path)
{
    size_t length = strlen(path);

    if (length == 0 || length > LONGEST_PATH)
        malformed("the path has 1 to 1024 bytes");
    if (path[0] == '/')
        malformed("the path is absolute");
    while (*path != '\0') {
        size_t name = strcspn(path, "/");

        if (name == 0 || (name == 1 && path[0] == '.') || (name == 2 && path[0] == '.' && path[1] == '.'))
            malformed("the path has an empty name, '.' or '..'");
        path += name;
        if (*path == '/' && *++path == '\0')
            malformed("the path ends in '/', which a folder's does, with the source '-'");
    }
}

static unsigned to_mode(const char *text)
{
    unsigned mode = 0;
    size_t length = strspn(text, "01234567");

    if (length == 0 || length > 4 || text[length] != '\0')
        malformed("the mode is not 1 to 4 octal digits");
    for (; *text != '\0'; text++)
        mode = mode * 8 + (unsigned)(*text - '0');
    if (mode > 0777)
        malformed("the mode is above 0777");
    return mode;
}

/* MODE PATH SOURCE: only the path may have spaces. */
static struct line parse(char *text)
{
    struct line line = {0};
    char *path = strchr(text, ' ');
    char *source = strrchr(text, ' ');

    if (path == NULL || source == path)
        malformed("it is not MODE PATH SOURCE");
    *path++ = '\0';
    *source++ = '\0';
    line.mode = to_mode(text);
    line.path = path;
    line.folder = strcmp(source, "-") == 0;
    if (line.folder) {
        size_t length = strlen(path);

        if (length < 2 || path[length - 1] != '/')
            malformed("the source is '-', and the path does not end in '/'");
        path[length - 1] = '\0';
        /* A restarted container must be able to write into it again. */
        if ((line.mode & 0700) != 0700)
            malformed("a folder's mode has 7 for its owner");
    } else if (strncmp(source, "sha256:", 7) == 0) {
        line.digest = source + 7;
        if (strspn(line.digest, "0123456789abcdef") != DIGEST_LENGTH || line.digest[DIGEST_LENGTH] != '\0')
            malformed("sha256: has 64 digits, 0 to 9 and a to f");
    } else if (strncmp(source, "base64:", 7) == 0) {
        line.base64 = source + 7;
    } else {
        malformed("the source is none of sha256:, base64: and '-'");
    }
    check_path(path);
    return line;
}

static int sextet(char digit)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const char *found = digit == '\0' ? NULL : strchr(digits, digit);

    return found == NULL ? -1 : (int)(found - digits);
}

/* Decodes in place and returns the number of bytes. */
static size_t decode(char *text)
{
    size_t length = strlen(text), used = 0, padding = 0;

    if (length % 4 != 0)
        malformed("base64: is cut short");
    if (length > 0 && text[length - 1] == '=')
        padding = text[length - 2] == '=' ? 2 : 1;
    for (size_t at = 0; at < length; at += 4) {
        uint32_t bits = 0;

        for (size_t i = at; i < at + 4; i++) {
            int value = i >= length - padding ? 0 : sextet(text[i]);

            if (value < 0)
                malformed("base64: has another character");
            bits = bits << 6 | (uint32_t)value;
        }
        for (int shift = 16; shift >= 0; shift -= 8)
            text[used++] = (char)(bits >> shift & 0xff);
    }
    return used - padding;
}

/* Opens a folder in a folder, and makes it if missing; a link is refused. */
static int enter(int parent, const char *name, const char *path)
{
    bool made = mkdirat(parent, name, 0755) == 0;
    int folder;

    if (!made && errno != EEXIST)
        not_written(path);
    folder = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    /* The exact mode, whatever the umask. */
    if (folder < 0 || (made && fchmod(folder, 0755) != 0))
        not_written(path);
    return folder;
}

/* Returns the folder of the path's last name, which is stored in ``name``. */
static int parent_of(int target, const char *path, const char **name)
{
    char part[LONGEST_PATH + 1];
    int folder = dup(target);
    const char *slash;

    if (folder < 0)
        not_written(path);
    *name = path;
    while ((slash = strchr(*name, '/')) != NULL) {
        size_t length = (size_t)(slash - *name);
        int next;

        memcpy(part, *name, length);
        part[length] = '\0';
        next = enter(folder, part, path);
        close(folder);
        folder = next;
        *name = slash + 1;
    }
    return folder;
}

static void write_all(int file, const char *bytes, size_t size, const char *path)
{
    while (size > 0) {
        ssize_t written = write(file, bytes, size);

        if (written < 0 && errno == EINTR)
            continue;
        if (written < 0)
            not_written(path);
        bytes += written;
        size -= (size_t)written;
    }
}

static void copy_from(int own_files, const char *digest, int file, const char *path)
{
    char bytes[1 << 16];
    int source = openat(own_files, digest, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    ssize_t got;

    if (source < 0)
        fail(OTHER_VERSION,
             "this image is of another version than the Hub: it has no file for %s (sha256:%.12s...); "
             "write it again with 'fgpu kube image', and push it",
             path, digest);
    while ((got = read(source, bytes, sizeof(bytes))) != 0) {
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            fail(NOT_WRITTEN, "sha256:%.12s... of this image cannot be read: %s", digest, strerror(errno));
        write_all(file, bytes, (size_t)got, path);
    }
    close(source);
}

static void put(int target, int own_files, const struct line *line)
{
    const char *name;
    int parent = parent_of(target, line->path, &name);
    int file;

    if (line->folder) {
        file = enter(parent, name, line->path);
        if (fchmod(file, line->mode) != 0)
            not_written(line->path);
    } else {
        if (unlinkat(parent, DRAFT, 0) != 0 && errno != ENOENT)
            not_written(line->path);
        file = openat(parent, DRAFT, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (file < 0)
            not_written(line->path);
        if (line->digest != NULL)
            copy_from(own_files, line->digest, file, line->path);
        else
            write_all(file, line->base64, decode(line->base64), line->path);
        if (fchmod(file, line->mode) != 0 || renameat(parent, DRAFT, parent, name) != 0)
            not_written(line->path);
    }
    if (close(file) != 0)
        not_written(line->path);
    close(parent);
}

int main(int count, char **words)
{
    char *rest = getenv(VARIABLE);
    int target, own_files;

    if (count < 2 || count > 3)
        fail(MALFORMED, "usage: put-files FOLDER [SOURCES]; see isolation/files/README.md");
    if (rest == NULL)
        fail(MALFORMED, VARIABLE " is not set");
    target = open(words[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (target < 0)
        not_written(words[1]);
    own_files = open(count == 3 ? words[2] : OWN_FILES, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (own_files < 0)
        fail(NOT_WRITTEN, "%s cannot be read: %s", count == 3 ? words[2] : OWN_FILES, strerror(errno));
    while (*rest != '\0') {
        char *text = rest;
        struct line line;

        rest += strcspn(rest, "\n");
        if (*rest == '\n')
            *rest++ = '\0';
        number++;
        line = parse(text);
        put(target, own_files, &line);
    }
    return 0;
}
