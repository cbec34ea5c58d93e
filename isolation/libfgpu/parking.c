/* A session that is parked has given its slice back, and its GPU memory is on the host. Each call that needs the GPU
 * waits here, before the driver is called, until the host opens the gate again; and says that it waits, so that the host
 * knows. README.md, "Parking", has both words.
 *
 * Nothing is locked while a thread waits. A call that passed the gate just before it closed waits in the driver. */
#include "hooks.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOOK_EVERY_NS 20000000
#define SAY_EVERY_MS 250
#define WORD "lending/wanted"

static const _Atomic(uint64_t) not_known = 1;
const _Atomic(uint64_t) *_Atomic fgpu_gate = &not_known;

static uint64_t now_ms(void) {
    struct timespec now = {0};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* Opened each time, as programs close descriptors that they do not know. */
static void say_wanted(uint64_t now) {
    struct stat status;
    const char *why = "cannot be written";
    int file = fgpu_open(WORD, O_WRONLY, &status, &why);
    bool said = file >= 0 && syscall(SYS_pwrite64, file, &now, sizeof now, (off_t)0) == sizeof now;
    if (file >= 0)
        fgpu_close(file);
    if (!said)
        fgpu_log("wanted", "the file " WORD " %s: this parked session cannot say that it needs its GPU", why);
}

/* Signals as the kernel has them: a bit each. */
#define BIT(signal) (UINT64_C(1) << ((signal) - 1))
#define STOPPING (BIT(SIGINT) | BIT(SIGTERM) | BIT(SIGHUP) | BIT(SIGQUIT))

static void set_mask(uint64_t mask, uint64_t *before) {
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &mask, before, sizeof mask);
}

/* A signal that stops programs, if it has a handler, is handled only while the thread sleeps here, so that none is
 * missed; all others only while it does not, so that a timer or a child's end stops nothing. */
static __attribute__((noinline)) bool wait_until_open(const _Atomic(uint64_t) *gate) {
    int saved = errno;
    uint64_t mask = 0, said = 0;
    bool stopped = false;
    set_mask(STOPPING, &mask);
    set_mask(mask | STOPPING, NULL);
    while (!stopped && atomic_load(gate) != 0) {
        uint64_t now = now_ms(), asleep = mask | ~STOPPING;
        struct timespec pause = {.tv_nsec = LOOK_EVERY_NS};
        if (now - said >= SAY_EVERY_MS) {
            say_wanted(now);
            said = now;
        }
        stopped = syscall(SYS_ppoll, NULL, 0, &pause, &asleep, sizeof asleep) < 0 && errno == EINTR;
    }
    set_mask(mask, NULL);
    errno = saved;
    return !stopped;
}

/* The driver's checkpoint of a process may need the right to trace it. Where the kernel gives that to parents only (Yama),
 * this gives it to the session's other processes of the same user. */
static void allow_tracing(void) {
    struct stat status;
    const char *why;
    int file = fgpu_open(WORD, O_RDONLY, &status, &why);
    if (file < 0)
        return; /* a session that is never parked */
    fgpu_close(file);
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
}

bool fgpu_wait_at_gate(void) {
    const _Atomic(uint64_t) *gate = fgpu_gate_word();
    if (gate == NULL)
        return true; /* then every allocation is refused */
    if (atomic_exchange_explicit(&fgpu_gate, gate, memory_order_relaxed) == &not_known)
        allow_tracing();
    return atomic_load(gate) == 0 || wait_until_open(gate);
}

/* ---- The functions in gated.h ---- */

static CUresult unavailable(void) {
    return CUDA_ERROR_DEVICE_UNAVAILABLE;
}

static CUresult missing(void) {
    return FGPU_MISSING_CUDA;
}

/* Where the call goes on. */
__attribute__((used)) void *fgpu_behind_gate(unsigned number);

void *fgpu_behind_gate(unsigned number) {
    void *real = fgpu_pass_gate() ? fgpu_real(number) : (void *)unavailable;
    return real == NULL ? (void *)missing : real;
}

/* `stub_number` counts them, in the order of the table. What is not usual goes through fgpu_slow_stub, which saves all
 * registers that can have parameters. */
#if defined(__x86_64__)
#define STUB(name) \
    ".globl " #name "\n.type " #name ", @function\n.p2align 4\n" #name ":\n.cfi_startproc\n" \
    "movq fgpu_gate(%rip), %rax\n" \
    "cmpq $0, (%rax)\n" \
    "jne 1f\n" \
    "movq fgpu_reals+8*stub_number(%rip), %rax\n" \
    "testq %rax, %rax\n" \
    "je 1f\n" \
    "jmp *%rax\n" \
    "1: movl $stub_number, %eax\n" \
    "jmp fgpu_slow_stub\n" \
    ".cfi_endproc\n.size " #name ", .-" #name "\n" \
    ".set stub_number, stub_number + 1\n"
