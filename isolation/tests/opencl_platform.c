/* An OpenCL platform without devices, as a vendor's library, with the functions that loaders call. NAME is the
 * platform's. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SUCCESS 0
#define DEVICE_NOT_FOUND (-1)
#define INVALID_VALUE (-30)
#define EXTENSIONS 0x0904
#define SUFFIX 0x0920
#define FUNCTIONS 256 /* more than the table of any version has */

struct platform {
    void *const *functions;
};

int clGetPlatformInfo(struct platform *platform, unsigned what, size_t room, void *value, size_t *size);
int clIcdGetPlatformIDsKHR(unsigned room, struct platform **platforms, unsigned *count);
void *clGetExtensionFunctionAddress(const char *name);

/* Loaders put platforms with devices first. */
static int no_devices(struct platform *platform, uint64_t kind, unsigned room, void **devices, unsigned *count) {
    (void)platform, (void)kind, (void)room, (void)devices;
    if (count != NULL)
        *count = 0;
    return DEVICE_NOT_FOUND;
}

static void *const functions[FUNCTIONS] = {(void *)clIcdGetPlatformIDsKHR, (void *)clGetPlatformInfo,
                                           (void *)no_devices};
static struct platform only = {functions};

int clGetPlatformInfo(struct platform *platform, unsigned what, size_t room, void *value, size_t *size) {
    const char *words = what == EXTENSIONS ? "cl_khr_icd" : what == SUFFIX ? "TEST" : NAME;
    size_t needed = strlen(words) + 1;
    (void)platform;
    if (value != NULL && room < needed)
        return INVALID_VALUE;
    if (value != NULL)
        memcpy(value, words, needed);
    if (size != NULL)
        *size = needed;
    return SUCCESS;
}

int clIcdGetPlatformIDsKHR(unsigned room, struct platform **platforms, unsigned *count) {
    if (platforms != NULL && room > 0)
        platforms[0] = &only;
    if (count != NULL)
        *count = 1;
    return SUCCESS;
}

void *clGetExtensionFunctionAddress(const char *name) {
    return strcmp(name, "clIcdGetPlatformIDsKHR") == 0 ? (void *)clIcdGetPlatformIDsKHR
           : strcmp(name, "clGetPlatformInfo") == 0    ? (void *)clGetPlatformInfo
                                                       : NULL;
}
