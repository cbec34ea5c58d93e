/* Taking memory and GPU time. */
#include "cuda_ledger.h"

#include <pthread.h>
#include <string.h>
#include <time.h>

#define NO_SLOT UINT32_MAX
#define LONG_QUEUE_NS 10000000u
#define SPELL_GAP_NS 1000000u
#define SPELL_NS 20000000u

static pthread_mutex_t threads = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t spell_threads = PTHREAD_MUTEX_INITIALIZER;
static uint32_t own_slot = NO_SLOT;
static uint32_t last_spell[MACHINE_DEVICES]; /* 1 + its place, by block */
static uint32_t limits_seen;
static struct ledger_slot nowhere; /* for a process that has lost its slot and finds no other */
static struct {
    _Atomic(uint64_t) bytes;
    _Atomic(uint32_t) contexts;
} held[MACHINE_DEVICES]; /* by block: what the slot says, should it have to be said again */

static struct ledger_slot *own(void)
{
    return own_slot == NO_SLOT ? &nowhere : &ledger_mapped()->slots[own_slot];
}

/* A process holds its slot's byte for life. */
static bool slot_is_free(unsigned slot)
{
    return ledger_owner(slot) == -1 && ledger_lock_byte(LEDGER_LOCK_SLOT + (int)slot, false);
}

static bool join_locked(void);

static void lock_memory(void)
{
    pthread_mutex_lock(&threads);
    /* A program that closes descriptors it does not know has dropped our locks as well. Who noticed took us for dead. */
    bool lost = !ledger_descriptor_holds() && ledger_reopen() && own_slot != NO_SLOT;
    ledger_lock_byte(LEDGER_LOCK_MEMORY, true);
    if (lost) {
        own_slot = NO_SLOT;
        join_locked();
    }
}

static void unlock_memory(void)
{
    ledger_unlock_byte(LEDGER_LOCK_MEMORY);
    pthread_mutex_unlock(&threads);
}

void ledger_lock_memory(void)
{
    lock_memory();
}

void ledger_unlock_memory(void)
{
    unlock_memory();
}

static bool is_locked(void)
{
    uint32_t state = atomic_load_explicit(&own()->checkpoint, memory_order_acquire);
    return __builtin_expect(state == 1 || state == 2, 0); /* CU_PROCESS_STATE_LOCKED, -CHECKPOINTED */
}

/* As with NVIDIA's driver, no signal ends it. */
bool ledger_wait_unlocked(void)
{
    while (is_locked())
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    return __builtin_expect(atomic_load_explicit(&own()->checkpoint, memory_order_relaxed) == 0, 1);
}

/* A thread that was on its way here when its process was locked waits too. */
static void lock_memory_running(void)
{
    lock_memory();
    while (is_locked()) {
        unlock_memory();
        ledger_wait_unlocked();
        lock_memory();
    }
}

void ledger_count_obstacle(int change)
{
    atomic_fetch_add(&own()->obstacles, (uint32_t)change);
}

/* What a dead process had queued last will never run. What it had queued before others' kernels leaves a gap: these
 * have been told when they will be done. */
static void drop_turns(unsigned block, uint32_t dead, uint64_t now)
{
    struct ledger *ledger = ledger_mapped();
    struct ledger_device *device = &ledger->devices[block];
    for (uint64_t turn = atomic_load(&device->turns); turn--;) {
        struct ledger_turn *last = &ledger->turns[block][turn % LEDGER_TURNS];
        uint64_t start = atomic_load(&last->start), end = atomic_load(&last->end);
        if (atomic_load(&last->slot) != dead || end <= now)
            return;
        if (!atomic_compare_exchange_strong(&device->busy_until, &end, start > now ? start : now))
            return;
        atomic_store(&last->end, atomic_load(&last->start));
    }
}

/* Gives back what the dead held. Inside the lock. */
static void reclaim(void)
{
    struct ledger *ledger = ledger_mapped();
    uint32_t watermark = atomic_load(&ledger->header.watermark);
    uint64_t now = machine_now();
    for (uint32_t i = 0; i < watermark; i++) {
        struct ledger_slot *slot = &ledger->slots[i];
        uint32_t touched = atomic_load(&slot->touched);
        if (!touched || i == own_slot || ledger_owner(i) >= 0)
            continue;
        for (unsigned block = 0; block < MACHINE_DEVICES; block++)
            if (touched >> block & 1) {
                drop_turns(block, i, now);
                memset(&slot->holdings[block], 0, sizeof slot->holdings[block]);
            }
        atomic_store(&slot->checkpoint, 0);
        atomic_store(&slot->touched, 0);
    }
    while (watermark && !atomic_load(&ledger->slots[watermark - 1].touched) && watermark - 1 != own_slot &&
           ledger_owner(watermark - 1) < 0)
        watermark--;
    atomic_store(&ledger->header.watermark, watermark);
}

