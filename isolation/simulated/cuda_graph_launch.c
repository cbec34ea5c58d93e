/* Executable graphs: instantiated, changed, uploaded, launched. */
#include "cuda_driver.h"

#include <stdlib.h>
#include <string.h>

#define EXEC_OF(exec) \
    READY(); \
    LOCKED; \
    if (!(exec) || (exec)->magic != GRAPH_EXEC) \
    return CUDA_ERROR_INVALID_VALUE

static CUresult instantiate(CUgraphExec *out, CUgraph graph, unsigned long long flags)
{
    CURRENT(context);
    LOCKED;
    if (!out || !graph || graph->magic != GRAPH || flags & ~15ull)
        return CUDA_ERROR_INVALID_VALUE;
    CUgraphNode *order = graph_order(graph);
    if (!order)
        return CUDA_ERROR_INVALID_VALUE;
    free(order);
    CUgraphExec exec = calloc(1, sizeof *exec);
    if (!exec)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = graph_clone(graph, &exec->graph);
    if (result) {
        free(exec);
        return result;
    }
    exec->magic = GRAPH_EXEC;
    exec->flags = flags;
    exec->context = context;
    *out = exec;
    return CUDA_SUCCESS;
}

CALL(cuGraphInstantiate, 10000, cuGraphInstantiate, CUgraphExec *out, CUgraph graph, CUgraphNode *failed, char *log,
     size_t room)
{
    (void)failed, (void)log, (void)room;
    return instantiate(out, graph, 0);
}

CALL(cuGraphInstantiate, 11000, cuGraphInstantiate_v2, CUgraphExec *out, CUgraph graph, CUgraphNode *failed, char *log,
     size_t room)
{
    (void)failed, (void)log, (void)room;
    return instantiate(out, graph, 0);
}

CALL(cuGraphInstantiateWithFlags, 11040, cuGraphInstantiateWithFlags, CUgraphExec *out, CUgraph graph,
     unsigned long long flags)
{
    return instantiate(out, graph, flags);
}

/* From CUDA 12 on the plain name means this one. */
static const struct call entry_instantiate_12 __attribute__((used, section("cuda_calls"), aligned(8))) = {
    "cuGraphInstantiate", 12000, 0, (void *)cuGraphInstantiateWithFlags};

CALL(cuGraphExecDestroy, 10000, cuGraphExecDestroy, CUgraphExec exec)
{
    EXEC_OF(exec);
    graph_destroy(exec->graph);
    exec->magic = 0;
    free(exec);
    return CUDA_SUCCESS;
}

/* ---- changing -------------------------------------------------------------------------------------------------- */

enum { UPDATED, UPDATE_FAILED, TOPOLOGY_CHANGED, TYPE_CHANGED };

/* ---- launching ---------------------------------------------------------------------------------------------------- */

/* The most that the graph has in use at once, beyond what the device's graphs have now. Memory of an earlier launch
 * that is still there is freed first if the graph was made so; else it must not be launched again. */
static CUresult plan_memory(CUgraph graph, bool auto_free, struct device **device, int64_t *now, int64_t *most)
{
    CUgraphNode *order = graph_order(graph);
    CUresult result = order ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t i = 0; !result && i < graph->count; i++) {
        CUgraphNode node = order[i];
        if (node->child)
            result = plan_memory(node->child, auto_free, device, now, most);
        if (!node->memory)
            continue;
        *device = graph_memory_device(node->memory);
        if (node->parameters.type == CU_GRAPH_NODE_TYPE_MEM_FREE) {
            *now -= (int64_t)graph_memory_bytes(node->memory);
            continue;
        }
        if (graph_memory_live(node->memory) && !auto_free) {
            result = CUDA_ERROR_INVALID_VALUE;
            break;
        }
        graph_memory_unuse(node->memory);
        *now += (int64_t)graph_memory_bytes(node->memory);
        if (*now > *most)
            *most = *now;
    }
    free(order);
    return result;
}

