/* Graphs as programs build them: nodes and what comes after what. */
#include "cuda_driver.h"

#include <stdlib.h>
#include <string.h>

struct copy *memcpy_of(CUgraphNodeParams *parameters)
{
    return (struct copy *)(void *)parameters->reserved1;
}

CUDA_MEMSET_NODE_PARAMS *memset_of(CUgraphNodeParams *parameters)
{
    return (CUDA_MEMSET_NODE_PARAMS *)(void *)parameters->reserved1;
}

CUDA_HOST_NODE_PARAMS *host_of(CUgraphNodeParams *parameters)
{
    return (CUDA_HOST_NODE_PARAMS *)(void *)parameters->reserved1;
}

CUevent *event_of(CUgraphNodeParams *parameters)
{
    return (CUevent *)(void *)parameters->reserved1;
}

CUresult graph_create(CUgraph *out)
{
    *out = calloc(1, sizeof **out);
    if (!*out)
        return CUDA_ERROR_OUT_OF_MEMORY;
    (*out)->magic = GRAPH;
    return CUDA_SUCCESS;
}

static void node_free(CUgraphNode node)
{
    if (node->child)
        graph_destroy(node->child);
    if (node->memory)
        graph_memory_drop(node->memory);
    free(node->after);
    node->magic = 0;
    free(node);
}

void graph_destroy(CUgraph graph)
{
    for (size_t i = 0; i < graph->count; i++)
        node_free(graph->nodes[i]);
    free(graph->nodes);
    graph->magic = 0;
    free(graph);
}

CUresult node_depend(CUgraphNode node, CUgraphNode on)
{
    for (size_t i = 0; i < node->after_count; i++)
        if (node->after[i] == on)
            return CUDA_SUCCESS;
    CUgraphNode *more = realloc(node->after, (node->after_count + 1) * sizeof *more);
    if (!more)
        return CUDA_ERROR_OUT_OF_MEMORY;
    node->after = more;
    node->after[node->after_count++] = on;
    return CUDA_SUCCESS;
}

static CUresult append(CUgraph graph, CUgraphNode node)
{
    if (graph->count == graph->room) {
        size_t room = graph->room ? graph->room * 2 : 16;
        CUgraphNode *more = realloc(graph->nodes, room * sizeof *more);
        if (!more)
            return CUDA_ERROR_OUT_OF_MEMORY;
        graph->nodes = more;
        graph->room = room;
    }
    graph->nodes[graph->count++] = node;
    return CUDA_SUCCESS;
}

static bool in_graph(CUgraph graph, CUgraphNode node)
{
    return node && node->magic == NODE && node->graph == graph;
}

