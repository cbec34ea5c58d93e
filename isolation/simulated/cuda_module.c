/* Modules and libraries: which functions and variables an image has. Of PTX and of cubins that is read; in a fatbin
 * (often compressed) every name is taken to be there. */
#include "cuda_driver.h"

#include <ctype.h>
#include <elf.h>
#include <stdlib.h>
#include <string.h>

#define FATBIN 0xba55ed50u
#define FATBIN_WRAPPER 0x466243b1u

struct variable {
    char *name;
    size_t bytes;
    CUdeviceptr address;
    struct variable *next;
};

struct CUmod_st {
    CUcontext context; /* NULL: a library's */
    CUlibrary library;
    const struct machine_device *on; /* its code takes memory of this; NULL: it was loaded without a context */
    bool any_name;
    struct CUfunc_st *functions;
    struct variable *variables;
    struct CUmod_st *next;
};

struct CUlib_st {
    enum magic magic;
    CUmodule module;
};

static CUmodule modules; /* under the driver's lock */

struct CUfunc_st *function_of(void *handle)
{
    struct CUfunc_st *function = handle;
    return function && function->magic == FUNCTION ? function : NULL;
}

/* ---- what a name says ------------------------------------------------------------------------------------------ */

static uint64_t duration_of(const char *name)
{
    for (const char *at = strstr(name, "spin_"); at; at = strstr(at + 1, "spin_")) {
        char *end;
        if (!isdigit((unsigned char)at[5]))
            continue;
        unsigned long long number = strtoull(at + 5, &end, 10);
        uint64_t unit = !strncmp(end, "us", 2) ? 1000 : !strncmp(end, "ms", 2) ? 1000000 : 0;
        if (unit && number <= 3600000000u)
            return number * unit;
    }
    return machine->kernel_ns;
}

static struct CUfunc_st *add_function(CUmodule module, const char *name, size_t length)
{
    struct CUfunc_st *function = calloc(1, sizeof *function);
    if (!function || !(function->name = strndup(name, length))) {
        free(function);
        return NULL;
    }
    function->magic = FUNCTION;
    function->module = module;
    function->duration_ns = duration_of(function->name);
    function->attributes[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK] = 1024;
    function->attributes[CU_FUNC_ATTRIBUTE_NUM_REGS] = 32;
    function->attributes[CU_FUNC_ATTRIBUTE_PTX_VERSION] = 90;
    function->attributes[CU_FUNC_ATTRIBUTE_BINARY_VERSION] = 90;
    function->attributes[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES] = 49152;
    function->next = module->functions;
    module->functions = function;
    return function;
}

/* ---- PTX ---------------------------------------------------------------------------------------------------------- */

static size_t name_length(const char *text)
{
    size_t length = 0;
    while (isalnum((unsigned char)text[length]) || text[length] == '_' || text[length] == '$' || text[length] == '%')
        length++;
    return length;
}

static size_t type_bytes(const char *type, size_t length)
{
    const char *digits = type + length;
    while (digits > type && isdigit((unsigned char)digits[-1]))
        digits--;
    int bits = digits < type + length ? atoi(digits) : 0;
    return bits >= 8 ? (size_t)bits / 8 : 0;
}

/* ".align 8 .b8 name[16]": what follows .global or .const. */
static bool declaration(const char *at, const char **name, size_t *length, size_t *bytes)
{
    size_t element = 0;
    for (;;) {
        at += strspn(at, " \t\r\n");
        if (*at != '.')
            break;
        size_t word = 1 + name_length(at + 1);
        if (word == 6 && !strncmp(at, ".align", 6)) {
            at += 6 + strcspn(at + 6, "0123456789");
            at += strspn(at, "0123456789");
            continue;
        }
        if (type_bytes(at, word))
            element = type_bytes(at, word);
        at += word;
    }
    *name = at;
    *length = name_length(at);
    at += *length;
    *bytes = element;
    at += strspn(at, " \t");
    while (*at == '[') {
        char *end;
        unsigned long count = strtoul(at + 1, &end, 10);
        *bytes *= count ? count : 1;
        at = *end == ']' ? end + 1 : end;
        at += strspn(at, " \t");
    }
    return *length && element;
}

