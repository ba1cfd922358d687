#include "cli/cli.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

int yard_cli_fail(const char *command, const yard_error *err)
{
    yard_cli_clear_bar();
    fprintf(stderr, "switchyard %s: %s\n", command,
            err->message[0] ? err->message : yard_status_name(err->status));
    return EXIT_FAILURE;
}

int yard_cli_usage(const char *command, const char *fmt, ...)
{
    va_list args;

    fprintf(stderr, "switchyard %s: ", command);
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    va_end(args);
    fprintf(stderr, "; see 'switchyard %s --help'\n", command);
    return YARD_EXIT_USAGE;
}

yard_status yard_cli_check_model(const char *dir, yard_error *err)
{
    struct stat info;

    if (stat(dir, &info) != 0)
        return yard_fail(err, YARD_EIO, "%s: no such model directory%s%s", dir,
                         errno == ENOENT ? "" : ": ", errno == ENOENT ? "" : strerror(errno));
    if (!S_ISDIR(info.st_mode))
        return yard_fail(err, YARD_EIO, "%s: want a model directory, found a file", dir);
    return YARD_OK;
}

const char *yard_cli_input_name(const char *path)
{
    return strcmp(path, "-") ? path : "standard input";
}

static yard_status read_stream(FILE *in, const char *path, char **data, size_t *n_bytes,
                               yard_error *err)
{
    size_t capacity = 1 << 16, n = 0;
    char *buffer = malloc(capacity);

    while (buffer) {
        n += fread(buffer + n, 1, capacity - 1 - n, in);
        if (n < capacity - 1)
            break;
        capacity *= 2;
        char *larger = realloc(buffer, capacity);
        if (!larger)
            free(buffer);
        buffer = larger;
    }
    if (!buffer)
        return yard_fail(err, YARD_ENOMEM, "%s: no memory for %zu bytes", path, capacity);
    if (ferror(in)) {
        free(buffer);
        return yard_fail(err, YARD_EIO, "%s: cannot read: %s", path, strerror(errno));
    }
    buffer[n] = '\0';
    *data = buffer;
    *n_bytes = n;
    return YARD_OK;
}

yard_status yard_cli_read_all(const char *path, char **data, size_t *n_bytes, yard_error *err)
{
    FILE *in;
    yard_status st;

    if (!strcmp(path, "-"))
        return read_stream(stdin, yard_cli_input_name(path), data, n_bytes, err);
    in = fopen(path, "rb");
    if (!in)
        return yard_fail(err, YARD_EIO, "%s: cannot open: %s", path, strerror(errno));
    st = read_stream(in, path, data, n_bytes, err);
    fclose(in);
    return st;
}

static bool is_separator(char c)
{
    return c == ',' || c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

yard_status yard_cli_parse_ids(const char *text, size_t n_bytes, int32_t **ids, size_t *n_ids,
                               yard_error *err)
{
    /* an id and its separator take two bytes at least */
    int32_t *out = malloc((n_bytes / 2 + 1) * sizeof(*out));
    size_t n = 0;

    if (!out)
        return yard_fail(err, YARD_ENOMEM, "ids: no memory for %zu bytes", n_bytes);
    for (size_t i = 0; i < n_bytes;) {
        const size_t start = i;
        int64_t value = 0;

        if (is_separator(text[i])) {
            i++;
            continue;
        }
        while (i < n_bytes && text[i] >= '0' && text[i] <= '9' && value <= INT32_MAX)
            value = value * 10 + (text[i++] - '0');
        if (value > INT32_MAX || (i < n_bytes && !is_separator(text[i]))) {
            size_t end = start;
            while (end < n_bytes && end - start < 40 && !is_separator(text[end]))
                end++;
            free(out);
            return yard_fail(err, YARD_EFORMAT,
                             "ids: want whole numbers separated by commas or white space, got "
                             "'%.*s' at byte %zu",
                             (int)(end - start), text + start, start);
        }
        out[n++] = (int32_t)value;
    }
    *ids = out;
    *n_ids = n;
    return YARD_OK;
}

yard_status yard_cli_parse_u64(const char *option, const char *text, uint64_t min, uint64_t max,
                               uint64_t *out, yard_error *err)
{
    char *end;
    unsigned long long value;

    errno = 0;
    value = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end || errno || value < min || value > max)
        return yard_fail(err, YARD_EINVAL, "%s: want a whole number from %llu to %llu, got '%s'",
                         option, (unsigned long long)min, (unsigned long long)max, text);
    *out = value;
    return YARD_OK;
}

yard_status yard_cli_parse_f32(const char *option, const char *text, float min, float max,
                               float *out, yard_error *err)
{
    char *end;
    float value;

    value = strtof(text, &end);
    if (end == text || *end || !isfinite(value) || value < min || value > max)
        return yard_fail(err, YARD_EINVAL, "%s: want a number from %g to %g, got '%s'", option,
                         (double)min, (double)max, text);
    *out = value;
    return YARD_OK;
}

int yard_cli_close_stdout(const char *command)
{
    static bool told;
    const int code = fflush(stdout) != 0 ? errno : 0;

    if (!code && !ferror(stdout))
        return EXIT_SUCCESS;
    /* An earlier write may have failed for whatever reason: errno is only that of this one. */
    yard_cli_clear_bar();
    if (!told)
        fprintf(stderr, "switchyard%s%s: cannot write to standard output%s%s\n",
                *command ? " " : "", command, code ? ": " : "", code ? strerror(code) : "");
    told = true;
    return EXIT_FAILURE;
}
