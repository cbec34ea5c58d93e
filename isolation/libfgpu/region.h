/* The bytes of the file `accounting`: shared between all processes of a session and whatever versions of libfgpu they
 * have loaded, and created by fgpuspawner/isolation/backends.py. Little-endian; everything starts as zero.
 *
 *   offset    what
 *   0x000000  magic: REGION_MAGIC, written by the first process
 *   0x000008  high water: one more than the highest slot ever taken
 *   0x000010  started: how many processes have ever taken a slot
 *   0x000040  peak[16]: the most bytes of each device that were ever held at once
 *   0x001000  time[16]: 256 bytes of struct fgpu_time_account for each device
 *   0x002000  owner[1024]: 16 bytes for each slot: pid (4), whether it is behind (4), inode of the pid's namespace (8)
 *   0x006000  lately[2048]: the pids that took a slot last, by their number modulo 2048; they may have ended
 *   0x100000  cell[16][1024]: a cache line for each device and slot: pending (8), committed (8), code (8), 40 unused
 *   0x200000  end
 *
 * Byte N of the file carries the lock of slot N. A process holds its slot as long as its write lock is there. */
#ifndef FGPU_REGION_H
#define FGPU_REGION_H

#include "fgpu.h"

#include <stdatomic.h>

#define REGION_MAGIC UINT64_C(0x31302d7570676600) /* "\0fgpu-01": no other file begins like that by chance */
#define REGION_SLOTS 1024
#define REGION_LATELY 2048

struct region_cell {
    _Alignas(64) _Atomic(uint64_t) pending;
    _Atomic(uint64_t) committed;
    _Atomic(uint64_t) code; /* what the driver took for the code of kernels: beside `committed` */
};

struct region_owner {
    _Atomic(uint32_t) pid;
    _Atomic(uint32_t) behind; /* 1: it could not read its changed limits */
    _Atomic(uint64_t) namespace;
};

struct region {
    _Atomic(uint64_t) magic;
    _Atomic(uint64_t) high_water;
    _Atomic(uint64_t) started;
    _Alignas(64) _Atomic(uint64_t) peak[FGPU_MAX_DEVICES];
    _Alignas(0x1000) struct fgpu_time_account time[FGPU_MAX_DEVICES];
    _Alignas(0x2000) struct region_owner owner[REGION_SLOTS];
    _Atomic(uint32_t) lately[REGION_LATELY];
    _Alignas(0x100000) struct region_cell cell[FGPU_MAX_DEVICES][REGION_SLOTS];
};

_Static_assert(sizeof(struct region) == FGPU_REGION_BYTES, "the region has the size that the spawner makes");
_Static_assert(offsetof(struct region, started) == 0x10, "see above");
_Static_assert(offsetof(struct region, peak) == 0x40, "see above");
_Static_assert(offsetof(struct region, time) == 0x1000, "see above");
_Static_assert(offsetof(struct region, owner) == 0x2000, "see above");
_Static_assert(offsetof(struct region, lately) == 0x6000, "see above");
_Static_assert(offsetof(struct region, cell) == 0x100000, "see above");
_Static_assert(sizeof(struct region_owner) == 16 && sizeof(struct region_cell) == 64, "see above");
_Static_assert(sizeof(struct fgpu_time_account) == 256, "see above");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "an atomic with a hidden lock would be none between processes");

#endif
