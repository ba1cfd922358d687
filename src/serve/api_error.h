/* Errors as clients of the OpenAI API expect them. Private to the serve room. */
#ifndef YARD_SERVE_API_ERROR_H
#define YARD_SERVE_API_ERROR_H

#include "base/base.h"

/* All zero is "no error". type and code are static. */
typedef struct yard_api_error {
    int http_status;
    const char *type;
    char param[96];   /* the field; "": none */
    const char *code; /* NULL: none */
    char message[YARD_ERROR_MESSAGE_BYTES];
} yard_api_error;

/* Records "param: " and the message, status 400, type "invalid_request_error". Returns YARD_EINVAL.
 * A param that names what the client wrote (a key of its own) is cut and cleaned like a message. */
yard_status yard_api_refuse(yard_api_error *err, const char *code, const char *param,
                            const char *fmt, ...) YARD_PRINTF(4, 5);

/* The failure of a call below: what a client can change (YARD_EINVAL, YARD_EFORMAT, YARD_ENOTSUP)
 * is 400, and a message that begins with "field: " names its param; YARD_EAGAIN is 429,
 * YARD_ETIMEDOUT 504, YARD_EPEER 503, the rest 500. Returns the status of err. */
yard_status yard_api_error_from(yard_api_error *out, const yard_error *err);

/* 404 for a model that is not served. Returns YARD_EINVAL. */
yard_status yard_api_no_such_model(yard_api_error *err, const char *model);

/* 400 in the words that clients look for to shorten a prompt and try again. param: "messages" or
 * "prompt". Returns YARD_EINVAL. */
yard_status yard_api_too_long(yard_api_error *err, const char *param, uint32_t context,
                              uint32_t n_prompt);

#endif