static bool word_at(const char *text, const char *word)
{
    size_t length = strlen(word);
    return !strncmp(text, word, length) && isspace((unsigned char)text[length]);
}

static void read_variable(CUmodule module, const char *text)
{
    const char *name;
    size_t length, bytes;
    struct variable *variable;
    if (!declaration(text, &name, &length, &bytes) || !(variable = calloc(1, sizeof *variable)))
        return;
    variable->name = strndup(name, length);
    variable->bytes = bytes;
    variable->next = module->variables;
    module->variables = variable;
}

static CUresult read_ptx(CUmodule module, const char *text)
{
    if (!strstr(text, ".version") && !strstr(text, ".entry"))
        return (CUresult)218; /* CUDA_ERROR_INVALID_PTX */
    unsigned braces = 0;
    for (; *text; text++) {
        if (text[0] == '/' && text[1] == '/') {
            text += strcspn(text, "\n");
            if (!*text)
                break;
        }
        braces += *text == '{';
        braces -= *text == '}' && braces;
        if (*text != '.' || braces)
            continue;
        if (word_at(text, ".entry")) {
            const char *name = text + 6 + strspn(text + 6, " \t\r\n");
            add_function(module, name, name_length(name));
        } else if (word_at(text, ".global") || word_at(text, ".const")) {
            read_variable(module, text + name_length(text + 1) + 1);
        }
    }
    return CUDA_SUCCESS;
}

/* ---- cubins --------------------------------------------------------------------------------------------------------- */

/* Each function is a section of its own, ".text." and its name. */
static CUresult read_cubin(CUmodule module, const unsigned char *image)
{
    Elf64_Ehdr header;
    memcpy(&header, image, sizeof header);
    if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_shentsize != sizeof(Elf64_Shdr) ||
        header.e_shstrndx >= header.e_shnum)
        return CUDA_ERROR_INVALID_IMAGE;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(const void *)(image + header.e_shoff);
    const char *names = (const char *)image + sections[header.e_shstrndx].sh_offset;
    for (unsigned i = 0; i < header.e_shnum; i++) {
        const char *name = names + sections[i].sh_name;
        if (!strncmp(name, ".text.", 6))
            add_function(module, name + 6, strlen(name + 6));
    }
    return CUDA_SUCCESS;
}

static CUresult read_image(CUmodule module, const void *image)
{
    uint32_t word;
    memcpy(&word, image, sizeof word);
    if (word == FATBIN_WRAPPER || word == FATBIN) {
        module->any_name = true;
        return CUDA_SUCCESS;
    }
    if (!memcmp(image, ELFMAG, SELFMAG))
        return read_cubin(module, image);
    const unsigned char *text = image;
    if (!isprint(text[0]) && !isspace(text[0]))
        return CUDA_ERROR_INVALID_IMAGE;
    return read_ptx(module, image);
}

/* ---- modules ----------------------------------------------------------------------------------------------------------- */

static void unload(CUmodule module)
{
    for (struct CUfunc_st *function = module->functions, *next; function; function = next) {
        next = function->next;
        function->magic = 0;
        free(function->name);
        free(function);
    }
    for (struct variable *variable = module->variables, *next; variable; variable = next) {
        next = variable->next;
        struct range *range = variable->address ? range_at(variable->address) : NULL;
        if (range) {
            range_remove(range);
            addresses_release(variable->address, variable->bytes);
        }
        free(variable->name);
        free(variable);
    }
    for (CUmodule *place = &modules; *place; place = &(*place)->next)
        if (*place == module) {
            *place = module->next;
            break;
        }
    if (module->on)
        ledger_give(module->on, module->on->code_bytes);
    free(module);
}

