/* A session's account of GPU time on one device, shared by its processes. "Entitled" is the time inside its slots,
 * "used" the time in which its work kept the device busy; the balance is the difference.
 *
 * Used is a union: time in which two processes or streams keep the device busy together counts once. Otherwise a
 * session of two processes would pay twice, as each also measures the other's kernels between its own. The union is
 * stored as one bit for each 100 us of the last 134 ms; the process that sets a bit pays for it. Work reported later
 * than that is paid for in full.
 *
 * Only atomics, and each step leaves the account valid: processes are killed at any instant. */
#ifndef FGPU_ACCOUNT_H
#define FGPU_ACCOUNT_H

#include "slots.h"

#include <stdatomic.h>

enum { ACCOUNT_USED, ACCOUNT_PAID, ACCOUNT_LENT }; /* words; two only grow: the time ever charged, and the lent time */

#define ACCOUNT_GRAIN_NS UINT64_C(100000)
#define ACCOUNT_GRAINS 48 /* in one word, above a 16-bit tag of the turn of the ring */
#define ACCOUNT_FIRST_WORD 4 /* before: used, paid, lent */
#define ACCOUNT_WORDS 28

/* The most that is ever owed: a kernel of many minutes must not lock its session out for hours. */
#define ACCOUNT_MOST_OWED_NS UINT64_C(60000000000)

/* Returns the balance in nanoseconds, negative if time is owed; `entitled` is slots_entitled(). It starts at zero and,
 * when the slots change, is kept within one period's slots. Unused time is kept up to half a period's slots: enough to
 * make up for the wasted end of a slot, too little to hoard. */
int64_t account_balance(struct fgpu_time_account *account, const struct slots *slots, uint64_t entitled);

/* Used time is compared with the entitlement since the beginning of time, which depends on the slots' size. The upper 8
 * bits hold that size in hundredths, so both change at once; the lower bits hold two years. A process that finds
 * another size converts the sum to its own; one that does not know the newest limits yet does so once or twice. */
#define ACCOUNT_SUM_BITS 56

/* The fast path for most launches, which need no change; false: call account_balance(). */
static inline bool account_balance_now(struct fgpu_time_account *account, const struct slots *slots, uint64_t entitled,
                                       int64_t *balance) {
    uint64_t used = atomic_load_explicit(&account->words[ACCOUNT_USED], memory_order_relaxed);
    *balance = (int64_t)((entitled - used) << (64 - ACCOUNT_SUM_BITS)) >> (64 - ACCOUNT_SUM_BITS);
    return used != 0 && used >> ACCOUNT_SUM_BITS == slots->hundredths &&
           *balance <= (int64_t)(slots->per_period / 2) && *balance >= -(int64_t)ACCOUNT_MOST_OWED_NS;
}

/* Pays in advance for work that is expected to take `time`: other processes see it at once, and it stays paid if this
 * process is killed. */
void account_deposit(struct fgpu_time_account *account, uint64_t time);

/* Charges the time from start to end, not later than now, in which the device was busy with the session's work, less
 * the deposit for it. Returns what was charged: less if other processes had paid for a part. */
uint64_t account_pay(struct fgpu_time_account *account, uint64_t start, uint64_t end, uint64_t now, uint64_t deposit);

/* The same for lent time: it is counted and costs nothing. */
void account_was_lent(struct fgpu_time_account *account, uint64_t start, uint64_t end, uint64_t now);

#endif