static void note_cgroup(void)
{
    uint64_t chain[LEDGER_CGROUPS];
    limits_seen = atomic_load(&ledger_mapped()->header.limits_generation);
    cgroup_chain(chain);
    for (unsigned i = 0; i < LEDGER_CGROUPS; i++)
        atomic_store(&own()->cgroups[i], chain[i]);
}

static bool join_locked(void)
{
    struct ledger *ledger = ledger_mapped();
    if (own_slot != NO_SLOT)
        return true;
    reclaim();
    for (uint32_t i = 0; i < LEDGER_SLOTS; i++) {
        if (!slot_is_free(i))
            continue;
        own_slot = i;
        memset(own()->holdings, 0, sizeof own()->holdings);
        atomic_store(&own()->spell_count, 0);
        atomic_store(&own()->checkpoint, 0);
        atomic_store(&own()->obstacles, 0);
        memset(last_spell, 0, sizeof last_spell);
        note_cgroup();
        for (unsigned block = 0; block < MACHINE_DEVICES; block++) {
            atomic_store(&own()->holdings[block].bytes, atomic_load(&held[block].bytes));
            atomic_store(&own()->holdings[block].contexts, atomic_load(&held[block].contexts));
            if (atomic_load(&held[block].contexts))
                atomic_fetch_or(&own()->touched, UINT32_C(1) << block);
        }
        if (atomic_load(&ledger->header.watermark) <= i)
            atomic_store(&ledger->header.watermark, i + 1);
        return true;
    }
    machine_log("all %d slots of the ledger are taken", LEDGER_SLOTS);
    return false;
}

bool ledger_join(void)
{
    lock_memory();
    bool joined = join_locked();
    unlock_memory();
    return joined;
}

void ledger_leave_to_parent(void)
{
    pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    threads = spell_threads = fresh;
    own_slot = NO_SLOT;
    memset(held, 0, sizeof held);
}

static void touch(const struct machine_device *device)
{
    uint32_t bit = UINT32_C(1) << device->block;
    if (!(atomic_load_explicit(&own()->touched, memory_order_relaxed) & bit))
        atomic_fetch_or(&own()->touched, bit);
}

static uint64_t sum_of(const struct machine_device *device)
{
    struct ledger *ledger = ledger_mapped();
    uint64_t sum = 0;
    for (uint32_t i = 0; i < atomic_load(&ledger->header.watermark); i++)
        sum += ledger_held(&ledger->slots[i], device->block);
    return sum;
}

bool ledger_fits_again(struct ledger_slot *slot)
{
    const struct machine *machine = machine_load();
    reclaim();
    for (unsigned pass = 0; pass < 2; pass++) /* first look at all of them, then note the peaks */
        for (unsigned i = 0; i < machine->count; i++) {
            const struct machine_device *device = &machine->devices[i];
            struct ledger_device *entry = &ledger_mapped()->devices[device->block];
            uint64_t used = sum_of(device) + atomic_load(&slot->holdings[device->block].bytes);
            if (used > device->memory_bytes)
                return false;
            if (pass == 1 && used > atomic_load(&entry->peak))
                atomic_store(&entry->peak, used);
        }
    return true;
}

uint64_t ledger_work_ends(unsigned slot, uint64_t now)
{
    struct ledger *ledger = ledger_mapped();
    uint64_t last = now;
    for (unsigned block = 0; block < MACHINE_DEVICES; block++)
        for (uint64_t turn = atomic_load(&ledger->devices[block].turns), left = LEDGER_TURNS; turn-- && left--;) {
            const struct ledger_turn *found = &ledger->turns[block][turn % LEDGER_TURNS];
            uint64_t end = atomic_load(&found->end);
            if (end <= now)
                break;
            if (atomic_load(&found->slot) == slot && end > last)
                last = end;
        }
    return last;
}

