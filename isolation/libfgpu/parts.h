/* What the parts that count memory know of each other. */
#ifndef FGPU_PARTS_H
#define FGPU_PARTS_H

#include "hooks.h"

#include <pthread.h>

/* ---- devices.c -------------------------------------------------------------------------------------- */

/* Instead of an index: the limits do not name the device or cannot be applied to it, so nothing of it is granted; or
 * there is no context, or no such device, which the driver says better: what it allocates nevertheless is freed again. */
#define FGPU_UNNAMED (-2)
#define FGPU_UNKNOWN (-1)

/* The index in the limits of a CUDA device, or one of the two. */
int fgpu_device_of(CUdevice device);

/* The CUDA device of an index that fgpu_device_of() has returned. */
CUdevice fgpu_ordinal_of(int device);

/* What is held to: the limit in force, or for a share of the whole device what the driver says it has, if that is less.
 * 0 while the limits have changed and cannot be read. */
uint64_t fgpu_limit_of(int device);

/* fgpu_reserve() within that limit. What is granted is within the limit that is in force when this returns: whoever makes
 * the limit smaller and then sums what is committed sees all that was granted before. */
enum fgpu_verdict fgpu_reserve_in_force(int device, uint64_t bytes);

/* The total that NVML or the CUDA driver reports is shown as this; 0: the device is not to be used (logged). */
uint64_t fgpu_visible_total(int device, uint64_t real_total);

/* The name in the limits of 16 bytes of the driver's. -1: none of them. */
int fgpu_device_by_bytes(const CUuuid *bytes);

/* As fgpu_current_device(), with the context. */
int fgpu_current_context(CUcontext *context);

/* The device whose memory something of this kind takes; false for host memory. */
bool fgpu_takes_memory(CUmemLocation location, CUmemAllocationType type, int *device);

void fgpu_devices_forget(void);

/* ---- claims: devices.c ------------------------------------------------------------------------------- */

/* Reserves; over the limit, first what the driver has given back is released, then what it holds in reserve is given
 * back to it. False: CUDA_ERROR_OUT_OF_MEMORY. True for FGPU_UNKNOWN. */
bool fgpu_claim(int device, uint64_t bytes);

/* Charges what the driver has changed by itself: before a report, and before a refusal. */
void fgpu_settle(int device);

/* `call`, which takes what was claimed, and again for half a second while the driver has no memory for it: a process that
 * was killed leaves its slot as soon as its address space is gone, and the driver's memory a moment later. */
#define FGPU_TAKE(call) \
    ({ \
        CUresult taken = (call); \
        for (unsigned tries = 0; __builtin_expect(taken == CUDA_ERROR_OUT_OF_MEMORY, 0) && fgpu_take_again(tries); tries++) \
            taken = (call); \
        taken; \
    })

/* Waits a little; false if it was tried often enough, or lately in vain. */
bool fgpu_take_again(unsigned tries);

/* Has pools and graphs give back what they hold in reserve. */
void fgpu_trim(int device);

/* Takes a claim back. */
void fgpu_unclaim(int device, uint64_t bytes);

/* Around what waits or frees, in a thread that may be capturing a stream: in the stricter modes that would spoil the
 * capture. Returns the mode that was in force, to be put back. */
CUstreamCaptureMode fgpu_relax(CUstreamCaptureMode mode);

/* The driver hands out memory of pools in parts of 512 bytes, and small allocations too. UINT64_MAX, more than any limit, if it overflows. */
uint64_t fgpu_rounded(uint64_t bytes);
uint64_t fgpu_product(uint64_t a, uint64_t b);

/* ---- holdings.c: what is held, by address or handle ---------------------------------------------------- */

struct fgpu_holding {
    uint64_t key; /* not 0 */
    uint64_t bytes;
    void *owner; /* the context, the pool, ... */
    int device;
    bool from_pool;
};

struct fgpu_holdings {
    struct fgpu_holding *places;
    size_t capacity, count;
};

