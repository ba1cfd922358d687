#include "serve/api_error.h"

#include <stdarg.h>
#include <stdio.h>

static const char invalid_request[] = "invalid_request_error";

static void set(yard_api_error *err, int http_status, const char *type, const char *code)
{
    *err = (yard_api_error){ .http_status = http_status, .type = type, .code = code };
}

/* Through yard_fail, which cuts what is too long and replaces what is no text. */
static void set_message(yard_api_error *err, const char *text)
{
    yard_error clean;

    yard_fail(&clean, YARD_EINVAL, "%s", text);
    memcpy(err->message, clean.message, sizeof(err->message));
}

static void set_param(yard_api_error *err, const char *param, size_t n_bytes)
{
    yard_error clean;

    if (n_bytes >= sizeof(err->param))
        n_bytes = sizeof(err->param) - 1;
    yard_fail(&clean, YARD_EINVAL, "%.*s", (int)n_bytes, param);
    memcpy(err->param, clean.message, n_bytes + 1);
    err->param[n_bytes] = '\0';
}

yard_status yard_api_refuse(yard_api_error *err, const char *code, const char *param,
                            const char *fmt, ...)
{
    char text[YARD_ERROR_MESSAGE_BYTES];
    int n = snprintf(text, sizeof(text), "%.*s: ", (int)sizeof(err->param), param);
    va_list args;

    va_start(args, fmt);
    vsnprintf(text + n, sizeof(text) - (size_t)n, fmt, args);
    va_end(args);
    set(err, 400, invalid_request, code);
    set_param(err, param, strlen(param));
    set_message(err, text);
    return YARD_EINVAL;
}

static int http_status_of(yard_status status)
{
    switch (status) {
    case YARD_EINVAL:
    case YARD_EFORMAT:
    case YARD_ENOTSUP:
        return 400;
    case YARD_EAGAIN:
        return 429;
    case YARD_ETIMEDOUT:
        return 504;
    case YARD_EPEER:
        return 503;
    default:
        return 500;
    }
}

/* A field is one word: no space before its colon. */
static size_t field_bytes(const char *message)
{
    const size_t n = strcspn(message, ": ");

    return message[n] == ':' && message[n + 1] == ' ' ? n : 0;
}

yard_status yard_api_error_from(yard_api_error *out, const yard_error *err)
{
    const int status = http_status_of(err->status);

    set(out, status,
        status == 400   ? invalid_request
        : status == 429 ? "rate_limit_error"
                        : "server_error",
        status == 429 ? "rate_limit_exceeded" : NULL);
    if (status == 400)
        set_param(out, err->message, field_bytes(err->message));
    set_message(out, err->message);
    return err->status;
}

yard_status yard_api_no_such_model(yard_api_error *err, const char *model)
{
    yard_api_refuse(err, "model_not_found", "model", "the model '%.100s' does not exist", model);
    err->http_status = 404;
    return YARD_EINVAL;
}

yard_status yard_api_too_long(yard_api_error *err, const char *param, uint32_t context,
                              uint32_t n_prompt)
{
    return yard_api_refuse(err, "context_length_exceeded", param,
                           "This model's maximum context length is %u tokens. However, the prompt "
                           "has %u tokens. Please reduce its length.",
                           context, n_prompt);
}
