/* Status codes and error messages: the one error convention of every yard_ call.
 *
 * A call that can fail returns yard_status; YARD_OK is 0. The first function that sees a
 * failure writes one line (what, which object, expected, found) into a yard_error; callers
 * pass the status up. No call of this library aborts, exits or prints. */
#ifndef YARD_STATUS_H
#define YARD_STATUS_H

#include <stdint.h>

#if defined(__GNUC__)
#define YARD_API __attribute__((visibility("default")))
#define YARD_PRINTF(fmt_idx, arg_idx) __attribute__((format(printf, fmt_idx, arg_idx)))
#else
#define YARD_API
#define YARD_PRINTF(fmt_idx, arg_idx)
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum yard_status {
    YARD_OK = 0,
    YARD_EINVAL,    /* an argument breaks the documented contract */
    YARD_ENOMEM,    /* memory, pages or address space ran out */
    YARD_EIO,       /* the operating system refused: open, read, write, map */
    YARD_EFORMAT,   /* a file's content is not what its format demands */
    YARD_ENOTSUP,   /* well-formed, but not implemented here */
    YARD_EAGAIN,    /* no room now; the same call can succeed later */
    YARD_ETIMEDOUT, /* a deadline passed */
    YARD_EPEER,     /* another rank was lost */
    YARD_EDEVICE,   /* a device reported an error */
    YARD_STATUS_COUNT
} yard_status;

enum { YARD_ERROR_MESSAGE_BYTES = 512 };

/* Owned by the caller; plain data, may be copied. All zero is "no error". */
typedef struct yard_error {
    yard_status status;
    char message[YARD_ERROR_MESSAGE_BYTES]; /* one line, no newline, valid UTF-8, NUL-terminated */
} yard_error;

/* Short English name of a status ("invalid argument"). Static storage; never NULL. */
YARD_API const char *yard_status_name(yard_status status);

/* Record a failure and return its status, so that `return yard_fail(...)` reads well.
 *   err   may be NULL; a message longer than the buffer loses its middle: its end says why.
 * Control characters and invalid UTF-8 in the message (names from hostile files) are shown as '?'.
 */
YARD_API yard_status yard_fail(yard_error *err, yard_status status, const char *fmt, ...)
    YARD_PRINTF(3, 4);

#ifdef __cplusplus
}
#endif
#endif