/* Every limit at or above this process's cgroup holds. */
static bool cgroups_allow(const struct machine_device *device, uint64_t bytes)
{
    uint32_t generation = atomic_load(&ledger_mapped()->header.limits_generation);
    if (!generation)
        return true;
    if (generation != limits_seen)
        note_cgroup();
    for (unsigned i = 0; i < LEDGER_CGROUPS; i++) {
        uint64_t cgroup = atomic_load(&own()->cgroups[i]);
        uint64_t limit = cgroup ? cgroup_limit(device, cgroup) : LEDGER_NO_LIMIT;
        if (limit != LEDGER_NO_LIMIT && cgroup_used(device, cgroup) + bytes > limit)
            return false;
    }
    return ledger_used(device) + cgroup_reserved(device, own()) + bytes <= device->memory_bytes;
}

bool ledger_take(const struct machine_device *device, uint64_t bytes)
{
    struct ledger_device *entry = &ledger_mapped()->devices[device->block];
    if (bytes > device->memory_bytes)
        return false;
    lock_memory_running();
    bool taken = false;
    if (join_locked() && cgroups_allow(device, bytes)) {
        uint64_t used = sum_of(device) + bytes;
        /* What dead ones held neither stands in the way nor counts as a peak. */
        if (used > device->memory_bytes || used > atomic_load(&entry->peak)) {
            reclaim();
            used = sum_of(device) + bytes;
        }
        taken = used <= device->memory_bytes;
        if (taken) {
            touch(device);
            atomic_fetch_add(&held[device->block].bytes, bytes);
            atomic_fetch_add(&own()->holdings[device->block].bytes, bytes);
            atomic_fetch_add(&entry->grants, 1);
            if (used > atomic_load(&entry->peak))
                atomic_store(&entry->peak, used);
            if (sum_of(device) > device->memory_bytes)
                atomic_fetch_add(&entry->over, 1);
        }
    }
    unlock_memory();
    return taken;
}

void ledger_give(const struct machine_device *device, uint64_t bytes)
{
    /* Needs no lock: less can only let another have more. */
    if (!bytes)
        return;
    atomic_fetch_sub(&held[device->block].bytes, bytes);
    atomic_fetch_sub(&own()->holdings[device->block].bytes, bytes);
}

void ledger_count_context(const struct machine_device *device, int change)
{
    touch(device);
    atomic_fetch_add(&held[device->block].contexts, (uint32_t)change);
    atomic_fetch_add(&own()->holdings[device->block].contexts, (uint32_t)change);
}

void ledger_view(const struct machine_device *device, uint64_t *free_bytes, uint64_t *total_bytes)
{
    uint64_t total = device->memory_bytes, used = ledger_used(device);
    if (own_slot != NO_SLOT && atomic_load(&ledger_mapped()->header.limits_generation)) {
        uint64_t chain[LEDGER_CGROUPS];
        cgroup_chain(chain);
        uint64_t limit = cgroup_limit(device, chain[0]);
        if (limit < total) {
            total = limit;
            used = cgroup_used(device, chain[0]);
        }
    }
    *total_bytes = total;
    *free_bytes = used < total ? total - used : 0;
}

/* ---- GPU time ------------------------------------------------------------------------------------ */

/* Adds a turn to the spell before it if that is near; so the last second stays within LEDGER_SPELLS. */
static void note_spell(unsigned block, uint64_t start, uint64_t end)
{
    struct ledger_slot *slot = own();
    pthread_mutex_lock(&spell_threads);
    struct ledger_spell *last = last_spell[block] ? &slot->spells[last_spell[block] - 1] : NULL;
    uint64_t last_end = last ? atomic_load_explicit(&last->end, memory_order_relaxed) : 0;
    uint64_t last_start = last ? atomic_load_explicit(&last->start, memory_order_relaxed) : 0;
    bool near = last && start >= last_end &&
                (start == last_end || (start - last_end < SPELL_GAP_NS && end - last_start < SPELL_NS));
    if (near) {
        uint64_t busy = atomic_load_explicit(&last->busy, memory_order_relaxed);
        atomic_store_explicit(&last->busy, busy + (end - start), memory_order_relaxed);
        atomic_store_explicit(&last->end, end, memory_order_relaxed);
    } else {
        uint32_t count = atomic_load_explicit(&slot->spell_count, memory_order_relaxed);
        struct ledger_spell *next = &slot->spells[count % LEDGER_SPELLS];
        atomic_store_explicit(&next->end, 0, memory_order_relaxed);
        atomic_store_explicit(&next->block, block, memory_order_relaxed);
        atomic_store_explicit(&next->busy, end - start, memory_order_relaxed);
        atomic_store_explicit(&next->start, start, memory_order_relaxed);
        atomic_store_explicit(&next->end, end, memory_order_release);
        for (unsigned i = 0; i < MACHINE_DEVICES; i++)
            if (last_spell[i] == count % LEDGER_SPELLS + 1)
                last_spell[i] = 0;
        last_spell[block] = count % LEDGER_SPELLS + 1;
        atomic_store_explicit(&slot->spell_count, count + 1, memory_order_release);
    }
    pthread_mutex_unlock(&spell_threads);
}

