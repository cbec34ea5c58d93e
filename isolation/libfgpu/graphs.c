/* Memory that graphs allocate. A graph that allocates has nodes for it. The memory is taken when the graph is first
 * launched or uploaded, from a reserve for all graphs of a device, and stays there until the reserve is trimmed. The
 * reserve is charged (GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT).
 *
 * A launch cannot be undone. So before an executable graph runs for the first time, or again after a trim, everything
 * that its nodes allocate is claimed, as if no memory could serve twice: a graph that allocates and frees in turn is
 * refused earlier than by the driver. */
#include "parts.h"

#include <stdlib.h>

#define DEPTH 64 /* of graphs in graphs */

/* What an executable graph allocates. */
struct tally {
    uint64_t bytes[FGPU_MAX_DEVICES];
    uint64_t claimed[FGPU_MAX_DEVICES]; /* for launches in progress */
    uint64_t launched; /* the value of `trims` at its last launch; 0: none yet */
    bool refused; /* its device must not be used, or the count failed */
};

static struct fgpu_holdings executables; /* under fgpu_pools_lock(), like all here; the owner is the tally */
static uint64_t charged[FGPU_MAX_DEVICES];
static uint64_t trims = 1;
static _Atomic(bool) any; /* there is a node that allocates */

void fgpu_graphs_forget(void) {
    executables = (struct fgpu_holdings){0};
    for (int i = 0; i < FGPU_MAX_DEVICES; i++)
        charged[i] = 0;
    atomic_store(&any, false);
}

void fgpu_graph_will_allocate(void) {
    atomic_store(&any, true);
}

/* ---- The reserve ---- */

static uint64_t attribute(int device, CUgraphMem_attribute which, uint64_t otherwise) {
    cuuint64_t value = 0;
    __typeof__(&cuDeviceGetGraphMemAttribute) get = DRIVER(cuDeviceGetGraphMemAttribute);
    return get != NULL && get(fgpu_ordinal_of(device), which, &value) == CUDA_SUCCESS ? value : otherwise;
}

static void settle(int device) {
    fgpu_recharge(device, &charged[device],
                  attribute(device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, charged[device]));
}

void fgpu_graphs_settle(int device, bool trim) {
    if (!atomic_load_explicit(&any, memory_order_relaxed))
        return;
    fgpu_pools_lock();
    if (trim && charged[device] != 0 && DRIVER(cuDeviceGraphMemTrim) != NULL) {
        DRIVER(cuDeviceGraphMemTrim)(fgpu_ordinal_of(device));
        trims++;
    }
    settle(device);
    fgpu_pools_unlock();
}

static CUresult trim(__typeof__(&cuDeviceGraphMemTrim) real, CUdevice ordinal) {
    int device = fgpu_device_of(ordinal);
    fgpu_pools_lock();
    CUresult result = real(ordinal);
    if (device >= 0 && atomic_load(&any)) {
        trims++;
        settle(device);
    }
    fgpu_pools_unlock();
    return result;
}

/* ---- What a graph allocates ---- */

static bool count_nodes(CUgraph graph, struct tally *tally, int depth);

static bool count_node(CUgraphNode node, struct tally *tally, int depth) {
    CUgraphNodeType type;
    CUgraph child;
    CUDA_MEM_ALLOC_NODE_PARAMS allocation;
    if (DRIVER(cuGraphNodeGetType)(node, &type) != CUDA_SUCCESS)
        return false;
    if (type == CU_GRAPH_NODE_TYPE_GRAPH)
        return DRIVER(cuGraphChildGraphNodeGetGraph)(node, &child) == CUDA_SUCCESS &&
               count_nodes(child, tally, depth + 1);
    if (type != CU_GRAPH_NODE_TYPE_MEM_ALLOC)
        return true;
    int device;
    if (DRIVER(cuGraphMemAllocNodeGetParams)(node, &allocation) != CUDA_SUCCESS)
        return false;
    if (!fgpu_takes_memory(allocation.poolProps.location, allocation.poolProps.allocType, &device))
        return true;
    if (device < 0) {
        tally->refused = true;
        return true;
    }
    uint64_t bytes = fgpu_rounded(allocation.bytesize), *sum = &tally->bytes[device];
    *sum = bytes > UINT64_MAX - *sum ? UINT64_MAX : *sum + bytes;
    return true;
}

