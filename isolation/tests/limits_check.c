/* Parses limits files: repeatedly reads a length (4 bytes) and that number of bytes from standard input, and writes a
 * line for each: "bad REASON", or "good " and the limits as a limits file with semicolons for newlines. */
#include "fgpu.h"

#include <stdio.h>
#include <stdlib.h>

/* Without a region there is nowhere to write it. */
void fgpu_say_behind(bool behind) {
    (void)behind;
}

static void print_slots(const struct fgpu_device *device) {
    for (unsigned i = 0; i < device->slot_count; i++)
        printf("%s%u-%u", i ? "," : "", device->slots[i].from, device->slots[i].to);
    fputs(device->slot_count ? "" : "-", stdout);
    if (device->lending != 0)
        printf(" lending=%u most_percent=%u", device->lending, device->most_percent);
    if (device->counts_code)
        printf(" code_mib=%llu", (unsigned long long)(device->code_bytes / FGPU_MIB));
    putchar(';');
}

static void print_limits(const struct fgpu_limits *limits) {
    printf("good fgpu-limits 1;session=%llu;managed=%s;", (unsigned long long)limits->session,
           limits->managed_refused ? "refuse" : "charge");
    for (unsigned i = 0; i < limits->device_count; i++) {
        const struct fgpu_device *device = &limits->devices[i];
        if (device->compute != (device->slot_count > 0 && device->compute_percent < 100))
            abort();
        printf("device=%s memory_mib=%llu device_mib=%llu context_mib=%llu compute_percent=%u mode=memory%s slots=",
               device->uuid, (unsigned long long)(device->memory_bytes / FGPU_MIB),
               (unsigned long long)(device->device_bytes / FGPU_MIB),
               (unsigned long long)(device->context_bytes / FGPU_MIB), device->compute_percent,
               device->slot_count ? "+compute" : "");
        print_slots(device);
    }
    puts("end;");
}

int main(void) {
    uint32_t size;
    while (fread(&size, sizeof size, 1, stdin) == 1) {
        char *text = malloc(size); /* of exactly this size, so that AddressSanitizer detects a read beyond it */
        if (size > 0 && fread(text, size, 1, stdin) != 1)
            return 2;
        struct fgpu_limits limits;
        char reason[256], *short_reason = malloc(16);
        if (fgpu_limits_parse(text, size, &limits, reason, sizeof reason))
            print_limits(&limits);
        else
            printf("bad %s\n", reason);
        fgpu_limits_parse(text, size, &limits, short_reason, 16);
        free(short_reason);
        free(text);
    }
    return 0;
}
