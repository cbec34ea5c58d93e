/* Adding nodes of each type, and asking for and changing what they do. */
#include "cuda_driver.h"

#include <string.h>

static CUresult add(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
                    CUgraphNodeParams *parameters)
{
    READY();
    LOCKED;
    CUgraphNode node = NULL;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = graph_add(graph, after, count, parameters, &node);
    if (!result)
        *out = node;
    return result;
}

/* A node of this type, or an error. */
#define NODE_OF(node, wanted) \
    READY(); \
    LOCKED; \
    if (!(node) || (node)->magic != NODE || (node)->parameters.type != (wanted)) \
    return CUDA_ERROR_INVALID_VALUE

/* ---- by the type in the parameters ------------------------------------------------------------------------ */

static CUresult add_any(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
                        CUgraphNodeParams *parameters)
{
    if (!parameters)
        return CUDA_ERROR_INVALID_VALUE;
    if (parameters->type == CU_GRAPH_NODE_TYPE_MEMCPY || parameters->type == CU_GRAPH_NODE_TYPE_MEMSET)
        return CUDA_ERROR_NOT_SUPPORTED;
    CUresult result = add(out, graph, after, count, parameters);
    if (!result && parameters->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
        parameters->alloc.dptr = (*out)->parameters.alloc.dptr;
    return result;
}

CALL(cuGraphAddNode, 12020, cuGraphAddNode, CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
     CUgraphNodeParams *parameters)
{
    return add_any(out, graph, after, count, parameters);
}

CALL(cuGraphAddNode, 12030, cuGraphAddNode_v2, CUgraphNode *out, CUgraph graph, const CUgraphNode *after,
     const CUgraphEdgeData *data, size_t count, CUgraphNodeParams *parameters)
{
    (void)data;
    return add_any(out, graph, after, count, parameters);
}

CALL(cuGraphAddNode, 13040, cuGraphAddNode_v3, CUgraphNode *out, CUgraph graph, const CUgraphNode *after,
     const CUgraphEdgeData *data, size_t count, CUgraphNodeParams *parameters)
{
    (void)data;
    return add_any(out, graph, after, count, parameters);
}

static bool changeable(CUgraphNodeType type)
{
    return type == CU_GRAPH_NODE_TYPE_KERNEL || type == CU_GRAPH_NODE_TYPE_MEMCPY ||
           type == CU_GRAPH_NODE_TYPE_MEMSET || type == CU_GRAPH_NODE_TYPE_HOST ||
           type == CU_GRAPH_NODE_TYPE_WAIT_EVENT || type == CU_GRAPH_NODE_TYPE_EVENT_RECORD;
}

static CUresult change(CUgraphNode node, const CUgraphNodeParams *parameters)
{
    if (!node || node->magic != NODE || !parameters || parameters->type != node->parameters.type)
        return CUDA_ERROR_INVALID_VALUE;
    if (!changeable(parameters->type))
        return CUDA_ERROR_NOT_SUPPORTED;
    if (parameters->type == CU_GRAPH_NODE_TYPE_KERNEL && !function_of(parameters->kernel.func))
        return CUDA_ERROR_INVALID_VALUE;
    node->parameters = *parameters;
    return CUDA_SUCCESS;
}

/* The node of an executable graph that was made from this one. */
static CUgraphNode in_exec(CUgraphExec exec, CUgraphNode node)
{
    if (!exec || exec->magic != GRAPH_EXEC)
        return NULL;
    for (size_t i = 0; i < exec->graph->count; i++)
        if (exec->graph->nodes[i]->origin == node)
            return exec->graph->nodes[i];
    return NULL;
}

/* ---- kernels ------------------------------------------------------------------------------------------------- */

static CUgraphNodeParams kernel_v1(const CUDA_KERNEL_NODE_PARAMS_v1 *kernel)
{
    CUgraphNodeParams parameters = {.type = CU_GRAPH_NODE_TYPE_KERNEL};
    memcpy(&parameters.kernel, kernel, sizeof *kernel);
    return parameters;
}

static CUgraphNodeParams kernel_v2(const CUDA_KERNEL_NODE_PARAMS *kernel)
{
    CUgraphNodeParams parameters = {.type = CU_GRAPH_NODE_TYPE_KERNEL};
    parameters.kernel = *kernel;
    return parameters;
}

#define KERNEL_NODES(version, v, type, convert) \
    CALL(cuGraphAddKernelNode, version, cuGraphAddKernelNode##v, CUgraphNode *out, CUgraph graph, \
         const CUgraphNode *after, size_t count, const type *kernel) \
    { \
        CUgraphNodeParams parameters = {0}; \
        if (!kernel) \
            return CUDA_ERROR_INVALID_VALUE; \
        parameters = convert(kernel); \
        return add(out, graph, after, count, &parameters); \
    } \
    CALL(cuGraphExecKernelNodeSetParams, version, cuGraphExecKernelNodeSetParams##v, CUgraphExec exec, \
         CUgraphNode node, const type *kernel) \
    { \
        READY(); \
        LOCKED; \
        CUgraphNodeParams parameters = {0}; \
        if (!kernel) \
            return CUDA_ERROR_INVALID_VALUE; \
        parameters = convert(kernel); \
        return change(in_exec(exec, node), &parameters); \
    }

KERNEL_NODES(10000, , CUDA_KERNEL_NODE_PARAMS_v1, kernel_v1)
KERNEL_NODES(12000, _v2, CUDA_KERNEL_NODE_PARAMS, kernel_v2)

/* ---- other graphs ------------------------------------------------------------------------------------------- */

CALL(cuGraphAddChildGraphNode, 10000, cuGraphAddChildGraphNode, CUgraphNode *out, CUgraph graph,
     const CUgraphNode *after, size_t count, CUgraph child)
{
    CUgraphNodeParams parameters = {.type = CU_GRAPH_NODE_TYPE_GRAPH};
    parameters.graph.graph = child;
    return add(out, graph, after, count, &parameters);
}

CALL(cuGraphChildGraphNodeGetGraph, 10000, cuGraphChildGraphNodeGetGraph, CUgraphNode node, CUgraph *out)
{
    NODE_OF(node, CU_GRAPH_NODE_TYPE_GRAPH);
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = node->child;
    return CUDA_SUCCESS;
}

/* ---- memory --------------------------------------------------------------------------------------------------------- */

CALL(cuGraphAddMemAllocNode, 11040, cuGraphAddMemAllocNode, CUgraphNode *out, CUgraph graph, const CUgraphNode *after,
     size_t count, CUDA_MEM_ALLOC_NODE_PARAMS *memory)
{
    CUgraphNodeParams parameters = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC};
    if (!memory)
        return CUDA_ERROR_INVALID_VALUE;
    parameters.alloc = *memory;
    CUresult result = add_any(out, graph, after, count, &parameters);
    if (!result)
        memory->dptr = parameters.alloc.dptr;
    return result;
}

CALL(cuGraphMemAllocNodeGetParams, 11040, cuGraphMemAllocNodeGetParams, CUgraphNode node,
     CUDA_MEM_ALLOC_NODE_PARAMS *out)
{
    NODE_OF(node, CU_GRAPH_NODE_TYPE_MEM_ALLOC);
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = node->parameters.alloc;
    return CUDA_SUCCESS;
}

CALL(cuGraphAddMemFreeNode, 11040, cuGraphAddMemFreeNode, CUgraphNode *out, CUgraph graph, const CUgraphNode *after,
     size_t count, CUdeviceptr address)
{
    CUgraphNodeParams parameters = {.type = CU_GRAPH_NODE_TYPE_MEM_FREE};
    parameters.free.dptr = address;
    return add(out, graph, after, count, &parameters);
}