/* False if unknown. */
static bool count_nodes(CUgraph graph, struct tally *tally, int depth) {
    size_t count = 0;
    if (depth > DEPTH || DRIVER(cuGraphGetNodes) == NULL ||
        DRIVER(cuGraphGetNodes)(graph, NULL, &count) != CUDA_SUCCESS)
        return false;
    if (count == 0)
        return true;
    CUgraphNode *nodes = calloc(count, sizeof *nodes);
    bool counted = nodes != NULL && DRIVER(cuGraphGetNodes)(graph, nodes, &count) == CUDA_SUCCESS;
    for (size_t i = 0; counted && i < count; i++)
        counted = count_node(nodes[i], tally, depth);
    free(nodes);
    return counted;
}

static bool allocates(const struct tally *tally) {
    for (int i = 0; i < FGPU_MAX_DEVICES; i++)
        if (tally->bytes[i] != 0)
            return true;
    return tally->refused;
}

/* NULL if it allocates nothing; `*failed` without memory for the count. */
static struct tally *tally_of(CUgraph graph, bool *failed) {
    *failed = false;
    if (!atomic_load_explicit(&any, memory_order_relaxed))
        return NULL;
    struct tally *tally = calloc(1, sizeof *tally);
    if (tally == NULL) {
        *failed = true;
        return NULL;
    }
    if (!count_nodes(graph, tally, 0)) {
        fgpu_log("graph", "what a graph allocates could not be counted; it will not be launched");
        tally->refused = true;
    }
    if (allocates(tally))
        return tally;
    free(tally);
    return NULL;
}

static struct tally *tally_of_executable(CUgraphExec executable) {
    struct fgpu_holding *known = fgpu_get(&executables, (uint64_t)(uintptr_t)executable);
    return known == NULL ? NULL : known->owner;
}

/* ---- Launches ---- */

/* What the reserve lacks for this graph. */
static uint64_t missing(const struct tally *tally, int device) {
    settle(device);
    uint64_t used = attribute(device, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, UINT64_MAX);
    uint64_t free = charged[device] > used ? charged[device] - used : 0;
    return tally->bytes[device] > free ? tally->bytes[device] - free : 0;
}

static bool claim_of(struct tally *tally, int device) {
    uint64_t first = missing(tally, device);
    if (!fgpu_claim(device, first))
        return false;
    tally->claimed[device] += first;
    /* The claim may have trimmed the reserve on which it relied. */
    uint64_t now = missing(tally, device), more = now > first ? now - first : 0;
    if (!fgpu_claim(device, more))
        return false;
    tally->claimed[device] += more;
    return true;
}

/* Turns the claim into what was taken. */
static void end(struct tally *tally) {
    for (int device = 0; device < FGPU_MAX_DEVICES; device++) {
        if (tally->bytes[device] == 0)
            continue;
        charged[device] += tally->claimed[device];
        tally->claimed[device] = 0;
        settle(device);
    }
}

static bool begin(struct tally *tally) {
    bool granted = !tally->refused;
    if (tally->launched == trims)
        return granted;
    for (int device = 0; granted && device < FGPU_MAX_DEVICES; device++)
        granted = tally->bytes[device] == 0 || claim_of(tally, device);
    if (granted)
        tally->launched = trims;
    else
        end(tally);
    return granted;
}

CUresult fgpu_graph_before_launch(CUgraphExec executable) {
    if (!atomic_load_explicit(&any, memory_order_relaxed))
        return CUDA_SUCCESS;
    fgpu_pools_lock();
    struct tally *tally = tally_of_executable(executable);
    CUresult result = tally == NULL || begin(tally) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    fgpu_pools_unlock();
    return result;
}

void fgpu_graph_after_launch(CUgraphExec executable, CUresult result) {
    if (!atomic_load_explicit(&any, memory_order_relaxed))
        return;
    fgpu_pools_lock();
    struct tally *tally = tally_of_executable(executable);
    if (tally != NULL) {
        end(tally);
        if (result != CUDA_SUCCESS)
            tally->launched = 0;
    }
    fgpu_pools_unlock();
}

static CUresult upload(__typeof__(&cuGraphUpload) real, CUgraphExec executable, CUstream stream) {
    CUresult result = fgpu_graph_before_launch(executable);
    if (result != CUDA_SUCCESS)
        return result;
    result = real(executable, stream);
    fgpu_graph_after_launch(executable, result);
    return result;
}

/* ---- Nodes ---- */

