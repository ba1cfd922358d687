/* Drawings by gnuplot, an external program. */
#include <errno.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/cli.h"

int yard_cli_run_gnuplot(const char *dir, const char *script)
{
    posix_spawn_file_actions_t actions;
    char *const argv[] = { "gnuplot", (char *)script, NULL };
    pid_t pid;
    int status = -1, rc;

    if ((rc = posix_spawn_file_actions_init(&actions)))
        return rc;
    posix_spawn_file_actions_addchdir_np(&actions, dir);
    rc = posix_spawnp(&pid, "gnuplot", &actions, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (rc)
        return rc;
    if (waitpid(pid, &status, 0) != pid)
        return EIO;
    /* 127: the C library found the program only after the fork, or could not enter dir */
    if (WIFEXITED(status) && WEXITSTATUS(status) == 127)
        return ENOENT;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : EIO;
}
