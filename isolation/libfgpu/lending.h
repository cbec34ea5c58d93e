/* Lent compute: the times, beside its own slots, in which a session may use a device. Pure arithmetic on the clock and
 * on what was read of the neighbours; README.md, "Compute that is lent", has the idea.
 *
 * 1. Each session with a slice of the device has a number there, and a word that only it writes: since when it has
 *    work, and when it last said so. A session that has written nothing for two to three periods is quiet; its slots
 *    are lent, and so are slots without an owner.
 * 2. The period is divided into cells of 4 ms. The lent part of a cell is one grant, for one of the sessions with work:
 *    the next one in each cell, starting with another one in each period.
 * 3. All sessions read the same words, so all know who has a grant, and no two can claim it.
 *
 * What a session can achieve with its word: if it claims work without having any, it keeps its slots and wastes its own
 * grants. If it writes nothing, it lends its slots and gets nothing. A word of a killed session, or one from the
 * future, means nothing after three periods at most; one that was read torn is right at the next reading. While a word
 * changes, two sessions may read it differently, so a session takes part from the second cell after it began to have
 * work, when all have read it. */
#ifndef FGPU_LENDING_H
#define FGPU_LENDING_H

#include "slots.h"

#define LENDING_GRANT_NS UINT64_C(4000000)
#define LENDING_READ_AGAIN_NS UINT64_C(1000000)
#define LENDING_OVER_NS UINT64_C(250000) /* a kernel may end this long after its grant; its session pays for that */
#define LENDING_SLICES 100 /* numbers from 1 on */
#define LENDING_KEPT 255 /* owner of a hundredth that is not lent */

struct lending {
    unsigned own; /* the session's number; 0: it does not lend here */
    unsigned most; /* hundredths of each period that it may have at most */
    unsigned slots; /* hundredths of its own */
    uint64_t read_at; /* when the following was read; 0: never */
    uint8_t owner[100];
    uint64_t words[LENDING_SLICES + 1];
};

/* The word after `before` of a session that has work now. */
uint64_t lending_word(uint64_t before, uint64_t now);

/* Enters the word read for a number; call it for all numbers each time, with 0 for unused ones. Impossible words mean
 * nothing. A session that had work counts as having work for three periods, so that it cannot show different words to
 * different neighbours. */
void lending_hear(struct lending *lending, unsigned number, uint64_t word, uint64_t now);

/* The word that stands for one that cannot be read: the session may have work. */
uint64_t lending_word_unread(uint64_t now);

/* No other session has work now, or a share that it does not lend. */
bool lending_alone(const struct lending *lending, uint64_t now);

/* Whether the device is lent to this session at that time, and until when at least that holds. `ahead`: the time is in
 * the future, and an owner that has just come back gets its slots at once; otherwise what was lent then counts. */
struct lending_stretch {
    bool lent;
    uint64_t end;
};
struct lending_stretch lending_at(const struct lending *lending, uint64_t moment, bool ahead);

/* The first time in [from, to) that is lent to it; otherwise `to`. */
uint64_t lending_next(const struct lending *lending, uint64_t from, uint64_t to);

#endif
