/* Two network namespaces for `switchyard bench ep`. They have no names: the kernel removes them,
 * and the devices in them, with the processes. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/bench_ep.h"

static bool shell(const char *command)
{
    const int status = system(command);

    return status != -1 && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

bool yard_bench_ep_link_possible(void)
{
    const pid_t pid = fork();
    int status = 0;

    if (pid == 0)
        _exit(unshare(CLONE_NEWNET) == 0 &&
                      shell("ip link add yb0 type veth peer name yb1 >/dev/null 2>&1")
                  ? 0
                  : 1);
    return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) &&
           WEXITSTATUS(status) == 0;
}

yard_status yard_bench_ep_link_leave(yard_error *err)
{
    if (unshare(CLONE_NEWNET) != 0)
        return yard_fail(err, YARD_EIO, "no network namespace of its own");
    return YARD_OK;
}

yard_status yard_bench_ep_link_join(const pid_t *pids, yard_error *err)
{
    char command[160];

    snprintf(command, sizeof(command),
             "ip link add name yb0 netns %d type veth peer name yb1 netns %d", (int)pids[0],
             (int)pids[1]);
    if (!shell(command))
        return yard_fail(err, YARD_EIO, "cannot join two network namespaces");
    return YARD_OK;
}

const char *yard_bench_ep_link_host(uint32_t rank)
{
    return rank == 0 ? "10.213.0.1" : "10.213.0.2";
}

yard_status yard_bench_ep_link_up(uint32_t rank, yard_error *err)
{
    char command[160];

    snprintf(command, sizeof(command),
             "ip link set lo up && ip addr add %s/24 dev yb%u && ip link set yb%u up",
             yard_bench_ep_link_host(rank), rank, rank);
    if (!shell(command))
        return yard_fail(err, YARD_EIO, "cannot set up the device of a network namespace");
    return YARD_OK;
}