/* The memory is taken at a launch; but an impossible amount is refused here, where a program expects it. */
static bool may_add(const CUDA_MEM_ALLOC_NODE_PARAMS *parameters) {
    int device;
    if (!fgpu_takes_memory(parameters->poolProps.location, parameters->poolProps.allocType, &device))
        return true;
    fgpu_graph_will_allocate();
    return device >= 0 && parameters->bytesize <= fgpu_limit_of(device);
}

static CUresult add_allocation(__typeof__(&cuGraphAddMemAllocNode) real, CUgraphNode *node, CUgraph graph,
                               const CUgraphNode *after, size_t count, CUDA_MEM_ALLOC_NODE_PARAMS *parameters) {
    return parameters == NULL || may_add(parameters) ? real(node, graph, after, count, parameters)
                                                     : CUDA_ERROR_OUT_OF_MEMORY;
}

static bool may_add_node(const CUgraphNodeParams *parameters) {
    return parameters == NULL || parameters->type != CU_GRAPH_NODE_TYPE_MEM_ALLOC || may_add(&parameters->alloc);
}

static CUresult add_node(__typeof__(&cuGraphAddNode) real, CUgraphNode *node, CUgraph graph, const CUgraphNode *after,
                         size_t count, CUgraphNodeParams *parameters) {
    return may_add_node(parameters) ? real(node, graph, after, count, parameters) : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult add_node_v2(__typeof__(&cuGraphAddNode_v2) real, CUgraphNode *node, CUgraph graph,
                            const CUgraphNode *after, const CUgraphEdgeData *edges, size_t count,
                            CUgraphNodeParams *parameters) {
    return may_add_node(parameters) ? real(node, graph, after, edges, count, parameters) : CUDA_ERROR_OUT_OF_MEMORY;
}

/* ---- Executable graphs ---- */

/* From here on the tally belongs to the executable, or is freed. */
static CUresult note(struct tally *tally, const CUgraphExec *executable, CUresult result) {
    struct fgpu_holding before = {0};
    if (result == CUDA_SUCCESS && tally != NULL) {
        fgpu_pools_lock();
        if (fgpu_put(&executables, (struct fgpu_holding){.key = (uint64_t)(uintptr_t)*executable, .owner = tally},
                     &before))
            tally = before.key == 0 ? NULL : before.owner; /* of one that ended unnoticed */
        else
            result = CUDA_ERROR_OUT_OF_MEMORY;
        fgpu_pools_unlock();
        if (result != CUDA_SUCCESS)
            DRIVER(cuGraphExecDestroy)(*executable);
    }
    free(tally);
    return result;
}

static CUresult instantiate(__typeof__(&cuGraphInstantiate) real, CUgraphExec *executable, CUgraph graph,
                            CUgraphNode *error, char *text, size_t size) {
    bool failed;
    struct tally *tally = tally_of(graph, &failed);
    return failed ? CUDA_ERROR_OUT_OF_MEMORY
                  : note(tally, executable, real(executable, graph, error, text, size));
}

static CUresult instantiate_with_flags(__typeof__(&cuGraphInstantiateWithFlags) real, CUgraphExec *executable,
                                       CUgraph graph, unsigned long long flags) {
    bool failed;
    struct tally *tally = tally_of(graph, &failed);
    return failed ? CUDA_ERROR_OUT_OF_MEMORY : note(tally, executable, real(executable, graph, flags));
}

/* This one can also upload. */
static CUresult instantiate_with_params(__typeof__(&cuGraphInstantiateWithParams) real, CUgraphExec *executable,
                                        CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters) {
    bool failed, uploads = parameters != NULL && (parameters->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) != 0;
    struct tally *tally = tally_of(graph, &failed);
    if (failed)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (tally == NULL || !uploads)
        return note(tally, executable, real(executable, graph, parameters));
    fgpu_pools_lock();
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (begin(tally)) {
        result = real(executable, graph, parameters);
        end(tally);
    }
    fgpu_pools_unlock();
    return note(tally, executable, result);
}

static CUresult destroy_executable(__typeof__(&cuGraphExecDestroy) real, CUgraphExec executable) {
    if (!atomic_load_explicit(&any, memory_order_relaxed))
        return real(executable);
    fgpu_pools_lock();
    CUresult result = real(executable);
    struct fgpu_holding gone;
    if (result == CUDA_SUCCESS && fgpu_remove(&executables, (uint64_t)(uintptr_t)executable, &gone)) {
        end(gone.owner);
        free(gone.owner);
    }
    fgpu_pools_unlock();
    return result;
}

FGPU_GRAPH_HOOKS(FGPU_EXPORT_GATED_HOOK)