/* False if there is no memory. A holding that was there under this key is moved to `before`, whose key is 0 otherwise. */
bool fgpu_put(struct fgpu_holdings *holdings, struct fgpu_holding holding, struct fgpu_holding *before);
struct fgpu_holding *fgpu_get(const struct fgpu_holdings *holdings, uint64_t key);
bool fgpu_take(struct fgpu_holdings *holdings, uint64_t key, struct fgpu_holding *out);

/* ---- memory.c ------------------------------------------------------------------------------------------ */

/* Notes what was allocated under this address; false if there is no memory to note it in. */
bool fgpu_hold_memory(CUdeviceptr address, struct fgpu_holding holding);

/* Around each function that allocates in the current context: claims, then notes under `key` what the driver has
 * allocated, or takes the claim back. `end` is true if there is no memory to note it in: then the result is changed, and
 * what was allocated is to be freed. */
bool fgpu_begin_claim(struct fgpu_holding *claim, uint64_t bytes);
bool fgpu_end_claim(const struct fgpu_holding *claim, CUdeviceptr key, CUresult *result);

/* Around each function that frees an address. It leaves the table before the driver frees it, as the driver may hand
 * the address out again at once; it returns if the driver has not freed it. */
void fgpu_free_begins(CUdeviceptr address, struct fgpu_holding *holding);
CUresult fgpu_free_ends(const struct fgpu_holding *holding, CUresult result);

/* Around what ends a context, with the allocations locked; then those of which `is_gone` says so are released. */
void fgpu_memory_lock(void);
void fgpu_memory_unlock(void);
typedef bool (*fgpu_owner_test)(void *context, int device, const void *data);
void fgpu_release_memory_of(fgpu_owner_test is_gone, const void *data);

void fgpu_memory_forget(void);

/* ---- pools.c ------------------------------------------------------------------------------------------- */

/* What the driver takes by itself, for pools and for graphs, is counted under this lock. A thread may take it again. */
void fgpu_pools_lock(void);
void fgpu_pools_unlock(void);

/* Memory of a pool was freed. */
void fgpu_pool_freed(void *pool, uint64_t bytes);

/* Charges what the pools hold of this device now. `trim`: first has them give back what is not in use. */
void fgpu_pools_settle(int device, bool trim);

/* The primary context of this device is gone; what of its pools is left counts again when they are used. */
void fgpu_pools_drop(int device);
void fgpu_pools_forget(void);

/* Brings `*charged` to what the driver says that it holds, whatever the limit. */
void fgpu_recharge(int device, uint64_t *charged, uint64_t held);

/* ---- graphs.c ------------------------------------------------------------------------------------------ */

void fgpu_graphs_settle(int device, bool trim);

/* An allocation was captured from a stream, to be part of a graph. */
void fgpu_graph_will_allocate(void);
void fgpu_graphs_forget(void);

/* Around the real launch of an executable graph, directly before and directly after it, in the same thread. What
 * `before` returns other than CUDA_SUCCESS is the launch's result; then it is not launched, and `after` not called. */
CUresult fgpu_graph_before_launch(CUgraphExec executable);
void fgpu_graph_after_launch(CUgraphExec executable, CUresult result);

/* ---- the others ---------------------------------------------------------------------------------------- */

/* virtual.c: a sparse array is gone, and with it what was mapped into it. */
void fgpu_array_unmapped(const void *array);

/* contexts.c: charges the device's primary context if there is one that was not charged yet, as CUDA's runtime may
 * make it by a function that nobody can stand before. Whatever takes memory of a device calls this, and what tells of
 * it; with no lock of this library held but those of the callers of fgpu_claim(). */
extern _Atomic(bool) fgpu_primary_charged[FGPU_MAX_DEVICES];
void fgpu_look_for_primary(int device);

static inline void fgpu_see_primary(int device) {
    if (__builtin_expect(!atomic_load_explicit(&fgpu_primary_charged[device], memory_order_relaxed), 0))
        fgpu_look_for_primary(device);
}

void fgpu_virtual_forget(void);
void fgpu_contexts_forget(void);

#endif
