/* Compute that is lent: which moments of a device are a session's beside its own slots. Pure arithmetic on the clock and
 * on what was read of the neighbours; README.md, "Compute that is lent", has the idea.
 *
 * Each session with a slice of the device has a number there, and a word that only it writes: since when it has work, and
 * when it said so last. Who has said nothing for two to three periods is quiet, and its slots are lent, as are those that
 * nobody has. The period is cut into cells of 4 ms; the lent part of a cell is one grant, and goes to one of those who
 * have work: the next one in each cell, another first one in each period. All read the same words, so all know whose
 * it is, and there is nothing that two could claim.
 *
 * What a word can do. Who says that it has work without having any keeps its slots and wastes its own grants. Who says
 * nothing lends its own slots and gets nothing. A word that nobody renews any more (of a killed session) and one of the
 * future say nothing, after three periods at most; one that was read torn is true again when it is read next. Two may
 * read differently while a word changes: so a session counts from the second cell after it began to have work, when all
 * have read it. */
#ifndef FGPU_LENDING_H
#define FGPU_LENDING_H

#include "slots.h"

#define LENDING_GRANT_NS UINT64_C(4000000)
#define LENDING_READ_AGAIN_NS UINT64_C(1000000)
#define LENDING_OVER_NS UINT64_C(250000) /* a kernel may end so long after its grant: its session pays for it */
#define LENDING_SLICES 100 /* numbers from 1 on */
#define LENDING_KEPT 255   /* the owner of a hundredth that is not lent */

struct lending {
    unsigned own;  /* the session's number; 0: nothing is lent here */
    unsigned most; /* hundredths of each period that it may have at all */
    unsigned slots; /* hundredths that are its own */
    uint64_t read_at; /* 0: never. What follows was read then */
    uint8_t owner[100];
    uint64_t words[LENDING_SLICES + 1];
};

/* The word that follows `before`, of a session that has work now. */
uint64_t lending_word(uint64_t before, uint64_t now);

/* What the word of a number was found to be, now: all of them each time, and 0 of those that nobody has. What cannot be
 * true says nothing, and who had work goes on having it for three periods, so that nobody can show some that it has work
 * and others that it has none. */
void lending_hear(struct lending *lending, unsigned number, uint64_t word, uint64_t now);

/* The word of a session whose word cannot be read: that it has work, as it may. */
uint64_t lending_word_unread(uint64_t now);

/* Nobody else has work now, nor a share that is not lent. */
bool lending_alone(const struct lending *lending, uint64_t now);

/* Whether the device is lent to this session at that moment, and until when that stays so, at least. `ahead`: the moment
 * is yet to come, and an owner who has just come back has its slots at once; otherwise it counts what was lent then. */
struct lending_stretch {
    bool lent;
    uint64_t end;
};
struct lending_stretch lending_at(const struct lending *lending, uint64_t moment, bool ahead);

/* The first moment in [from, to) that is lent to it; else `to`. */
uint64_t lending_next(const struct lending *lending, uint64_t from, uint64_t to);

#endif
