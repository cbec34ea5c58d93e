/* How functions are found, and what errors are called. */
#include "cuda_driver.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern const struct call __start_cuda_calls[], __stop_cuda_calls[];

/* The newest variant of a function that a program built for `version` knows. */
static CUresult find(const char *name, void **out, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status)
{
    if (!name || !out || flags > CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM)
        return CUDA_ERROR_INVALID_VALUE;
    const struct call *best = NULL;
    bool known = false;
    for (const struct call *call = __start_cuda_calls; call < __stop_cuda_calls; call++) {
        if (strcmp(call->name, name) != 0)
            continue;
        known = true;
        if (call->version > version || (call->per_thread && flags != CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM))
            continue;
        /* A per-thread variant goes before the others of its version and of older ones. */
        if (!best || call->version > best->version || (call->version == best->version && call->per_thread) ||
            (call->per_thread && !best->per_thread && best->version < 7000))
            best = call;
    }
    *out = best ? best->address : NULL;
    if (status)
        *status = best    ? CU_GET_PROC_ADDRESS_SUCCESS
                  : known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                          : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS;
}

CALL(cuGetProcAddress, 11030, cuGetProcAddress, const char *name, void **out, int version, cuuint64_t flags)
{
    CUresult result = find(name, out, version, flags, NULL);
    /* The first version has no status, and tells by its result. The second one tells nothing where no status is asked
     * for: drivers 535 and 555 do so. */
    return result == CUDA_SUCCESS && *out == NULL ? CUDA_ERROR_NOT_FOUND : result;
}

CALL(cuGetProcAddress, 12000, cuGetProcAddress_v2, const char *name, void **out, int version, cuuint64_t flags,
     CUdriverProcAddressQueryResult *status)
{
    return find(name, out, version, flags, status);
}

/* The tables behind it are NVIDIA's own: who needs them needs NVIDIA's driver. This one, under a name that NVIDIA has not,
 * is for what runtimes do with theirs: as there, it begins with its size. */
static const struct {
    size_t bytes;
    CUresult (*retain_primary)(CUcontext *, CUdevice);
} own_table = {sizeof own_table, primary_retain_by_table};
static const char own_table_id[17] = "fgpu-simulated-1";

/* CUDA's runtime asks for such a table first of all, and then only says "error 500: named symbol not found". */
static void say_why(void)
{
    static const char words[] = "fgpu: This GPU is simulated: programs that use CUDA's runtime (PyTorch, CuPy, TensorFlow) "
                                "need a real GPU and fail here with error 500.\n";
    static _Atomic(bool) said;
    if (!atomic_exchange(&said, true) && write(STDERR_FILENO, words, sizeof words - 1) < 0)
        return; /* there is no standard error */
}

CALL(cuGetExportTable, 3000, cuGetExportTable, const void **table, const CUuuid *id)
{
    if (!table)
        return CUDA_ERROR_INVALID_VALUE;
    bool own = id && memcmp(id->bytes, own_table_id, sizeof id->bytes) == 0;
    *table = own ? &own_table : NULL;
    if (!own)
        say_why();
    return own ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CALL(cuDriverGetVersion, 2020, cuDriverGetVersion, int *version)
{
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    const struct machine *loaded = machine_load();
    *version = loaded ? loaded->cuda_version : 13000;
    return CUDA_SUCCESS;
}

static const struct {
    int error;
    const char *name, *text;
} errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {205, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {206, "CUDA_ERROR_UNMAP_FAILED", "unmapping of buffer object failed"},
    {208, "CUDA_ERROR_ALREADY_MAPPED", "resource already mapped"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {211, "CUDA_ERROR_NOT_MAPPED", "resource not mapped"},
    {215, "CUDA_ERROR_UNSUPPORTED_LIMIT", "limit is not supported on this architecture"},
    {218, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {301, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
    {304, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {705, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled"},
    {708, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", "cannot set while device is active in this process"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {720, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in cooperative launch"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {902, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "operation would result in a merge of separate capture sequences"},
    {903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began"},
    {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {907, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"},
    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {909, "CUDA_ERROR_TIMEOUT", "wait operation timed out"},
    {910, "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE",
     "the graph update was not performed because it included changes which violated constraints"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static CUresult describe(CUresult error, const char **out, bool text)
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = NULL;
    for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == (int)error)
            *out = text ? errors[i].text : errors[i].name;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CALL(cuGetErrorName, 6000, cuGetErrorName, CUresult error, const char **name)
{
    return describe(error, name, false);
}

CALL(cuGetErrorString, 6000, cuGetErrorString, CUresult error, const char **text)
{
    return describe(error, text, true);
}
