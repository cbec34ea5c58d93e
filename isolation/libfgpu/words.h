/* The words of the sessions that share a device, in files: README.md, "Compute that is lent". Apart from what uses it,
 * so that the tests of throttle.c bring words of their own. */
#ifndef FGPU_WORDS_H
#define FGPU_WORDS_H

#include "lending.h"

/* Says that the session has work now. False: it cannot be said, so nothing may be lent. */
bool fgpu_say_busy(int device, uint64_t now);

/* Reads what all say. */
void fgpu_read_words(int device, struct lending *lending, uint64_t now);

#endif
