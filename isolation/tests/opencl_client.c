/* What a program finds of OpenCL:
 *     opencl_client platforms LIBRARY       the names of the platforms of this OpenCL loader, one in each line
 *     opencl_client find WAY LIBRARY        whether a vendor's function is found: by its "handle", by "all", or by this
 *     version */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define NAME 0x0902

static int list(void *loader) {
    int (*platforms)(unsigned, void **, unsigned *) = dlsym(loader, "clGetPlatformIDs");
    int (*information)(void *, unsigned, size_t, void *, size_t *) = dlsym(loader, "clGetPlatformInfo");
    void *found[16];
    unsigned count = 0;
    if (platforms == NULL || information == NULL)
        return 2;
    platforms(16, found, &count); /* "there is none" is an error too */
    for (unsigned n = 0; n < count && n < 16; n++) {
        char name[64];
        if (information(found[n], NAME, sizeof name, name, NULL) != 0)
            return 3;
        puts(name);
    }
    return 0;
}

int main(int argc, char **argv) {
    void *library = dlopen(argv[argc - 1], RTLD_NOW | RTLD_GLOBAL);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 4;
    }
    if (strcmp(argv[1], "platforms") == 0)
        return list(library);
    static const char name[] = "clGetExtensionFunctionAddress";
    void *found = strcmp(argv[2], "all") == 0         ? dlsym(RTLD_DEFAULT, name)
                  : strcmp(argv[2], "handle") == 0 ? dlsym(library, name)
                                                   : dlvsym(library, name, argv[2]);
    puts(found != NULL ? "found" : dlerror());
    return 0;
}