#define SLOW_STUB \
    "pushq %rbp\n.cfi_def_cfa_offset 16\n.cfi_offset 6, -16\n" \
    "movq %rsp, %rbp\n.cfi_def_cfa_register 6\n" \
    "subq $176, %rsp\n" \
    "movq %rdi, (%rsp)\nmovq %rsi, 8(%rsp)\nmovq %rdx, 16(%rsp)\n" \
    "movq %rcx, 24(%rsp)\nmovq %r8, 32(%rsp)\nmovq %r9, 40(%rsp)\n" \
    "movups %xmm0, 48(%rsp)\nmovups %xmm1, 64(%rsp)\nmovups %xmm2, 80(%rsp)\nmovups %xmm3, 96(%rsp)\n" \
    "movups %xmm4, 112(%rsp)\nmovups %xmm5, 128(%rsp)\nmovups %xmm6, 144(%rsp)\nmovups %xmm7, 160(%rsp)\n" \
    "movl %eax, %edi\n" \
    "call fgpu_behind_gate\n" \
    "movq (%rsp), %rdi\nmovq 8(%rsp), %rsi\nmovq 16(%rsp), %rdx\n" \
    "movq 24(%rsp), %rcx\nmovq 32(%rsp), %r8\nmovq 40(%rsp), %r9\n" \
    "movups 48(%rsp), %xmm0\nmovups 64(%rsp), %xmm1\nmovups 80(%rsp), %xmm2\nmovups 96(%rsp), %xmm3\n" \
    "movups 112(%rsp), %xmm4\nmovups 128(%rsp), %xmm5\nmovups 144(%rsp), %xmm6\nmovups 160(%rsp), %xmm7\n" \
    "leave\n.cfi_def_cfa 7, 8\n" \
    "jmp *%rax\n"
#elif defined(__aarch64__)
#define STUB(name) \
    ".globl " #name "\n.type " #name ", %function\n.p2align 4\n" #name ":\n.cfi_startproc\n" \
    "adrp x16, fgpu_gate\nldr x16, [x16, :lo12:fgpu_gate]\n" \
    "ldr x16, [x16]\n" \
    "cbnz x16, 1f\n" \
    "adrp x16, fgpu_reals+8*stub_number\nldr x16, [x16, :lo12:fgpu_reals+8*stub_number]\n" \
    "cbz x16, 1f\n" \
    "br x16\n" \
    "1: mov w9, #stub_number\n" \
    "b fgpu_slow_stub\n" \
    ".cfi_endproc\n.size " #name ", .-" #name "\n" \
    ".set stub_number, stub_number + 1\n"
#define SLOW_STUB \
    "stp x29, x30, [sp, #-224]!\n.cfi_def_cfa_offset 224\n.cfi_offset 29, -224\n.cfi_offset 30, -216\n" \
    "mov x29, sp\n" \
    "stp x0, x1, [sp, #16]\nstp x2, x3, [sp, #32]\nstp x4, x5, [sp, #48]\nstp x6, x7, [sp, #64]\n" \
    "stp q0, q1, [sp, #96]\nstp q2, q3, [sp, #128]\nstp q4, q5, [sp, #160]\nstp q6, q7, [sp, #192]\n" \
    "mov w0, w9\n" \
    "bl fgpu_behind_gate\n" \
    "mov x16, x0\n" \
    "ldp x0, x1, [sp, #16]\nldp x2, x3, [sp, #32]\nldp x4, x5, [sp, #48]\nldp x6, x7, [sp, #64]\n" \
    "ldp q0, q1, [sp, #96]\nldp q2, q3, [sp, #128]\nldp q4, q5, [sp, #160]\nldp q6, q7, [sp, #192]\n" \
    "ldp x29, x30, [sp], #224\n.cfi_def_cfa_offset 0\n.cfi_restore 29\n.cfi_restore 30\n" \
    "br x16\n"
#endif

__asm__(".text\n"
        ".type fgpu_slow_stub, STT_FUNC\nfgpu_slow_stub:\n.cfi_startproc\n" SLOW_STUB ".cfi_endproc\n"
        ".size fgpu_slow_stub, .-fgpu_slow_stub\n"
        ".set stub_number, 0\n" FGPU_GATED(STUB));
