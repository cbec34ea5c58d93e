/* Decides who gets lent compute; lending.h explains it. */
#include "lending.h"

#define HUNDREDTH_NS (SLOTS_PERIOD_NS / 100)
#define CELL ((unsigned)(LENDING_GRANT_NS / HUNDREDTH_NS)) /* hundredths */
#define CELLS ((100 + CELL - 1) / CELL) /* in a period; the last one is shorter */
#define QUIET ((int32_t)(3 * CELLS)) /* words are renewed once a period, so it had no work for at least two */
#define COUNTS_FROM 2

_Static_assert(LENDING_GRANT_NS % HUNDREDTH_NS == 0, "cells are whole hundredths");

/* Cells are counted in 32 bits, which wrap after 190 days: a time more than half of that back looks like the future,
 * and means nothing either. */
static uint32_t cell_of(uint64_t moment) {
    return (uint32_t)(moment / SLOTS_PERIOD_NS * CELLS + moment % SLOTS_PERIOD_NS / LENDING_GRANT_NS);
}

static uint32_t since(uint64_t word) {
    return (uint32_t)(word >> 32);
}

static uint64_t joined(uint32_t first, uint32_t last) {
    return (uint64_t)first << 32 | last;
}

/* It had work within the last two or three periods. */
static bool is_awake(uint64_t word, uint32_t cell) {
    return word != 0 && (int32_t)(cell - (uint32_t)word) <= QUIET;
}

/* And all readers know it. */
static bool counts(uint64_t word, uint32_t cell) {
    return is_awake(word, cell) && (int32_t)(cell - since(word)) >= COUNTS_FROM;
}

uint64_t lending_word(uint64_t before, uint64_t now) {
    uint32_t cell = cell_of(now);
    bool goes_on = is_awake(before, cell) && (int32_t)(cell - (uint32_t)before) >= 0;
    return joined(goes_on ? since(before) : cell, cell);
}

void lending_hear(struct lending *lending, unsigned number, uint64_t word, uint64_t now) {
    uint32_t cell = cell_of(now), last = (uint32_t)word;
    uint64_t before = lending->words[number];
    if ((int32_t)(last - cell) > (int32_t)CELLS) /* others may write during our reading, but not that much later */
        word = 0;
    else if (word != 0 && (int32_t)(last - since(word)) < 0)
        word = joined(last, last);
    if (is_awake(before, cell) && (int32_t)(cell - (uint32_t)before) >= 0) {
        bool later = word != 0 && (int32_t)(last - (uint32_t)before) > 0;
        word = joined(since(before), later ? last : (uint32_t)before);
    }
    lending->words[number] = word;
}

uint64_t lending_word_unread(uint64_t now) {
    uint32_t cell = cell_of(now);
    return joined(cell - CELLS, cell);
}

bool lending_alone(const struct lending *lending, uint64_t now) {
    uint32_t cell = cell_of(now);
    for (unsigned n = 1; n <= LENDING_SLICES; n++)
        if (n != lending->own && is_awake(lending->words[n], cell))
            return false;
    for (unsigned n = 0; n < 100; n++)
        if (lending->owner[n] == LENDING_KEPT)
            return false;
    return true;
}

static bool is_lent(const struct lending *lending, unsigned hundredth, uint32_t cell) {
    unsigned owner = lending->owner[hundredth];
    return owner <= LENDING_SLICES && !counts(lending->words[owner], cell);
}

/* The session whose turn it is in the nth lendable cell of the period; 0: none. */
static unsigned turn(const struct lending *lending, uint32_t cell, uint64_t nth) {
    unsigned takers[LENDING_SLICES], count = 0;
    for (unsigned n = 1; n <= LENDING_SLICES; n++)
        if (counts(lending->words[n], cell))
            takers[count++] = n;
    return count == 0 ? 0 : takers[nth % count];
}

/* How many cells before this one have something to lend, and how many of their hundredths are this session's. */
static uint64_t cells_before(const struct lending *lending, unsigned within, uint32_t cell, uint64_t period,
                             unsigned *own_before) {
    uint64_t lent_cells = 0;
    *own_before = 0;
    for (unsigned n = 0; n < within; n++) {
        unsigned lent = 0;
        for (unsigned h = n * CELL; h < (n + 1) * CELL; h++)
            lent += is_lent(lending, h, cell);
        if (lent > 0 && lending->most < 100 && turn(lending, cell, lent_cells + period) == lending->own)
            *own_before += lent;
        lent_cells += lent > 0;
    }
    return lent_cells;
}

struct lending_stretch lending_at(const struct lending *lending, uint64_t moment, bool ahead) {
    uint32_t cell = cell_of(moment);
    uint64_t period = moment / SLOTS_PERIOD_NS, begin = period * SLOTS_PERIOD_NS;
    unsigned hundredth = (unsigned)((moment - begin) / HUNDREDTH_NS), within = hundredth / CELL, own_before;
    unsigned first = within * CELL, last = first + CELL < 100 ? first + CELL : 100;
    uint64_t lent_cells = cells_before(lending, within, cell, period, &own_before);
    bool own_turn = turn(lending, cell, lent_cells + period) == lending->own;
    unsigned room = lending->most - lending->slots, given = own_before;
    struct lending_stretch stretch = {false, begin + last * HUNDREDTH_NS};
    for (unsigned h = first; h < last; h++) {
        bool lent = own_turn && lending->owner[h] != lending->own && is_lent(lending, h, cell);
        lent = lent && given++ < room && !(ahead && is_awake(lending->words[lending->owner[h]], cell));
        if (h <= hundredth)
            stretch.lent = lent;
        else if (lent != stretch.lent)
            return (struct lending_stretch){stretch.lent, begin + h * HUNDREDTH_NS};
    }
    return stretch;
}

uint64_t lending_next(const struct lending *lending, uint64_t from, uint64_t to) {
    while (from < to) {
        struct lending_stretch stretch = lending_at(lending, from, true);
        if (stretch.lent)
            return from;
        from = stretch.end;
    }
    return to;
}
