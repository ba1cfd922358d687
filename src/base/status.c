#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/base.h"

const char *yard_status_name(yard_status status)
{
    switch (status) {
    case YARD_OK:
        return "ok";
    case YARD_EINVAL:
        return "invalid argument";
    case YARD_ENOMEM:
        return "out of memory";
    case YARD_EIO:
        return "input/output error";
    case YARD_EFORMAT:
        return "bad file content";
    case YARD_ENOTSUP:
        return "not supported";
    case YARD_EAGAIN:
        return "no room now";
    case YARD_ETIMEDOUT:
        return "deadline passed";
    case YARD_EPEER:
        return "rank lost";
    case YARD_EDEVICE:
        return "device error";
    case YARD_STATUS_COUNT:
        break;
    }
    return "unknown status";
}

/* Names from files end up in messages, and messages end up on terminals. */
static void make_printable(char *text)
{
    size_t bad_at, n_bytes;

    for (char *c = text; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = '?';
    n_bytes = strlen(text);
    while (!yard_utf8_valid(text, n_bytes, &bad_at)) {
        text[bad_at] = '?';
        text += bad_at;
        n_bytes -= bad_at;
    }
}

static bool continues_character(char c)
{
    return ((unsigned char)c & 0xc0) == 0x80;
}

/* Into line, which is never cut at its end: there the reason stands, behind a path of any length.
 * What is too long loses its middle. */
static void format_line(char line[YARD_ERROR_MESSAGE_BYTES], const char *fmt, va_list args)
{
    static const char gap[] = "[..]";
    const size_t max_bytes = YARD_ERROR_MESSAGE_BYTES;
    size_t n_head = max_bytes / 4, n_tail = max_bytes - n_head - sizeof(gap);
    va_list again;
    char *all;
    int n;

    va_copy(again, args);
    n = vsnprintf(line, max_bytes, fmt, args);
    all = n >= (int)max_bytes ? malloc((size_t)n + 1) : NULL;
    if (all && vsnprintf(all, (size_t)n + 1, fmt, again) == n) {
        while (n_head > 0 && continues_character(all[n_head]))
            n_head--;
        while (n_tail > 0 && continues_character(all[(size_t)n - n_tail]))
            n_tail--;
        snprintf(line, max_bytes, "%.*s%s%s", (int)n_head, all, gap, all + n - n_tail);
    }
    free(all);
    va_end(again);
    make_printable(line);
}

yard_status yard_fail(yard_error *err, yard_status status, const char *fmt, ...)
{
    va_list args;

    if (!err)
        return status;
    err->status = status;
    va_start(args, fmt);
    format_line(err->message, fmt, args);
    va_end(args);
    return status;
}

void yard_warn(const yard_notify *notify, const char *fmt, ...)
{
    char line[YARD_ERROR_MESSAGE_BYTES];
    va_list args;

    if (!notify || !notify->warn)
        return;
    va_start(args, fmt);
    format_line(line, fmt, args);
    va_end(args);
    notify->warn(notify->ctx, line);
}

void yard_progress(const yard_notify *notify, const char *what, uint64_t done, uint64_t total)
{
    if (notify && notify->progress)
        notify->progress(notify->ctx, what, done, total);
}
