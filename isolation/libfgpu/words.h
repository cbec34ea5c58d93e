/* The words of the sessions that share a device, in files: README.md, "Compute that is lent". A separate file, so that
 * the tests of throttle.c can replace it. */
#ifndef FGPU_WORDS_H
#define FGPU_WORDS_H

#include "lending.h"

/* Writes that the session has work now. False: it cannot be written, so nothing may be borrowed. */
bool fgpu_say_busy(int device, uint64_t now);

/* Reads all words. */
void fgpu_read_words(int device, struct lending *lending, uint64_t now);

#endif
