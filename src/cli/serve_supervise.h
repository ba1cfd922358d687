/* Two processes, an engine and a front, kept alive by a third that does nothing else. */
#ifndef YARD_CLI_SERVE_SUPERVISE_H
#define YARD_CLI_SERVE_SUPERVISE_H

#include "base/base.h"

typedef struct yard_supervise_config {
    char *const *engine; /* command lines for this program, the first word is the command's name */
    char *const *front;
    int listen_fd; /* that the front inherits under the same number */
} yard_supervise_config;

/* Starts both and starts each again when it dies, after a pause that grows from 0.1 s to 5 s while
 * it keeps dying; one that stays stopped (SIGSTOP) for 5 s is killed. On SIGTERM or SIGINT the
 * front is asked to end, then the engine; a second signal ends both at once. When this process is
 * killed, so are they. Errors: YARD_EIO when one of them ended by itself with an error before it
 * had lived for 10 s for the first time: it has said why.
 */
yard_status yard_supervise(const yard_supervise_config *config, yard_error *err);

#endif
