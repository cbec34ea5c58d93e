/* The interfaces between the parts that count memory. */
#ifndef FGPU_PARTS_H
#define FGPU_PARTS_H

#include "hooks.h"

#include <pthread.h>

/* ---- devices.c -------------------------------------------------------------------------------------- */

/* Instead of an index. UNNAMED: the limits do not name the device or cannot be applied, so nothing on it is granted.
 * UNKNOWN: there is no context or no such device, for which the driver has the better error; what it allocates
 * nevertheless is freed again. */
#define FGPU_UNNAMED (-2)
#define FGPU_UNKNOWN (-1)

/* The index in the limits of a CUDA device, or one of these two. */
int fgpu_device_of(CUdevice device);

/* The CUDA device of an index from fgpu_device_of(). */
CUdevice fgpu_ordinal_of(int device);

/* The enforced limit: the one in force, or for a share of the whole device the driver's total, if that is less. 0 while
 * the limits have changed and cannot be read. */
uint64_t fgpu_limit_of(int device);

/* fgpu_reserve() within that limit. A grant is within the limit in force when this returns: a Hub that lowers the limit
 * and then sums the committed bytes sees everything that was granted before. */
enum fgpu_verdict fgpu_reserve_in_force(int device, uint64_t bytes);

/* code.c: the driver takes memory for the code of kernels when it is loaded, without a call that says how much. So the
 * session may fill its slice up to the first sum only, until this process has asked the driver what it counts for it. */
uint64_t fgpu_code_counted_to(int device, uint64_t limit);
void fgpu_count_code(int device, uint64_t limit);
void fgpu_code_forget(void);

/* Shown in place of the total that NVML or the CUDA driver reports; 0: the device must not be used (logged). */
uint64_t fgpu_visible_total(int device, uint64_t real_total);

/* The index of a device by the driver's 16 bytes; -1: none. */
int fgpu_device_by_bytes(const CUuuid *bytes);

/* Like fgpu_current_device(), with the context. */
int fgpu_current_context(CUcontext *context);

/* The device whose memory an allocation of this kind takes; false for host memory. */
bool fgpu_takes_memory(CUmemLocation location, CUmemAllocationType type, int *device);

void fgpu_devices_forget(void);

/* ---- claims: devices.c ------------------------------------------------------------------------------- */

/* Charges an allocation before it is made. Over the limit it first releases what the driver has given back, then makes
 * the driver give up its reserves. False: CUDA_ERROR_OUT_OF_MEMORY. FGPU_UNKNOWN charges nothing and is true. */
bool fgpu_claim(int device, uint64_t bytes);

/* Charges what the driver has changed on its own: before a report, and before a refusal. */
void fgpu_settle(int device);

/* Runs `call`, a driver's function that allocates claimed memory, and repeats it for half a second while the driver has
 * no memory: a killed process leaves its slot when its address space is gone, and the driver's memory a moment later. */
#define FGPU_RETRY(call) \
    ({ \
        CUresult got = (call); \
        for (unsigned tries = 0; __builtin_expect(got == CUDA_ERROR_OUT_OF_MEMORY, 0) && fgpu_try_again(tries); tries++) \
            got = (call); \
        got; \
    })

/* Waits before another try; false after half a second of tries, or within 10 s of tries that all failed. */
bool fgpu_try_again(unsigned tries);

/* Makes pools and graphs give back their reserves. */
void fgpu_trim(int device);

/* Cancels a claim. */
void fgpu_unclaim(int device, uint64_t bytes);

/* Around calls that wait or free, in a thread that may be capturing a stream: in the stricter modes they would
 * invalidate the capture. Returns the mode that was in force, to be restored. */
CUstreamCaptureMode fgpu_relax(CUstreamCaptureMode mode);

/* The driver hands out memory of pools, and small allocations, in units of 512 bytes. UINT64_MAX, above any limit, on
 * overflow. */
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