static CUresult load(CUmodule *out, const void *image, CUcontext context)
{
    CUcontext current;
    if (!out || !image)
        return CUDA_ERROR_INVALID_VALUE;
    CUmodule module = calloc(1, sizeof *module);
    if (!module)
        return CUDA_ERROR_OUT_OF_MEMORY;
    module->context = context;
    LOCKED;
    CUresult result = read_image(module, image);
    if (!result && !current_context(&current) && current->device->machine->code_bytes) {
        if (ledger_take(current->device->machine, current->device->machine->code_bytes))
            module->on = current->device->machine;
        else
            result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result) {
        unload(module);
        return result;
    }
    module->next = modules;
    modules = module;
    *out = module;
    return CUDA_SUCCESS;
}

void modules_of_context_unload(CUcontext context)
{
    for (CUmodule module = modules, next; module; module = next) {
        next = module->next;
        if (module->context == context)
            unload(module);
    }
}

CALL(cuModuleLoadData, 2000, cuModuleLoadData, CUmodule *out, const void *image)
{
    CURRENT(context);
    return load(out, image, context);
}

CALL(cuModuleLoadDataEx, 2010, cuModuleLoadDataEx, CUmodule *out, const void *image, unsigned int count,
     CUjit_option *options, void **values)
{
    (void)count, (void)options, (void)values;
    CURRENT(context);
    return load(out, image, context);
}

/* Looked for rather than looked at: it may be gone. */
static bool is_module(CUmodule module)
{
    CUmodule known = modules;
    while (known && known != module)
        known = known->next;
    return known && module;
}

#define MODULE_OF(module) \
    CURRENT(context); \
    (void)context; \
    LOCKED; \
    if (!is_module(module)) \
    return CUDA_ERROR_INVALID_HANDLE

CALL(cuModuleUnload, 2000, cuModuleUnload, CUmodule module)
{
    MODULE_OF(module);
    if (!module->context)
        return CUDA_ERROR_NOT_PERMITTED;
    unload(module);
    return CUDA_SUCCESS;
}

static CUresult get_function(struct CUfunc_st **out, CUmodule module, const char *name)
{
    if (!out || !name)
        return CUDA_ERROR_INVALID_VALUE;
    struct CUfunc_st *function = module->functions;
    while (function && strcmp(function->name, name) != 0)
        function = function->next;
    if (!function && module->any_name)
        function = add_function(module, name, strlen(name));
    if (!function)
        return CUDA_ERROR_NOT_FOUND;
    *out = function;
    return CUDA_SUCCESS;
}

static CUresult get_variable(CUdeviceptr *out, size_t *bytes, CUmodule module, const char *name)
{
    CURRENT(context);
    struct variable *variable = module->variables;
    if (!name || (!out && !bytes))
        return CUDA_ERROR_INVALID_VALUE;
    while (variable && strcmp(variable->name, name) != 0)
        variable = variable->next;
    if (!variable)
        return CUDA_ERROR_NOT_FOUND;
    if (!variable->address) {
        CUdeviceptr address = addresses_reserve(variable->bytes, false);
        struct range *range = address ? range_add(address, variable->bytes, REGISTERED, context) : NULL;
        if (!range)
            return CUDA_ERROR_OUT_OF_MEMORY;
        range->context = NULL; /* goes with its module */
        variable->address = address;
    }
    if (out)
        *out = variable->address;
    if (bytes)
        *bytes = variable->bytes;
    return CUDA_SUCCESS;
}

CALL(cuModuleGetFunction, 2000, cuModuleGetFunction, CUfunction *out, CUmodule module, const char *name)
{
    MODULE_OF(module);
    return get_function(out, module, name);
}

CALL(cuModuleGetGlobal, 3020, cuModuleGetGlobal_v2, CUdeviceptr *out, size_t *bytes, CUmodule module, const char *name)
{
    MODULE_OF(module);
    return get_variable(out, bytes, module, name);
}

