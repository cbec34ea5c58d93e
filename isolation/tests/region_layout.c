/* Prints the layout of the region, for readers in other languages. */
#include "region.h"

#include <stdio.h>

int main(void) {
    printf("{\"REGION_BYTES\": %zu, \"MAGIC\": %llu, \"SLOTS\": %d, \"DEVICES\": %d, "
           "\"PEAK_OFFSET\": %zu, \"OWNER_OFFSET\": %zu, \"OWNER_BYTES\": %zu, \"CELL_OFFSET\": %zu, "
           "\"CELL_BYTES\": %zu}\n",
           sizeof(struct region), (unsigned long long)REGION_MAGIC, REGION_SLOTS, FGPU_MAX_DEVICES,
           offsetof(struct region, peak), offsetof(struct region, owner),
           sizeof(struct region_owner), offsetof(struct region, cell), sizeof(struct region_cell));
    return 0;
}