static CUresult prepare(CUgraphExec exec)
{
    struct device *device = NULL;
    int64_t now = 0, most = 0;
    CUresult result =
        plan_memory(exec->graph, exec->flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH, &device, &now, &most);
    return result || !device ? result : graph_memory_reserve(device, device->graph_used + (uint64_t)most);
}

struct batch {
    CUstream stream;
    uint64_t duration, kernels;
};

static void flush(struct batch *batch)
{
    if (batch->kernels)
        stream_run(batch->stream, batch->duration, batch->kernels);
    batch->duration = batch->kernels = 0;
}

static CUresult run_node(CUgraphNode node, struct batch *batch)
{
    CUgraphNodeParams *parameters = &node->parameters;
    struct CUfunc_st *function;
    CUDA_MEMSET_NODE_PARAMS *fill;
    switch ((int)parameters->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        function = function_of(parameters->kernel.func ? (void *)parameters->kernel.func
                                                       : (void *)parameters->kernel.kern);
        if (!function)
            return CUDA_ERROR_INVALID_HANDLE;
        batch->duration += function->duration_ns;
        batch->kernels++;
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        return copy_line(memcpy_of(parameters));
    case CU_GRAPH_NODE_TYPE_MEMSET:
        fill = memset_of(parameters);
        return set_2d(fill->dst, fill->pitch, fill->value, fill->elementSize, fill->width, fill->height);
    case CU_GRAPH_NODE_TYPE_HOST:
        flush(batch);
        return stream_call(batch->stream, host_of(parameters)->fn, NULL, host_of(parameters)->userData);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        flush(batch);
        event_record(*event_of(parameters), batch->stream);
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        flush(batch);
        stream_advance(batch->stream, atomic_load(&(*event_of(parameters))->time));
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        return graph_memory_use(node->memory);
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
        graph_memory_unuse(node->memory);
        return CUDA_SUCCESS;
    default:
        return CUDA_SUCCESS;
    }
}

static CUresult run_graph(CUgraph graph, struct batch *batch)
{
    CUgraphNode *order = graph_order(graph);
    CUresult result = order ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t i = 0; !result && i < graph->count; i++)
        result = order[i]->child ? run_graph(order[i]->child, batch) : run_node(order[i], batch);
    free(order);
    return result;
}

STREAMED(cuGraphUpload, 11010, cuGraphUpload, _ptsz, (CUgraphExec exec, CUstream handle), (exec, handle))
{
    CUstream stream;
    CUresult result = stream_of(handle, per_thread, &stream);
    if (result)
        return result;
    EXEC_OF(exec);
    return prepare(exec);
}

STREAMED(cuGraphLaunch, 10000, cuGraphLaunch, _ptsz, (CUgraphExec exec, CUstream handle), (exec, handle))
{
    CUstream stream;
    CUresult result = stream_of(handle, per_thread, &stream);
    if (result)
        return result;
    EXEC_OF(exec);
    if (stream->capture) {
        CUgraphNodeParams parameters = {.type = CU_GRAPH_NODE_TYPE_GRAPH};
        parameters.graph.graph = exec->graph;
        return capture_add(stream, &parameters, NULL);
    }
    result = prepare(exec);
    if (result)
        return result;
    struct batch batch = {stream, 0, 0};
    result = run_graph(exec->graph, &batch);
    flush(&batch);
    return result;
}

STREAMED(cuGraphInstantiateWithParams, 12000, cuGraphInstantiateWithParams, _ptsz,
         (CUgraphExec * out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters), (out, graph, parameters))
{
    if (!parameters)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = instantiate(out, graph, parameters->flags);
    LOCKED;
    if (!result && parameters->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD)
        result = prepare(*out);
    parameters->hErrNode_out = NULL;
    parameters->result_out = result ? CUDA_GRAPH_INSTANTIATE_ERROR : CUDA_GRAPH_INSTANTIATE_SUCCESS;
    return result;
}