/* False without memory for the table. A holding already under this key is moved to `before`; else its key is 0. */
bool fgpu_put(struct fgpu_holdings *holdings, struct fgpu_holding holding, struct fgpu_holding *before);
struct fgpu_holding *fgpu_get(const struct fgpu_holdings *holdings, uint64_t key);
bool fgpu_remove(struct fgpu_holdings *holdings, uint64_t key, struct fgpu_holding *out);

/* ---- memory.c ------------------------------------------------------------------------------------------ */

/* Records an allocation under its address; false without memory for the record. */
bool fgpu_hold_memory(CUdeviceptr address, struct fgpu_holding holding);

/* Around each function that allocates in the current context: claims, then records under `key` what the driver has
 * allocated, or cancels the claim. `end` returns true without memory for the record: then the result was changed, and
 * the caller must free the allocation. */
bool fgpu_begin_claim(struct fgpu_holding *claim, uint64_t bytes);
bool fgpu_end_claim(const struct fgpu_holding *claim, CUdeviceptr key, CUresult *result);

/* Around each function that frees an address. The address leaves the table before the driver frees it, as the driver
 * may hand it out again at once; it returns to the table if the driver did not free it. */
void fgpu_free_begins(CUdeviceptr address, struct fgpu_holding *holding);
CUresult fgpu_free_ends(const struct fgpu_holding *holding, CUresult result);

/* Around the end of a context, with the allocations locked; releases those for which `is_gone` returns true. */
void fgpu_memory_lock(void);
void fgpu_memory_unlock(void);
typedef bool (*fgpu_owner_test)(void *context, int device, const void *data);
void fgpu_release_memory_of(fgpu_owner_test is_gone, const void *data);

void fgpu_memory_forget(void);

/* ---- pools.c ------------------------------------------------------------------------------------------- */

/* Guards the counts of what the driver takes on its own for pools and graphs. Recursive. */
void fgpu_pools_lock(void);
void fgpu_pools_unlock(void);

/* Memory of a pool was freed. */
void fgpu_pool_freed(void *pool, uint64_t bytes);

/* Charges what the pools of this device hold now. `trim`: first makes them give back unused memory. */
void fgpu_pools_settle(int device, bool trim);

/* The primary context of this device is gone; pools that remain count again when they are used. */
void fgpu_pools_drop(int device);
void fgpu_pools_forget(void);

/* Sets `*charged` to what the driver says that it holds, whatever the limit. */
void fgpu_recharge(int device, uint64_t *charged, uint64_t held);

/* ---- graphs.c ------------------------------------------------------------------------------------------ */

void fgpu_graphs_settle(int device, bool trim);

/* An allocation was captured from a stream and becomes part of a graph. */
void fgpu_graph_will_allocate(void);
void fgpu_graphs_forget(void);

/* Around the real launch of an executable graph, directly before and after it, in the same thread. If `before` does not
 * return CUDA_SUCCESS, that is the result: the graph is not launched, and `after` not called. */
CUresult fgpu_graph_before_launch(CUgraphExec executable);
void fgpu_graph_after_launch(CUgraphExec executable, CUresult result);

/* ---- the others ---------------------------------------------------------------------------------------- */

/* virtual.c: a sparse array is gone, and everything that was mapped into it. */
void fgpu_array_unmapped(const void *array);

/* contexts.c: charges the device's primary context if it exists and was not charged, as CUDA's runtime may make it by a
 * function that cannot be hooked. Called by everything that takes or reports memory of a device, with no lock of this
 * library held but those of the callers of fgpu_claim(). */
extern _Atomic(bool) fgpu_primary_charged[FGPU_MAX_DEVICES];
void fgpu_look_for_primary(int device);

static inline void fgpu_see_primary(int device) {
    if (__builtin_expect(!atomic_load_explicit(&fgpu_primary_charged[device], memory_order_relaxed), 0))
        fgpu_look_for_primary(device);
}

void fgpu_virtual_forget(void);
void fgpu_contexts_forget(void);

#endif
