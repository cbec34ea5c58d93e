/* A process of a session that obeys commands, one in each line of standard input, with one line in reply to each:
 *   reserve DEVICE BYTES LIMIT   granted, over or refused
 *   charge DEVICE BYTES, release DEVICE BYTES
 *   used DEVICE, mine DEVICE     bytes
 *   ours PID, forked             0 or 1
 *   processes DEVICE             PID=BYTES of each
 *   time DEVICE                  adds one to the first word of the device's time account and prints its old value
 *   limits                       the session's number and each device's limit, or none
 *   index UUID, folder
 *   close                        closes every descriptor from 3 on
 *   exec                         becomes another program that sleeps
 *   fork COMMANDS, clone COMMANDS (separated by ;)   a child runs them, prints their replies, and stays
 *   child COMMANDS               the same, but the child is gone before the reply A child that stays outlives this
 *   process: it waits to be killed, for five minutes at most. */
#include "fgpu.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void run(char *command, FILE *reply);

static const char *word_for(enum fgpu_verdict verdict) {
    return verdict == FGPU_GRANTED ? "granted" : verdict == FGPU_OVER ? "over" : "refused";
}

static void print_limits(FILE *reply) {
    const struct fgpu_limits *limits = fgpu_limits();
    if (limits == NULL) {
        fputs("none", reply);
        return;
    }
    fprintf(reply, "%llu", (unsigned long long)limits->session);
    for (unsigned i = 0; i < limits->device_count; i++)
        fprintf(reply, " %s=%llu", limits->devices[i].uuid, (unsigned long long)limits->devices[i].memory_bytes);
}

static void print_processes(int device, FILE *reply) {
    struct fgpu_process processes[8];
    unsigned count = fgpu_processes(device, processes, 8);
    for (unsigned i = 0; i < count && i < 8; i++)
        fprintf(reply, "%s%u=%llu", i ? " " : "", processes[i].pid, (unsigned long long)processes[i].bytes);
}

/* The child's replies, joined by ;, come through a pipe; fork() runs the handlers of pthread_atfork, clone does not. */
static void run_in_child(char *commands, bool with_handlers, bool stays, FILE *reply) {
    int ends[2];
    char line[512];
    if (pipe(ends) != 0)
        exit(2);
    pid_t child = with_handlers ? fork() : (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
    if (child == 0) {
        FILE *answers = fdopen(ends[1], "w");
        for (char *command = strtok(commands, ";"); command != NULL; command = strtok(NULL, ";")) {
            run(command, answers);
            fputc(';', answers);
        }
        fprintf(answers, "%d\n", getpid());
        fclose(answers);
        close(ends[0]);
        if (stays)
            alarm(300); /* in case it is not killed */
        while (stays)
            pause();
        _exit(0);
    }
    close(ends[1]);
    FILE *answers = fdopen(ends[0], "r");
    if (fgets(line, sizeof line, answers) != NULL)
        fprintf(reply, "%.*s", (int)strcspn(line, "\n"), line);
    fclose(answers);
    if (!stays)
        waitpid(child, NULL, 0);
}

static void run(char *command, FILE *reply) {
    unsigned long long bytes = 0, limit = 0;
    int device = 0;
    char name[FGPU_UUID_BYTES];
    if (sscanf(command, "reserve %d %llu %llu", &device, &bytes, &limit) == 3)
        fputs(word_for(fgpu_reserve(device, bytes, limit)), reply);
    else if (sscanf(command, "charge %d %llu", &device, &bytes) == 2)
        fgpu_charge_anyway(device, bytes);
    else if (sscanf(command, "release %d %llu", &device, &bytes) == 2)
        fgpu_release(device, bytes);
    else if (sscanf(command, "used %d", &device) == 1)
        fprintf(reply, "%llu", (unsigned long long)fgpu_used(device));
    else if (sscanf(command, "mine %d", &device) == 1)
        fprintf(reply, "%llu", (unsigned long long)fgpu_used_by_this_process(device));
    else if (sscanf(command, "ours %llu", &bytes) == 1)
        fprintf(reply, "%d", fgpu_is_ours((uint32_t)bytes));
    else if (sscanf(command, "time %d", &device) == 1) {
        struct fgpu_time_account *account = fgpu_time_account(device);
        fprintf(reply, "%lld", account ? (long long)account->words[0]++ : -1);
    } else if (sscanf(command, "index %95s", name) == 1)
        fprintf(reply, "%d", fgpu_device_by_uuid(name));
    else if (sscanf(command, "processes %d", &device) == 1)
        print_processes(device, reply);
    else if (strcmp(command, "forked") == 0)
        fprintf(reply, "%d", fgpu_forked());
    else if (strcmp(command, "limits") == 0)
        print_limits(reply);
    else if (strcmp(command, "folder") == 0)
        fputs(fgpu_folder() ? fgpu_folder() : "none", reply);
    else if (strcmp(command, "close") == 0)
        syscall(SYS_close_range, 3, ~0U, 0);
    else if (strcmp(command, "exec") == 0)
        execlp("sleep", "sleep", "1000", NULL);
    else if (strncmp(command, "fork ", 5) == 0)
        run_in_child(command + 5, true, true, reply);
    else if (strncmp(command, "clone ", 6) == 0)
        run_in_child(command + 6, false, true, reply);
    else if (strncmp(command, "child ", 6) == 0)
        run_in_child(command + 6, true, false, reply);
    else
        exit(2);
}

int main(void) {
    char line[512];
    while (fgets(line, sizeof line, stdin) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        run(line, stdout);
        putchar('\n');
        fflush(stdout);
    }
    return 0;
}
