/* The interfaces between the parts of the probe. README.md describes its report. */
#ifndef FGPU_PROBE_H
#define FGPU_PROBE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PROBE_MIB (UINT64_C(1) << 20)
#define PROBE_MAX_DEVICES 64
#define PROBE_MAX_LIMITS 16

/* ---- probe_json.c ---------------------------------------------------------------------------------- */

/* One line of JSON as it grows. If something does not fit, `full` is set and the line is not used. */
struct json {
    size_t used;
    bool full;
    char text[128 * 1024];
};

/* Appends text that is JSON already. */
void json_raw(struct json *json, const char *text);
/* Appends a string, quoted; NULL is null. Each byte outside printable ASCII becomes \u00XX. */
void json_string(struct json *json, const char *text);
void json_bytes(struct json *json, const char *text, size_t size);
void json_number(struct json *json, uint64_t number);
/* Appends `"name":`, after a comma unless an object or a list has just begun. */
void json_name(struct json *json, const char *name);
/* Appends a comma unless an object or a list has just begun. */
void json_next(struct json *json);

/* ---- probe_system.c: what needs no driver ------------------------------------------------------------ */

/* Appends the list of the mapped files with a name that begins with `name`, each once: path, device, inode. */
void system_mapped(struct json *json, const char *name);
/* Copies the path of the first of them; returns false if there is none. */
bool system_mapped_path(const char *name, char *path, size_t size);
/* Appends what /etc/ld.so.preload is and contains. */
void system_preload(struct json *json);

/* ---- probe_slots.c ------------------------------------------------------------------------------------ */

struct options;
/* Whether a living process holds this slot of an accounting file. */
bool slot_is_held(int descriptor, unsigned slot);
/* Appends which slots in the accounting file are held, and which of the given processes run. */
void probe_slots(struct json *json, const struct options *options);

/* ---- probe_library.c: a driver's library, opened at run time ------------------------------------------ */

struct library {
    void *handle;
    const char *file;
};

/* The step of a static program that loads the session's C library. It crashes there if that is another glibc than the one
 * that the program was linked with, whatever the driver. */
extern const char probe_other_glibc[];
/* Opens it; on failure appends the section's object and returns false. */
bool library_open(struct library *library, const char *file, struct json *json);
/* Its function of this name, or NULL. */
void *library_function(const struct library *library, const char *name);
/* Appends the section's beginning: status, error, code, library. `error` and `library` may be NULL; a negative code is
 * null. The object is left open. */
void library_section(struct json *json, const char *status, const char *error, int code, const char *file);

/* ---- sections, each run in a child of its own --------------------------------------------------------- */

/* A limit that --allocate tries. */
struct limit {
    const char *uuid;
    size_t uuid_length;
    uint64_t memory_mib;
};

struct options {
    const char *nonce;
    unsigned timeout_s;
    unsigned limit_count;
    struct limit limits[PROBE_MAX_LIMITS];
    const char *accounting; /* NULL: not asked for */
    const char *processes;
    enum { MOVE_NOT, MOVE_PARK, MOVE_RESUME, MOVE_STATE } move; /* of the processes in the accounting file `moved` */
    const char *moved;
};

/* The current call of a section, for the report of one that crashed or hung; in memory shared with the parent. */
extern const char *volatile *probe_step;

void probe_cuda(struct json *json, const struct options *options);
void probe_nvml(struct json *json, const struct options *options);
void probe_allocate(struct json *json, const struct options *options);
/* Appends the members `done`, `processes` and `why` to an object. */
void probe_checkpoint(struct json *json, const struct options *options);

#endif
