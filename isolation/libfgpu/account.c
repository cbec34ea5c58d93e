/* The account of GPU time. account.h says what it is. */
#include "account.h"

#define WORD_NS (ACCOUNT_GRAIN_NS * ACCOUNT_GRAINS)
#define TAG_MASK UINT64_C(0xffff)

_Static_assert(ACCOUNT_FIRST_WORD + ACCOUNT_WORDS == sizeof(struct fgpu_time_account) / sizeof(uint64_t), "all words");
_Static_assert(WORD_NS * ACCOUNT_WORDS > 2 * SLOTS_PERIOD_NS, "what overlaps is seldom reported later");

static uint64_t tagged(const struct slots *slots, uint64_t sum) {
    return slots->hundredths << ACCOUNT_SUM_BITS | (sum & ((UINT64_C(1) << ACCOUNT_SUM_BITS) - 1));
}

int64_t account_balance(struct fgpu_time_account *account, const struct slots *slots, uint64_t entitled) {
    uint64_t used = atomic_load_explicit(&account->words[ACCOUNT_USED], memory_order_relaxed), most = slots->per_period / 2;
    for (;;) {
        /* Charged under slots of another size, until a time that is unknown here: the parts add up in proportion. */
        uint64_t size = used >> ACCOUNT_SUM_BITS;
        bool others = size != slots->hundredths;
        uint64_t since = others ? entitled / slots->hundredths * size : entitled;
        int64_t balance = (int64_t)((since - used) << (64 - ACCOUNT_SUM_BITS)) >> (64 - ACCOUNT_SUM_BITS), bounded = balance;
        if (__builtin_expect(used == 0, 0))
            bounded = 0;
        else if (balance > (int64_t)most)
            bounded = (int64_t)most;
        else if (balance < -(int64_t)ACCOUNT_MOST_OWED_NS)
            bounded = -(int64_t)ACCOUNT_MOST_OWED_NS;
        if (__builtin_expect(balance == bounded && !others, 1) ||
            atomic_compare_exchange_weak(&account->words[ACCOUNT_USED], &used, tagged(slots, entitled - (uint64_t)bounded)))
            return bounded;
    }
}

/* Sets the bits of one word, for a time `age` turns of the ring ago, and returns how many were not set. A word's own
 * age is only in its 16 bits: after 2.4 hours it looks young again. */
static unsigned mark(_Atomic(uint64_t) *word, uint64_t turn, uint64_t age, uint64_t bits) {
    uint64_t before = atomic_load_explicit(word, memory_order_relaxed), others;
    do {
        uint64_t word_age = (turn + age - before) & TAG_MASK;
        if (word_age < age) /* it already stands for a later time */
            return (unsigned)__builtin_popcountll(bits);
        others = word_age == age ? before >> 16 : 0;
    } while (!atomic_compare_exchange_weak(word, &before, (others | bits) << 16 | (turn & TAG_MASK)));
    return (unsigned)__builtin_popcountll(bits & ~others);
}

/* Marks the time as used, and returns how much of it was not. */
static uint64_t mark_all(struct fgpu_time_account *account, uint64_t start, uint64_t end, uint64_t now) {
    /* A grain counts if its middle is busy, so what is cut off at one end is added at the other. */
    uint64_t grain = (start + ACCOUNT_GRAIN_NS / 2) / ACCOUNT_GRAIN_NS;
    uint64_t end_grain = (end + ACCOUNT_GRAIN_NS / 2) / ACCOUNT_GRAIN_NS, paid = 0;
    uint64_t ring = ACCOUNT_GRAINS * (ACCOUNT_WORDS - 1);
    if (end_grain > grain + ring) { /* longer than the ring: other processes' bits of its beginning are gone */
        paid = end_grain - ring - grain;
        grain = end_grain - ring;
    }
    while (grain < end_grain) {
        uint64_t number = grain / ACCOUNT_GRAINS, last = (number + 1) * ACCOUNT_GRAINS;
        unsigned from = (unsigned)(grain % ACCOUNT_GRAINS);
        unsigned width = (unsigned)((end_grain < last ? end_grain : last) - grain);
        uint64_t bits = ((UINT64_C(1) << width) - 1) << from;
        uint64_t turn = number / ACCOUNT_WORDS, turn_now = now / WORD_NS / ACCOUNT_WORDS;
        uint64_t age = turn_now > turn ? turn_now - turn : 0;
        paid += mark(&account->words[ACCOUNT_FIRST_WORD + number % ACCOUNT_WORDS], turn, age, bits);
        grain += width;
    }
    return paid * ACCOUNT_GRAIN_NS;
}

uint64_t account_pay(struct fgpu_time_account *account, uint64_t start, uint64_t end, uint64_t now,
                     uint64_t deposit) {
    uint64_t paid = mark_all(account, start, end, now);
    atomic_fetch_add_explicit(&account->words[ACCOUNT_USED], paid - deposit, memory_order_relaxed);
    atomic_fetch_add_explicit(&account->words[ACCOUNT_PAID], paid, memory_order_relaxed);
    return paid;
}

void account_was_lent(struct fgpu_time_account *account, uint64_t start, uint64_t end, uint64_t now) {
    atomic_fetch_add_explicit(&account->words[ACCOUNT_LENT], mark_all(account, start, end, now), memory_order_relaxed);
}

void account_deposit(struct fgpu_time_account *account, uint64_t time) {
    atomic_fetch_add_explicit(&account->words[ACCOUNT_USED], time, memory_order_relaxed);
}
