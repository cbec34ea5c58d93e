/* Stream capture: work put into a graph instead of being run, and what is forbidden during it. */
#include "cuda_driver.h"

#include <stdlib.h>
#include <string.h>

struct capture {
    CUstream origin;
    CUgraph graph;
    size_t first; /* the graph's nodes before it began */
    CUstreamCaptureMode mode;
    pthread_t thread;
    bool invalid, owned; /* whether the graph is its own */
    CUstream *members;   /* the streams that take part */
    size_t count, room;
    unsigned users; /* those, and events recorded in it */
    struct capture *next;
};

static struct capture *captures; /* under the driver's lock */
static _Atomic(unsigned) active;
PER_THREAD CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

/* ---- what is forbidden ------------------------------------------------------------------------------------ */

CUresult capture_forbids(CUstream stream)
{
    if (!stream->capture)
        return CUDA_SUCCESS;
    LOCKED;
    if (stream->capture)
        stream->capture->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

/* A call that may wait for anything breaks the captures that it might wait for: this thread's, and those of others
 * that were begun for all threads. */
CUresult capture_forbids_unsafe(void)
{
    if (!atomic_load_explicit(&active, memory_order_relaxed) || thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_SUCCESS;
    LOCKED;
    CUresult result = CUDA_SUCCESS;
    for (struct capture *capture = captures; capture; capture = capture->next) {
        bool own = pthread_equal(capture->thread, pthread_self()) && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
        bool all = capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (own || all) {
            capture->invalid = true;
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    return result;
}

CUresult capture_forbids_legacy(CUcontext context)
{
    if (!atomic_load_explicit(&active, memory_order_relaxed))
        return CUDA_SUCCESS;
    LOCKED;
    CUresult result = CUDA_SUCCESS;
    for (struct capture *capture = captures; capture; capture = capture->next)
        if (capture->origin && capture->origin->context == context &&
            !(capture->origin->flags & CU_STREAM_NON_BLOCKING)) {
            capture->invalid = true;
            result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
    return result;
}

CALL(cuThreadExchangeStreamCaptureMode, 10010, cuThreadExchangeStreamCaptureMode, CUstreamCaptureMode *mode)
{
    READY();
    if (!mode || (unsigned)*mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    CUstreamCaptureMode was = thread_mode;
    thread_mode = *mode;
    *mode = was;
    return CUDA_SUCCESS;
}

/* ---- streams in a capture ------------------------------------------------------------------------------------- */

static CUresult place(CUstream stream, const CUgraphNode *behind, size_t count)
{
    CUgraphNode *list = malloc((count + 1) * sizeof *list);
    if (!list)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (count)
        memcpy(list, behind, count * sizeof *list);
    free(stream->behind);
    stream->behind = list;
    stream->behind_count = count;
    return CUDA_SUCCESS;
}

static CUresult place_also(CUstream stream, const CUgraphNode *behind, size_t count)
{
    size_t room = stream->behind_count + count, together = stream->behind_count;
    CUgraphNode *list = malloc((room + 1) * sizeof *list);
    if (!list)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (together)
        memcpy(list, stream->behind, together * sizeof *list);
    for (size_t i = 0; i < count; i++) {
        bool there = false;
        for (size_t j = 0; j < together; j++)
            there = there || list[j] == behind[i];
        if (!there)
            list[together++] = behind[i];
    }
    CUresult result = place(stream, list, together);
    free(list);
    return result;
}

static void put_down(struct capture *capture)
{
    if (--capture->users)
        return;
    free(capture->members);
    free(capture);
}

static void leave(CUstream stream)
{
    struct capture *capture = stream->capture;
    free(stream->behind);
    stream->behind = NULL;
    stream->behind_count = 0;
    stream->capture = NULL;
    for (size_t i = 0; i < capture->count; i++)
        if (capture->members[i] == stream)
            capture->members[i--] = capture->members[--capture->count];
    put_down(capture);
}

static CUresult join(CUstream stream, struct capture *capture)
{
    if (capture->count == capture->room) {
        CUstream *more = realloc(capture->members, (capture->room * 2 + 4) * sizeof *more);
        if (!more)
            return CUDA_ERROR_OUT_OF_MEMORY;
        capture->members = more;
        capture->room = capture->room * 2 + 4;
    }
    capture->members[capture->count++] = stream;
    capture->users++;
    stream->capture = capture;
    return place(stream, NULL, 0);
}

/* No stream takes part any longer. */
static void end(struct capture *capture)
{
    for (struct capture **at = &captures; *at; at = &(*at)->next)
        if (*at == capture) {
            *at = capture->next;
            break;
        }
    atomic_fetch_sub(&active, 1);
    capture->invalid = true;
    capture->origin = NULL;
    capture->users++;
    while (capture->count)
        leave(capture->members[0]);
    put_down(capture);
}

void capture_stream_gone(CUstream stream)
{
    struct capture *capture = stream->capture;
    if (!capture)
        return;
    capture->invalid = true;
    if (capture->origin != stream) {
        leave(stream);
        return;
    }
    if (capture->owned)
        graph_destroy(capture->graph);
    end(capture);
}

CUresult capture_add(CUstream stream, CUgraphNodeParams *parameters, CUgraphNode *out)
{
    CUgraphNode node = NULL;
    LOCKED;
    struct capture *capture = stream->capture;
    if (!capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    CUresult result = graph_add(capture->graph, stream->behind, stream->behind_count, parameters, &node);
    if (!result)
        result = place(stream, &node, 1);
    if (result)
        capture->invalid = true;
    else if (out)
        *out = node;
    return result;
}

CUresult capture_event(CUevent event, CUstream stream)
{
    LOCKED;
    if (stream->capture->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    CUgraphNode *list = malloc((stream->behind_count + 1) * sizeof *list);
    if (!list)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (stream->behind_count)
        memcpy(list, stream->behind, stream->behind_count * sizeof *list);
    capture_event_forget(event);
    event->behind = list;
    event->behind_count = stream->behind_count;
    event->capture = stream->capture;
    event->capture->users++;
    return CUDA_SUCCESS;
}

void capture_event_forget(CUevent event)
{
    if (event->capture)
        put_down(event->capture);
    free(event->behind);
    event->capture = NULL;
    event->behind = NULL;
    event->behind_count = 0;
}

/* Waiting for an event of a capture takes a stream into it. */
CUresult capture_wait(CUstream stream, CUevent event, unsigned flags, bool *handled)
{
    if (!stream->capture && !event->capture)
        return CUDA_SUCCESS;
    *handled = true;
    LOCKED;
    if (stream->capture && flags & CU_EVENT_WAIT_EXTERNAL) {
        CUgraphNodeParams parameters = {.type = CU_GRAPH_NODE_TYPE_WAIT_EVENT};
        *event_of(&parameters) = event;
        return capture_add(stream, &parameters, NULL);
    }
    if (!event->capture) {
        stream->capture->invalid = true;
        return (CUresult)905; /* CUDA_ERROR_STREAM_CAPTURE_ISOLATION */
    }
    if (!event->capture->origin || event->capture->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (stream->capture && stream->capture != event->capture) {
        stream->capture->invalid = event->capture->invalid = true;
        return (CUresult)902; /* CUDA_ERROR_STREAM_CAPTURE_MERGE */
    }
    if (stream->legacy)
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    CUresult result = stream->capture ? CUDA_SUCCESS : join(stream, event->capture);
    return result ? result : place_also(stream, event->behind, event->behind_count);
}

/* ---- beginning and ending ----------------------------------------------------------------------------------------- */

static CUresult begin(CUstream handle, bool per_thread, CUstreamCaptureMode mode, CUgraph graph,
                      const CUgraphNode *behind, size_t count)
{
    CUstream stream;
    CUresult result = stream_of(handle, per_thread, &stream);
    if (result)
        return result;
    if ((unsigned)mode > CU_STREAM_CAPTURE_MODE_RELAXED || (count && !behind))
        return CUDA_ERROR_INVALID_VALUE;
    if (stream->legacy)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    LOCKED;
    if (stream->capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    struct capture *capture = calloc(1, sizeof *capture);
    const bool owned = !graph;
    if (!capture || (owned && graph_create(&graph))) {
        free(capture);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *capture = (struct capture){.origin = stream,
                                .graph = graph,
                                .first = graph->count,
                                .owned = owned,
                                .mode = mode,
                                .thread = pthread_self(),
                                .next = captures};
    captures = capture;
    atomic_fetch_add(&active, 1);
    result = join(stream, capture);
    return result ? result : place(stream, behind, count);
}

STREAMED(cuStreamBeginCapture, 10000, cuStreamBeginCapture, _ptsz, (CUstream stream), (stream))
{
    return begin(stream, per_thread, CU_STREAM_CAPTURE_MODE_GLOBAL, NULL, NULL, 0);
}

STREAMED(cuStreamBeginCapture, 10010, cuStreamBeginCapture_v2, _ptsz, (CUstream stream, CUstreamCaptureMode mode),
         (stream, mode))
{
    return begin(stream, per_thread, mode, NULL, NULL, 0);
}

STREAMED(cuStreamBeginCaptureToGraph, 12030, cuStreamBeginCaptureToGraph, _ptsz,
         (CUstream stream, CUgraph graph, const CUgraphNode *behind, const CUgraphEdgeData *data, size_t count,
          CUstreamCaptureMode mode),
         (stream, graph, behind, data, count, mode))
{
    (void)data;
    if (!graph || graph->magic != GRAPH)
        return CUDA_ERROR_INVALID_VALUE;
    return begin(stream, per_thread, mode, graph, behind, count);
}

/* Whether every stream's work leads to where the capture ends. */
static bool joined(struct capture *capture)
{
    CUgraph graph = capture->graph;
    for (size_t i = 0; i < graph->count; i++)
        graph->nodes[i]->mark = 0;
    for (size_t i = 0; i < graph->count; i++)
        for (size_t j = 0; j < graph->nodes[i]->after_count; j++)
            graph->nodes[i]->after[j]->mark = 1;
    for (size_t i = 0; i < capture->origin->behind_count; i++)
        capture->origin->behind[i]->mark = 1;
    for (size_t i = capture->first; i < graph->count; i++)
        if (!graph->nodes[i]->mark)
            return false;
    return true;
}

STREAMED(cuStreamEndCapture, 10000, cuStreamEndCapture, _ptsz, (CUstream handle, CUgraph *out), (handle, out))
{
    CUstream stream;
    CUresult result = stream_of(handle, per_thread, &stream);
    if (result)
        return result;
    LOCKED;
    struct capture *capture = stream->capture;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream) {
        capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    }
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && !pthread_equal(capture->thread, pthread_self()))
        return (CUresult)908; /* CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD */
    *out = NULL;
    if (capture->invalid)
        result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    else if (!joined(capture))
        result = (CUresult)904; /* CUDA_ERROR_STREAM_CAPTURE_UNJOINED */
    if (!result)
        *out = capture->graph;
    else if (capture->owned)
        graph_destroy(capture->graph);
    end(capture);
    return result;
}

/* ---- asking ------------------------------------------------------------------------------------------------------- */

STREAMED(cuStreamIsCapturing, 10000, cuStreamIsCapturing, _ptsz, (CUstream handle, CUstreamCaptureStatus *out),
         (handle, out))
{
    CUstream stream;
    CUresult result = stream_of(handle, per_thread, &stream);
    if (result || !out)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    *out = !stream->capture           ? CU_STREAM_CAPTURE_STATUS_NONE
           : stream->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                      : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
}
