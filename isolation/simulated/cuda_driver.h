/* What the parts of the simulated CUDA driver know of each other. */
#ifndef CUDA_DRIVER_H
#define CUDA_DRIVER_H

#include "cuda_types.h"
#include "cuda_ledger.h"

#include <pthread.h>
#include <stdbool.h>

#define EXPORT __attribute__((visibility("default")))
#define UNUSED __attribute__((unused))

/* A thread's own: little, so that it fits into what the loader keeps free for libraries loaded late, and is reached
 * without a call. */
#define PER_THREAD static _Thread_local __attribute__((tls_model("initial-exec")))

/* ---- the table of functions: each definition enters itself (cuda_table.c) ---------------------------- */

struct call {
    const char *name; /* as cuGetProcAddress is asked for it */
    int version;      /* the CUDA version that brought it */
    int per_thread;   /* the variant for per-thread default streams */
    void *address;
};

/* The distance between entries of the section is the linker's to choose only if they are not of one alignment. */
#define ENTER(name, version, per_thread, symbol) \
    static const struct call entry_##symbol __attribute__((used, section("cuda_calls"), aligned(8))) = { \
        #name, version, per_thread, (void *)symbol};

#define CALL(name, version, symbol, ...) \
    EXPORT CUresult symbol(__VA_ARGS__); \
    ENTER(name, version, 0, symbol) \
    CUresult symbol(__VA_ARGS__)

/* A function of a stream: twice, and `per_thread` says what a NULL stream is. Parameters and their names each in
 * parentheses. */
