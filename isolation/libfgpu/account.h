/* A session's account of GPU time on one device, shared by its processes. Entitled is the time inside its slots, used
 * the time in which its work kept the device busy; the balance is the difference.
 *
 * Used is a union: while two processes or two streams keep the device busy together, that time is used once. Otherwise
 * a session of two processes would pay twice, as each sees the other's kernels between its own. The union is kept as
 * one bit for each 100 us of the last 134 ms. Whoever sets a bit pays for it. What is reported later than that is paid
 * for in full.
 *
 * Only atomics, and each step leaves the account valid: processes are killed at any instant. */
#ifndef FGPU_ACCOUNT_H
#define FGPU_ACCOUNT_H

#include "slots.h"

#include <stdatomic.h>

enum { ACCOUNT_USED, ACCOUNT_PAID, ACCOUNT_LENT }; /* words; two only grow: what was ever charged, and what was lent */

#define ACCOUNT_GRAIN_NS UINT64_C(100000)
#define ACCOUNT_GRAINS 48 /* in one word, above a 16-bit tag that says of which time */
#define ACCOUNT_FIRST_WORD 4 /* before: used, paid, lent */
#define ACCOUNT_WORDS 28

/* More than this is never owed: a kernel of many minutes may not lock its session out for hours. */
#define ACCOUNT_MOST_OWED_NS UINT64_C(60000000000)

/* The balance in nanoseconds, negative when something is owed, with what slots_entitled() says. It begins with nothing,
 * and stays what it was when the slots change, to a period's slots. What was not used is kept up to half a period's slots: enough to make up for what
 * a slot's end wasted, too little to hoard. */
int64_t account_balance(struct fgpu_time_account *account, const struct slots *slots, uint64_t entitled);

/* Used is compared with what was entitled to since the beginning of time: another time by slots of another size. How many
 * hundredths that size is stands in its upper 8 bits, so that both change at once; the lower ones hold two years. Whoever
 * finds another size than its own says it anew by its own; who has not learnt of the newest yet does so once or twice. */
#define ACCOUNT_SUM_BITS 56

/* The same where nothing need be changed, as for most launches; false: ask account_balance(). */
static inline bool account_balance_now(struct fgpu_time_account *account, const struct slots *slots, uint64_t entitled,
                                       int64_t *balance) {
    uint64_t used = atomic_load_explicit(&account->words[ACCOUNT_USED], memory_order_relaxed);
    *balance = (int64_t)((entitled - used) << (64 - ACCOUNT_SUM_BITS)) >> (64 - ACCOUNT_SUM_BITS);
    return used != 0 && used >> ACCOUNT_SUM_BITS == slots->hundredths &&
           *balance <= (int64_t)(slots->per_period / 2) && *balance >= -(int64_t)ACCOUNT_MOST_OWED_NS;
}

/* Pays in advance for work that is expected to take so long: other processes see it at once, and if this one is killed,
 * it is paid for. */
void account_deposit(struct fgpu_time_account *account, uint64_t time);

/* The device was busy with the session's work from start to end, not later than now; the deposit for it counts. Returns
 * what was paid: less where others had paid. */
uint64_t account_pay(struct fgpu_time_account *account, uint64_t start, uint64_t end, uint64_t now, uint64_t deposit);

/* The same in a time that was lent: it is counted, and costs nothing. */
void account_was_lent(struct fgpu_time_account *account, uint64_t start, uint64_t end, uint64_t now);

#endif
