/* Prints the parsed content of a machine file: sim_machine FILE. */
#include "../simulated/machine.h"

#include <stdio.h>
#include <string.h>

int main(int argc, char **argv)
{
    static char text[65536];
    static struct machine machine;
    char reason[512];
    FILE *file = argc == 2 ? fopen(argv[1], "r") : NULL;
    if (!file)
        return 2;
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    if (!machine_parse(text, &machine, reason, sizeof reason)) {
        puts(reason);
        return 1;
    }
    printf("driver %s cuda %d kernel %llu\n", machine.driver, machine.cuda_version,
           (unsigned long long)machine.kernel_ns);
    for (unsigned i = 0; i < machine.count; i++) {
        const struct machine_device *device = &machine.devices[i];
        printf("%s|%s|%llu|%llu|%u|%u.%u|%d|%u|", device->uuid, device->name,
               (unsigned long long)(device->memory_bytes / MACHINE_MIB),
               (unsigned long long)(device->context_bytes / MACHINE_MIB), device->sm_count, device->major,
               device->minor, device->parent, device->ordinal);
        for (unsigned j = 0; j < sizeof device->uuid_bytes; j++)
            printf("%02x", device->uuid_bytes[j]);
        puts("");
    }
    return 0;
}
