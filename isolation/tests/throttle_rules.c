/* Asks the pure parts of the throttle, one question and one answer in each line; times in nanoseconds.
 *     slots 0-25,50-75      sets the slots for the following lines, with a new account
 *     change 0-50           sets the slots, and keeps the account
 *     at NOW | entitled NOW
 *     ask NOW EXPECTED BALANCE IN_FLIGHT FREE_AT SENTINELS
 *     balance NOW | deposit TIME | pay START END NOW DEPOSIT */
#include "account.h"
#include "gate.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static struct slots slots;
static struct fgpu_time_account account;

static void set_slots(char *text) {
    struct fgpu_device device = {0};
    for (char *word = strtok(text, ","); word != NULL; word = strtok(NULL, ",")) {
        unsigned from, to;
        if (sscanf(word, "%u-%u", &from, &to) == 2) {
            device.slots[device.slot_count].from = (uint8_t)from;
            device.slots[device.slot_count++].to = (uint8_t)to;
        }
    }
    slots_from_limits(&slots, &device);
    printf("%u %" PRIu64 "\n", slots.count, slots.per_period);
}

int main(void) {
    char line[256], text[256];
    uint64_t a, b, c, d, longest;
    int64_t balance;
    unsigned sentinels;
    while (fgets(line, sizeof line, stdin) != NULL) {
        if (sscanf(line, "slots %255s", text) == 1) {
            memset(&account, 0, sizeof account);
            set_slots(text);
        } else if (sscanf(line, "change %255s", text) == 1) {
            set_slots(text);
        } else if (sscanf(line, "at %" SCNu64, &a) == 1) {
            struct slot slot = slots_at(&slots, a);
            printf("%" PRIu64 " %" PRIu64 "\n", slot.start, slot.end);
        } else if (sscanf(line, "entitled %" SCNu64, &a) == 1) {
            printf("%" PRIu64 "\n", slots_entitled(&slots, a));
        } else if (sscanf(line, "ask %" SCNu64 " %" SCNu64 " %" SCNd64 " %" SCNu64 " %" SCNu64 " %u %" SCNu64, &a, &b,
                          &balance, &c, &d, &sentinels, &longest) == 7) {
            struct gate_state state = {.balance = balance, .in_flight = c, .free_at = d, .sentinels = sentinels, .longest = longest};
            struct gate_answer answer = gate_ask(&slots, slots_at(&slots, a), a, b, &state);
            if (answer.verdict == GATE_WAIT)
                printf("wait %" PRIu64 "\n", answer.until);
            else
                printf("%s\n", answer.verdict == GATE_OPEN ? "open" : "sentinel");
        } else if (sscanf(line, "balance %" SCNu64, &a) == 1) {
            printf("%" PRId64 "\n", account_balance(&account, &slots, slots_entitled(&slots, a)));
        } else if (sscanf(line, "deposit %" SCNu64, &a) == 1) {
            account_deposit(&account, a);
            printf("done\n");
        } else if (sscanf(line, "pay %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64, &a, &b, &c, &d) == 4) {
            printf("%" PRIu64 "\n", account_pay(&account, a, b, c, d));
        } else {
            fprintf(stderr, "what is %s?\n", line);
            return 2;
        }
    }
    return 0;
}