/* ---- functions ------------------------------------------------------------------------------------------------------------ */

#define FUNCTION_OF(variable, handle) \
    READY(); \
    struct CUfunc_st *variable = function_of(handle); \
    if (!variable) \
        return CUDA_ERROR_INVALID_HANDLE

static CUresult get_attribute(int *out, int attribute, void *handle)
{
    FUNCTION_OF(function, handle);
    if (!out || attribute < 0 || attribute >= 16)
        return CUDA_ERROR_INVALID_VALUE;
    *out = function->attributes[attribute];
    return CUDA_SUCCESS;
}

static CUresult set_attribute(int attribute, int value, void *handle)
{
    FUNCTION_OF(function, handle);
    if (attribute < CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || attribute >= 16 ||
        (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && (value < 0 || value > 232448)))
        return CUDA_ERROR_INVALID_VALUE;
    function->attributes[attribute] = value;
    return CUDA_SUCCESS;
}

CALL(cuFuncGetAttribute, 2020, cuFuncGetAttribute, int *out, CUfunction_attribute attribute, CUfunction function)
{
    return get_attribute(out, (int)attribute, function);
}

CALL(cuFuncSetAttribute, 9000, cuFuncSetAttribute, CUfunction function, CUfunction_attribute attribute, int value)
{
    return set_attribute((int)attribute, value, function);
}

/* ---- libraries: modules of no context, whose kernels are functions everywhere --------------------------------------------- */

static CUresult load_library(CUlibrary *out, const void *image)
{
    READY();
    if (!out || !image)
        return CUDA_ERROR_INVALID_VALUE;
    CUlibrary library = calloc(1, sizeof *library);
    if (!library)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = load(&library->module, image, NULL);
    if (result) {
        free(library);
        return result;
    }
    library->magic = LIBRARY;
    library->module->library = library;
    *out = library;
    return CUDA_SUCCESS;
}

CALL(cuLibraryLoadData, 12000, cuLibraryLoadData, CUlibrary *out, const void *image, CUjit_option *jit,
     void **jit_values, unsigned int jit_count, CUlibraryOption *options, void **values, unsigned int count)
{
    (void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    return load_library(out, image);
}

#define LIBRARY_OF(library) \
    READY(); \
    if (!(library) || (library)->magic != LIBRARY) \
        return CUDA_ERROR_INVALID_HANDLE; \
    LOCKED

CALL(cuLibraryUnload, 12000, cuLibraryUnload, CUlibrary library)
{
    LIBRARY_OF(library);
    unload(library->module);
    library->magic = 0;
    free(library);
    return CUDA_SUCCESS;
}

CALL(cuLibraryGetKernel, 12000, cuLibraryGetKernel, CUkernel *out, CUlibrary library, const char *name)
{
    LIBRARY_OF(library);
    return get_function((struct CUfunc_st **)(void *)out, library->module, name);
}

CALL(cuLibraryGetGlobal, 12000, cuLibraryGetGlobal, CUdeviceptr *out, size_t *bytes, CUlibrary library,
     const char *name)
{
    LIBRARY_OF(library);
    return get_variable(out, bytes, library->module, name);
}

CALL(cuKernelGetFunction, 12000, cuKernelGetFunction, CUfunction *out, CUkernel kernel)
{
    CURRENT(context);
    (void)context;
    FUNCTION_OF(function, kernel);
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = function;
    return CUDA_SUCCESS;
}

CALL(cuKernelGetAttribute, 12000, cuKernelGetAttribute, int *out, CUfunction_attribute attribute, CUkernel kernel,
     CUdevice device)
{
    (void)device;
    return get_attribute(out, (int)attribute, kernel);
}

CALL(cuKernelSetAttribute, 12000, cuKernelSetAttribute, CUfunction_attribute attribute, int value, CUkernel kernel,
     CUdevice device)
{
    (void)device;
    return set_attribute((int)attribute, value, kernel);
}