/* The device may seem busy only because of work that died with its process. */
static void reclaim_time(const struct machine_device *device)
{
    static _Atomic(uint64_t) last_time;
    struct ledger *ledger = ledger_mapped();
    uint64_t now = machine_now(), last = atomic_load(&last_time);
    uint64_t turns = atomic_load(&ledger->devices[device->block].turns);
    struct ledger_turn *turn = &ledger->turns[device->block][(turns - 1) % LEDGER_TURNS];
    if (!turns || atomic_load(&turn->slot) == own_slot || now - last < LONG_QUEUE_NS ||
        !atomic_compare_exchange_strong(&last_time, &last, now))
        return;
    lock_memory();
    reclaim();
    unlock_memory();
}

uint64_t ledger_queue(const struct machine_device *device, uint64_t earliest, uint64_t duration, uint64_t kernels)
{
    struct ledger *ledger = ledger_mapped();
    struct ledger_device *entry = &ledger->devices[device->block];
    uint64_t now = machine_now(), start, end;
    uint64_t until = atomic_load_explicit(&entry->busy_until, memory_order_relaxed);
    if (until > now + LONG_QUEUE_NS) {
        reclaim_time(device);
        until = atomic_load_explicit(&entry->busy_until, memory_order_relaxed);
    }
    if (earliest < now)
        earliest = now;
    if (!duration)
        return earliest;
    do {
        start = until > earliest ? until : earliest;
        end = start + duration;
    } while (!atomic_compare_exchange_weak(&entry->busy_until, &until, end));

    struct ledger_turn *turn = &ledger->turns[device->block][atomic_fetch_add(&entry->turns, 1) % LEDGER_TURNS];
    atomic_store_explicit(&turn->end, 0, memory_order_relaxed);
    atomic_store_explicit(&turn->slot, own_slot, memory_order_relaxed);
    atomic_store_explicit(&turn->start, start, memory_order_relaxed);
    atomic_store_explicit(&turn->end, end, memory_order_release);

    touch(device);
    struct ledger_holding *holding = &own()->holdings[device->block];
    atomic_fetch_add_explicit(&holding->busy_ns, duration, memory_order_relaxed);
    atomic_fetch_add_explicit(&holding->kernels, kernels, memory_order_relaxed);
    atomic_fetch_add_explicit(&entry->busy_ns, duration, memory_order_relaxed);
    atomic_fetch_add_explicit(&entry->kernels, kernels, memory_order_relaxed);
    note_spell(device->block, start, end);
    return end;
}

uint64_t ledger_foreign_turn_ends(const struct machine_device *device, uint64_t now)
{
    struct ledger *ledger = ledger_mapped();
    struct ledger_device *entry = &ledger->devices[device->block];
    if (atomic_load(&entry->busy_until) <= now)
        return now;
    uint64_t high = atomic_load(&entry->turns);
    uint64_t low = high > LEDGER_TURNS ? high - LEDGER_TURNS : 0;
    /* The first turn that ends after now. Turns are entered in their order, all but those entered at the same time. */
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (atomic_load(&ledger->turns[device->block][middle % LEDGER_TURNS].end) > now)
            high = middle;
        else
            low = middle + 1;
    }
    struct ledger_turn *turn = &ledger->turns[device->block][low % LEDGER_TURNS];
    uint64_t end = atomic_load(&turn->end);
    bool runs = end > now && atomic_load(&turn->start) <= now;
    return runs && atomic_load(&turn->slot) != own_slot ? end : now;
}
