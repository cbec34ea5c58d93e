/* What holds a pod's namespaces: the first process of each pod. It waits, and buries the pod's orphans. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void end(int number)
{
    _exit(number == SIGTERM || number == SIGINT ? 0 : 1);
}

static void bury(int number)
{
    (void)number;
    while (waitpid(-1, NULL, WNOHANG) > 0)
        ;
}

int main(void)
{
    signal(SIGINT, end);
    signal(SIGTERM, end);
    signal(SIGCHLD, bury);
    for (;;)
        pause();
}
