/* A hash table with open addressing. Keys are addresses and handles, among them multiples of large powers of two. */
#include "parts.h"

#include <stdlib.h>

static size_t place_of(const struct fgpu_holdings *holdings, uint64_t key) {
    return (size_t)((key * UINT64_C(0x9e3779b97f4a7c15)) >> 32) & (holdings->capacity - 1);
}

/* The place of this key, or the free one for it. */
static struct fgpu_holding *find_place(const struct fgpu_holdings *holdings, uint64_t key) {
    size_t place = place_of(holdings, key);
    while (holdings->places[place].key != 0 && holdings->places[place].key != key)
        place = (place + 1) & (holdings->capacity - 1);
    return &holdings->places[place];
}

static bool grow(struct fgpu_holdings *holdings) {
    struct fgpu_holdings larger = {.capacity = holdings->capacity ? holdings->capacity * 2 : 256};
    larger.places = calloc(larger.capacity, sizeof *larger.places);
    if (larger.places == NULL)
        return false;
    for (size_t i = 0; i < holdings->capacity; i++)
        if (holdings->places[i].key != 0)
            *find_place(&larger, holdings->places[i].key) = holdings->places[i];
    larger.count = holdings->count;
    free(holdings->places);
    *holdings = larger;
    return true;
}

bool fgpu_put(struct fgpu_holdings *holdings, struct fgpu_holding holding, struct fgpu_holding *before) {
    if (holdings->count * 2 >= holdings->capacity && !grow(holdings))
        return false;
    struct fgpu_holding *place = find_place(holdings, holding.key);
    *before = *place;
    holdings->count += place->key == 0;
    *place = holding;
    return true;
}

struct fgpu_holding *fgpu_get(const struct fgpu_holdings *holdings, uint64_t key) {
    struct fgpu_holding *place = holdings->capacity == 0 || key == 0 ? NULL : find_place(holdings, key);
    return place == NULL || place->key == 0 ? NULL : place;
}

bool fgpu_remove(struct fgpu_holdings *holdings, uint64_t key, struct fgpu_holding *out) {
    struct fgpu_holding *found = fgpu_get(holdings, key);
    if (found == NULL)
        return false;
    *out = *found;
    /* Move up the holdings behind the gap: a search ends at the first free place. */
    size_t gap = (size_t)(found - holdings->places), place = gap, mask = holdings->capacity - 1;
    for (;;) {
        place = (place + 1) & mask;
        struct fgpu_holding *next = &holdings->places[place];
        if (next->key == 0)
            break;
        if (((place - place_of(holdings, next->key)) & mask) >= ((place - gap) & mask)) {
            holdings->places[gap] = *next;
            gap = place;
        }
    }
    holdings->places[gap] = (struct fgpu_holding){0};
    holdings->count--;
    return true;
}