/* What a node holds besides its parameters. */
static CUresult prepare(CUgraphNode node)
{
    CUgraphNodeParams *parameters = &node->parameters;
    const CUDA_KERNEL_NODE_PARAMS *kernel = &parameters->kernel;
    struct device *device;
    switch ((int)parameters->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        return launch_check(function_of(kernel->func ? (void *)kernel->func : (void *)kernel->kern),
                            (unsigned[]){kernel->gridDimX, kernel->gridDimY, kernel->gridDimZ},
                            (unsigned[]){kernel->blockDimX, kernel->blockDimY, kernel->blockDimZ},
                            kernel->sharedMemBytes);
    case CU_GRAPH_NODE_TYPE_GRAPH:
        if (!parameters->graph.graph || parameters->graph.graph->magic != GRAPH)
            return CUDA_ERROR_INVALID_VALUE;
        if (parameters->graph.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE) {
            node->child = parameters->graph.graph;
            return CUDA_SUCCESS;
        }
        return graph_clone(parameters->graph.graph, &node->child);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        device = parameters->alloc.poolProps.location.type == CU_MEM_LOCATION_TYPE_DEVICE
                     ? device_of(parameters->alloc.poolProps.location.id)
                     : NULL;
        if (!device || !parameters->alloc.bytesize)
            return CUDA_ERROR_INVALID_VALUE;
        return graph_memory_create(device, parameters->alloc.bytesize, &node->memory, &parameters->alloc.dptr);
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
        node->memory = graph_memory_at(parameters->free.dptr);
        if (!node->memory)
            return CUDA_ERROR_INVALID_VALUE;
        graph_memory_share(node->memory);
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_HOST:
        return host_of(parameters)->fn ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        return *event_of(parameters) && (*event_of(parameters))->magic == EVENT ? CUDA_SUCCESS
                                                                                : CUDA_ERROR_INVALID_VALUE;
    case CU_GRAPH_NODE_TYPE_MEMCPY:
    case CU_GRAPH_NODE_TYPE_MEMSET:
    case CU_GRAPH_NODE_TYPE_EMPTY:
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

CUresult graph_add(CUgraph graph, const CUgraphNode *after, size_t count, const CUgraphNodeParams *parameters,
                   CUgraphNode *out)
{
    if (!graph || graph->magic != GRAPH || (count && !after))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if (!in_graph(graph, after[i]))
            return CUDA_ERROR_INVALID_VALUE;
    CUgraphNode node = calloc(1, sizeof *node);
    if (!node)
        return CUDA_ERROR_OUT_OF_MEMORY;
    node->magic = NODE;
    node->graph = graph;
    node->parameters = *parameters;
    CUresult result = prepare(node);
    for (size_t i = 0; !result && i < count; i++)
        result = node_depend(node, after[i]);
    if (!result)
        result = append(graph, node);
    if (result) {
        node_free(node);
        return result;
    }
    if (out)
        *out = node;
    return CUDA_SUCCESS;
}

/* A clone's nodes know what they are copies of; memory is not copied: it is the same in both. */
CUresult graph_clone(CUgraph from, CUgraph *out)
{
    CUresult result = graph_create(out);
    for (size_t i = 0; !result && i < from->count; i++) {
        CUgraphNode node = from->nodes[i], copy = calloc(1, sizeof *copy);
        if (!copy || append(*out, copy)) {
            free(copy);
            result = CUDA_ERROR_OUT_OF_MEMORY;
            break;
        }
        *copy = (struct CUgraphNode_st){
            .magic = NODE, .graph = *out, .parameters = node->parameters, .origin = node};
        node->copy = copy;
        if (node->child)
            result = graph_clone(node->child, &copy->child);
        if (node->memory)
            copy->memory = graph_memory_share(node->memory);
    }
    for (size_t i = 0; !result && i < from->count; i++)
        for (size_t j = 0; !result && j < from->nodes[i]->after_count; j++)
            result = node_depend(from->nodes[i]->copy, from->nodes[i]->after[j]->copy);
    if (result && *out)
        graph_destroy(*out);
    return result;
}

CUgraphNode *graph_order(CUgraph graph)
{
    CUgraphNode *order = calloc(graph->count + 1, sizeof *order);
    size_t done = 0;
    for (size_t i = 0; i < graph->count; i++)
        graph->nodes[i]->mark = 0;
    /* Nodes are seldom added before what they come after, so one pass mostly does. */
    for (bool progress = true; order && progress && done < graph->count;) {
        progress = false;
        for (size_t i = 0; i < graph->count; i++) {
            CUgraphNode node = graph->nodes[i];
            bool ready = !node->mark;
            for (size_t j = 0; ready && j < node->after_count; j++)
                ready = node->after[j]->mark;
            if (ready) {
                node->mark = 1;
                order[done++] = node;
                progress = true;
            }
        }
    }
    if (order && done == graph->count)
        return order;
    free(order);
    return NULL;
}

/* ---- the graph as a whole -------------------------------------------------------------------------------------- */

#define GRAPH_OF(graph) \
    READY(); \
    LOCKED; \
    if (!(graph) || (graph)->magic != GRAPH) \
    return CUDA_ERROR_INVALID_VALUE

#define NODE_OF(node) \
    READY(); \
    LOCKED; \
    if (!(node) || (node)->magic != NODE) \
    return CUDA_ERROR_INVALID_VALUE

CALL(cuGraphCreate, 10000, cuGraphCreate, CUgraph *out, unsigned int flags)
{
    READY();
    return out && !flags ? graph_create(out) : CUDA_ERROR_INVALID_VALUE;
}

CALL(cuGraphDestroy, 10000, cuGraphDestroy, CUgraph graph)
{
    GRAPH_OF(graph);
    graph_destroy(graph);
    return CUDA_SUCCESS;
}

/* Fills a list of the caller's as far as it goes, or only says how long it would have to be. */
static CUresult give_list(CUgraphNode *out, size_t *room, CUgraphNode *list, size_t count)
{
    if (!room)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; out && i < *room; i++)
        out[i] = i < count ? list[i] : NULL;
    *room = count;
    return CUDA_SUCCESS;
}

CALL(cuGraphGetNodes, 10000, cuGraphGetNodes, CUgraph graph, CUgraphNode *out, size_t *room)
{
    GRAPH_OF(graph);
    return give_list(out, room, graph->nodes, graph->count);
}

CALL(cuGraphNodeGetType, 10000, cuGraphNodeGetType, CUgraphNode node, CUgraphNodeType *type)
{
    NODE_OF(node);
    if (!type)
        return CUDA_ERROR_INVALID_VALUE;
    *type = node->parameters.type;
    return CUDA_SUCCESS;
}