#define UNWRAP(...) __VA_ARGS__
#define STREAMED(name, version, symbol, suffix, parameters, names) \
    static CUresult in_##symbol(bool per_thread, UNWRAP parameters); \
    EXPORT CUresult symbol parameters; \
    EXPORT CUresult symbol##suffix parameters; \
    ENTER(name, version, 0, symbol) \
    ENTER(name, (version) < 7000 ? 7000 : (version), 1, symbol##suffix) \
    CUresult symbol parameters { return in_##symbol(false, UNWRAP names); } \
    CUresult symbol##suffix parameters { return in_##symbol(true, UNWRAP names); } \
    static CUresult in_##symbol(UNUSED bool per_thread, UNWRAP parameters)

/* ---- objects ----------------------------------------------------------------------------------------- */

#define QUEUE_DEPTH 1024 /* kernels that a stream accepts before a launch has to wait */
#define CONTEXT_STACK 64
#define THREADS_PER_SM 2048

enum magic {
    CONTEXT = 0x51a0,
    STREAM,
    EVENT,
    LIBRARY,
    FUNCTION,
    ARRAY,
    MIPMAP,
    GRAPH,
    NODE,
    GRAPH_EXEC,
    GREEN,
};

struct capture;

struct device {
    const struct machine_device *machine;
    int ordinal;
    CUcontext primary;
    unsigned retained, primary_flags;
    CUmemoryPool default_pool, pool;
    uint64_t graph_used, graph_used_high, graph_reserved, graph_reserved_high;
    uint64_t small_bytes; /* what small allocations sum up to, where the machine has a granularity */
};

struct CUstream_st {
    enum magic magic;
    CUcontext context;
    CUgreenCtx green;
    unsigned flags;
    int priority;
    unsigned long long id;
    bool legacy;
    pthread_mutex_t lock;
    _Atomic(uint64_t) last; /* when all that is in it will be done */
    _Atomic(uint32_t) callbacks; /* host functions that have not run yet */
    uint64_t queued;
    struct capture *capture; /* this and what follows under the driver's lock */
    CUgraphNode *behind;     /* what the next captured node comes after */
    size_t behind_count;
    uint64_t ends[QUEUE_DEPTH];
};

struct CUctx_st {
    enum magic magic;
    bool destroyed, primary;
    struct device *device;
    unsigned flags;
    unsigned long long id;
    CUgreenCtx green;
    uint64_t charged; /* device memory for itself */
    size_t limits[16];
    _Atomic(uint64_t) legacy_last;   /* when the legacy stream's work will be done */
    _Atomic(uint64_t) blocking_last; /* of all streams that the legacy one waits for, and they for it */
    _Atomic(uint64_t) all_last;
    _Atomic(uint32_t) callbacks;
    struct CUstream_st legacy;
};

struct CUevent_st {
    enum magic magic;
    CUcontext context;
    unsigned flags;
    bool recorded;
    _Atomic(uint64_t) time;
    struct capture *capture; /* recorded in a capturing stream, behind these nodes */
    CUgraphNode *behind;
    size_t behind_count;
};

struct CUfunc_st {
    enum magic magic;
    char *name;
    CUmodule module;
    uint64_t duration_ns;
    int attributes[20];
    struct CUfunc_st *next;
};

/* ---- the driver's state (cuda_device.c) --------------------------------------------------------------- */

extern struct device devices[MACHINE_DEVICES];
extern int device_count;
extern const struct machine *machine;

/* Held while tables and objects other than streams are changed. Recursive: destroying a context destroys the rest. */
extern pthread_mutex_t driver_lock;
#define LOCKED __attribute__((cleanup(unlock_driver))) UNUSED int locked_ = lock_driver()
int lock_driver(void);
void unlock_driver(int *ignored);

/* 0 once cuInit has succeeded; 3 before, and in a forked child. */
CUresult driver_ready(void);
struct device *device_of(CUdevice ordinal);

#define READY() \
    do { \
        CUresult ready_ = driver_ready(); \
        if (ready_) \
            return ready_; \
    } while (0)

/* ---- contexts (cuda_context.c) ------------------------------------------------------------------------ */

/* Defines a variable for the current context, or returns the error. */
#define CURRENT(variable) \
    CUcontext variable; \
    do { \
        CUresult current_ = current_context(&variable); \
        if (current_) \
            return current_; \
    } while (0)

CUresult current_context(CUcontext *out);
CUresult context_create(struct device *device, unsigned flags, bool primary, CUcontext *out);
/* A green context's: shares what the primary one took. */
CUresult context_create_green(struct device *device, CUgreenCtx green, CUcontext *out);
void context_destroy(CUcontext context);
CUresult primary_retain(struct device *device, CUcontext *out);
CUresult primary_retain_by_table(CUcontext *out, CUdevice ordinal);
CUresult primary_release(struct device *device);

/* ---- memory (cuda_memory.c) --------------------------------------------------------------------------- */

enum kind { PLAIN, MANAGED, HOST, REGISTERED, POOLED, GRAPHED, MAPPED };

struct range {
    CUdeviceptr start;
    size_t bytes;
    enum kind kind;
    struct device *device;
    CUcontext context;
    size_t charged;
    unsigned flags;
    unsigned long long id;
    CUmemoryPool pool;
    void *object; /* the graph's memory, or the physical memory mapped here */
    bool sync_memops, inaccessible;
};

/* The allocation that an address lies in; NULL if none. The driver's lock is held. */
struct range *range_at(CUdeviceptr address);
struct range *range_add(CUdeviceptr start, size_t bytes, enum kind kind, CUcontext context);
void range_remove(struct range *range);
void range_each(bool (*chosen)(const struct range *, void *), void *context, void (*act)(struct range *));

/* Addresses that cost nothing until they are used; 0 if there are none. */
CUdeviceptr addresses_reserve(size_t bytes, bool low);
void addresses_release(CUdeviceptr start, size_t bytes);

/* Takes device memory as the machine's granularity has it; what was charged, or CUDA_ERROR_OUT_OF_MEMORY. */
CUresult device_take(struct device *device, size_t bytes, size_t *charged);
void device_give(struct device *device, size_t bytes, size_t charged);

void memory_of_context_free(CUcontext context);
CUresult memory_free(CUdeviceptr address);

/* Whether all of a span can be read or written by a device. */
bool span_valid(CUdeviceptr address, size_t bytes);

/* ---- pools (cuda_pools.c) ------------------------------------------------------------------------------ */

CUmemoryPool default_pool(struct device *device);
CUresult pool_allocate(CUmemoryPool pool, CUcontext context, size_t bytes, CUdeviceptr *out);
void pool_free(struct range *range);
/* What happens at every synchronisation: memory above the release threshold goes back to the device. */
void pools_release(struct device *device);
void pools_reset(struct device *device);

/* ---- memory of graphs (cuda_graph_memory.c) -------------------------------------------------------------- */

struct graph_memory;
CUresult graph_memory_create(struct device *device, size_t bytes, struct graph_memory **out, CUdeviceptr *address);
struct graph_memory *graph_memory_share(struct graph_memory *memory);
void graph_memory_drop(struct graph_memory *memory);
bool graph_memory_live(const struct graph_memory *memory);
size_t graph_memory_bytes(const struct graph_memory *memory);
struct graph_memory *graph_memory_at(CUdeviceptr address);
struct device *graph_memory_device(const struct graph_memory *memory);
/* Sees to it that the device's graphs have `bytes` in use at once. */
CUresult graph_memory_reserve(struct device *device, uint64_t bytes);
CUresult graph_memory_use(struct graph_memory *memory);
void graph_memory_unuse(struct graph_memory *memory);
void graph_memory_free(struct range *range);
void graph_memory_reset(struct device *device);

/* ---- streams (cuda_stream.c) --------------------------------------------------------------------------- */

/* The stream that a handle means; NULL handles mean the legacy stream or the thread's own. */
CUresult stream_of(CUstream handle, bool per_thread, CUstream *out);
void stream_init(CUstream stream, CUcontext context, unsigned flags, int priority);
/* Queues GPU work of a duration. */
CUresult stream_run(CUstream stream, uint64_t duration, uint64_t kernels);
/* When all that a new piece of work in the stream has to wait for is done. */
uint64_t stream_ready_at(CUstream stream);
void stream_advance(CUstream stream, uint64_t time);
void stream_wait(CUstream stream);
void context_wait(CUcontext context);
void wait_until(uint64_t time);
/* Runs a host function when the stream's work is done. */
CUresult stream_call(CUstream stream, CUhostFn function, CUstreamCallback callback, void *data);
CUstream thread_stream(CUcontext context);
void event_record(CUevent event, CUstream stream);

/* ---- functions (cuda_module.c) --------------------------------------------------------------------------- */

/* The function behind a CUfunction or a CUkernel, which may stand for each other; NULL if it is neither. */
struct CUfunc_st *function_of(void *handle);
void modules_of_context_unload(CUcontext context);

/* ---- launches (cuda_launch.c) ---------------------------------------------------------------------------- */

CUresult launch_check(struct CUfunc_st *function, const unsigned grid[3], const unsigned block[3], unsigned shared);

/* ---- copies (cuda_copy.c) -------------------------------------------------------------------------------- */

struct copy {
    CUmemorytype to_type, from_type;
    CUdeviceptr to, from;
    size_t bytes;
};

CUresult copy_line(const struct copy *copy);
CUresult set_2d(CUdeviceptr to, size_t pitch, unsigned value, unsigned element, size_t width, size_t height);

/* ---- physical memory (cuda_virtual.c) -------------------------------------------------------------------- */

/* One more mapping of what the handle names, and one less. */
bool physical_map(CUmemGenericAllocationHandle handle, void **out);
void physical_unmap(void *mapped);

/* ---- graphs (cuda_graph.c) ------------------------------------------------------------------------------- */

struct CUgraph_st {
    enum magic magic;
    CUgraphNode *nodes;
    size_t count, room;
};

/* What a node does, by the type of its parameters; beside them what has to be kept alive for it. */
struct CUgraphNode_st {
    enum magic magic;
    CUgraph graph;
    CUgraphNodeParams parameters;
    CUgraphNode *after; /* the nodes that it comes after */
    size_t after_count;
    CUgraph child;
    struct graph_memory *memory;
    CUgraphNode origin, copy; /* across a clone */
    size_t mark;
};

struct CUgraphExec_st {
    enum magic magic;
    CUgraph graph;
    unsigned long long flags;
    CUcontext context;
};

CUresult graph_create(CUgraph *out);
void graph_destroy(CUgraph graph);
CUresult graph_clone(CUgraph from, CUgraph *out);
CUresult graph_add(CUgraph graph, const CUgraphNode *after, size_t count, const CUgraphNodeParams *parameters,
                   CUgraphNode *out);
CUresult node_depend(CUgraphNode node, CUgraphNode on);
/* The nodes so that each comes after those that it depends on; NULL for a circle or without memory. */
CUgraphNode *graph_order(CUgraph graph);

/* The parameters that cuda_abi.h has no names for. */
struct copy *memcpy_of(CUgraphNodeParams *parameters);
CUDA_MEMSET_NODE_PARAMS *memset_of(CUgraphNodeParams *parameters);
CUDA_HOST_NODE_PARAMS *host_of(CUgraphNodeParams *parameters);
CUevent *event_of(CUgraphNodeParams *parameters);

/* ---- capture (cuda_capture.c) ---------------------------------------------------------------------------- */

/* What must not happen while a stream captures: waiting for that stream or, unless the thread's mode allows it, calls
 * that may wait for anything. */
CUresult capture_forbids(CUstream stream);
CUresult capture_forbids_unsafe(void);
/* Whether work in the context's legacy stream would have to wait for a stream that captures. */
CUresult capture_forbids_legacy(CUcontext context);
CUresult capture_add(CUstream stream, CUgraphNodeParams *parameters, CUgraphNode *out);
CUresult capture_event(CUevent event, CUstream stream);
void capture_event_forget(CUevent event);
CUresult capture_wait(CUstream stream, CUevent event, unsigned flags, bool *handled);
void capture_stream_gone(CUstream stream);

#define SAFE() \
    do { \
        CUresult safe_ = capture_forbids_unsafe(); \
        if (safe_) \
            return safe_; \
    } while (0)

#endif
