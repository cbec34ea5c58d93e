/* Linking: PTX is put together as it is, of anything else every name is taken to be there. */
#include "cuda_driver.h"

#include <elf.h>
#include <stdlib.h>
#include <string.h>

struct CUlinkState_st {
    char *text;
    size_t length;
    bool opaque;
};

enum { INPUT_PTX = 1 };

static const uint32_t anything[4] = {0xba55ed50u, 1, 0, 0}; /* a fatbin's first words */

static CUresult create(CUlinkState *out)
{
    CURRENT(context);
    (void)context;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = calloc(1, sizeof **out);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult add(CUlinkState state, int type, const void *data, size_t size)
{
    READY();
    if (!state || !data || !size)
        return CUDA_ERROR_INVALID_VALUE;
    if (type != INPUT_PTX) {
        state->opaque = true;
        return CUDA_SUCCESS;
    }
    char *more = realloc(state->text, state->length + size + 2);
    if (!more)
        return CUDA_ERROR_OUT_OF_MEMORY;
    state->text = more;
    memcpy(state->text + state->length, data, size);
    state->length += strnlen(state->text + state->length, size);
    state->text[state->length++] = '\n';
    state->text[state->length] = 0;
    return CUDA_SUCCESS;
}

CALL(cuLinkCreate, 5050, cuLinkCreate, unsigned int count, CUjit_option *options, void **values, CUlinkState *out)
{
    (void)count, (void)options, (void)values;
    return create(out);
}

CALL(cuLinkCreate, 6050, cuLinkCreate_v2, unsigned int count, CUjit_option *options, void **values, CUlinkState *out)
{
    (void)count, (void)options, (void)values;
    return create(out);
}

CALL(cuLinkAddData, 5050, cuLinkAddData, CUlinkState state, int type, void *data, size_t size, const char *name,
     unsigned int count, CUjit_option *options, void **values)
{
    (void)name, (void)count, (void)options, (void)values;
    return add(state, type, data, size);
}

CALL(cuLinkAddData, 6050, cuLinkAddData_v2, CUlinkState state, int type, void *data, size_t size, const char *name,
     unsigned int count, CUjit_option *options, void **values)
{
    (void)name, (void)count, (void)options, (void)values;
    return add(state, type, data, size);
}

/* What a library file holds is not looked at. */
static CUresult add_file(CUlinkState state, const char *name)
{
    READY();
    if (!state || !name)
        return CUDA_ERROR_INVALID_VALUE;
    state->opaque = true;
    return CUDA_SUCCESS;
}

CALL(cuLinkAddFile, 5050, cuLinkAddFile, CUlinkState state, int type, const char *name, unsigned int count,
     CUjit_option *options, void **values)
{
    (void)type, (void)count, (void)options, (void)values;
    return add_file(state, name);
}

CALL(cuLinkAddFile, 6050, cuLinkAddFile_v2, CUlinkState state, int type, const char *name, unsigned int count,
     CUjit_option *options, void **values)
{
    (void)type, (void)count, (void)options, (void)values;
    return add_file(state, name);
}

CALL(cuLinkComplete, 5050, cuLinkComplete, CUlinkState state, void **out, size_t *size)
{
    READY();
    if (!state || !out || (!state->text && !state->opaque))
        return CUDA_ERROR_INVALID_VALUE;
    bool text = state->text && !state->opaque;
    *out = text ? (void *)state->text : (void *)(uintptr_t)anything;
    if (size)
        *size = text ? state->length + 1 : sizeof anything;
    return CUDA_SUCCESS;
}

CALL(cuLinkDestroy, 5050, cuLinkDestroy, CUlinkState state)
{
    READY();
    if (!state)
        return CUDA_ERROR_INVALID_VALUE;
    free(state->text);
    free(state);
    return CUDA_SUCCESS;
}
