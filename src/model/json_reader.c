#include "model/json_reader.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static yard_status read_all(int fd, char *text, size_t n_bytes, const char *path, yard_error *err)
{
    for (size_t done = 0; done < n_bytes;) {
        const ssize_t n = read(fd, text + done, n_bytes - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return yard_fail(err, YARD_EIO, "%s: cannot read: %s", path, strerror(errno));
        if (n == 0)
            return yard_fail(err, YARD_EIO, "%s: want %zu bytes, found %zu", path, n_bytes, done);
        done += (size_t)n;
    }
    return YARD_OK;
}

static yard_status read_fd(int fd, char **text, size_t *n_bytes, const char *path, size_t max_bytes,
                           yard_error *err)
{
    struct stat info;
    yard_status st;
    char *buffer;
    size_t size;

    if (fstat(fd, &info) != 0)
        return yard_fail(err, YARD_EIO, "%s: cannot examine: %s", path, strerror(errno));
    if (!S_ISREG(info.st_mode))
        return yard_fail(err, YARD_EIO, "%s: want a regular file", path);
    if ((uint64_t)info.st_size > max_bytes)
        return yard_fail(err, YARD_EFORMAT, "%s: want at most %zu bytes, found %lld", path,
                         max_bytes, (long long)info.st_size);
    size = (size_t)info.st_size;
    buffer = malloc(size + 1);
    if (!buffer)
        return yard_fail(err, YARD_ENOMEM, "%s: no memory for %zu bytes", path, size);
    st = read_all(fd, buffer, size, path, err);
    if (st) {
        free(buffer);
        return st;
    }
    buffer[size] = '\0';
    *text = buffer;
    *n_bytes = size;
    return YARD_OK;
}

/* errno is that of an open that failed. A directory that is not there is the shorter answer. */
static yard_status fail_open(const char *dir, const char *path, yard_error *err)
{
    const int code = errno;
    struct stat info;

    if (stat(dir, &info) != 0 && errno == ENOENT)
        return yard_fail(err, YARD_EIO, "%s: no such model directory", dir);
    if (code == ENOTDIR)
        return yard_fail(err, YARD_EIO, "%s: want a model directory, found a file", dir);
    return yard_fail(err, YARD_EIO, "%s: cannot open: %s", path, strerror(code));
}

yard_status yard_json_read_file(char **text, size_t *n_bytes, const char *dir, const char *name,
                                size_t max_bytes, bool *absent, yard_error *err)
{
    char path[4096];
    yard_status st;
    int fd;

    if (absent)
        *absent = false;
    if (snprintf(path, sizeof(path), "%s/%s", dir, name) >= (int)sizeof(path))
        return yard_fail(err, YARD_EINVAL, "%s: path too long", name);
    /* O_NONBLOCK: opening a pipe must not wait for a writer before it is refused. */
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && absent && errno == ENOENT) {
        *absent = true;
        *text = NULL;
        *n_bytes = 0;
        return YARD_OK;
    }
    if (fd < 0)
        return fail_open(dir, path, err);
    st = read_fd(fd, text, n_bytes, path, max_bytes, err);
    close(fd);
    return st;
}

yard_status yard_json_parse_object(json_t **out, const char *text, size_t n_bytes, const char *file,
                                   yard_error *err)
{
    char what[YARD_JSON_DESCRIBE_BYTES];
    json_error_t error = { 0 };
    json_t *root;

    root = json_loadb(text, n_bytes, JSON_REJECT_DUPLICATES, &error);
    /* Jansson leaves some failed allocations without a code of their own. */
    if (!root && (json_error_code(&error) == json_error_out_of_memory ||
                  json_error_code(&error) == json_error_unknown))
        return yard_fail(err, YARD_ENOMEM, "%s: no memory to parse %zu bytes", file, n_bytes);
    if (!root)
        return yard_fail(err, YARD_EFORMAT, "%s: bad JSON at byte %d: %s", file, error.position,
                         error.text);
    if (!json_is_object(root)) {
        yard_fail(err, YARD_EFORMAT, "%s: want a JSON object, found %s", file,
                  yard_json_describe(root, what));
        json_decref(root);
        return YARD_EFORMAT;
    }
    *out = root;
    return YARD_OK;
}

const char *yard_json_describe(const json_t *value, char buffer[YARD_JSON_DESCRIBE_BYTES])
{
    const size_t n = YARD_JSON_DESCRIBE_BYTES;

    if (!value)
        return "none";
    switch (json_typeof(value)) {
    case JSON_STRING:
        snprintf(buffer, n, "'%s'", json_string_value(value));
        break;
    case JSON_INTEGER:
        snprintf(buffer, n, "%lld", (long long)json_integer_value(value));
        break;
    case JSON_REAL:
        snprintf(buffer, n, "%.9g", json_real_value(value));
        if (!strpbrk(buffer, ".e")) /* 64.0 is no whole number in JSON: show why */
            snprintf(buffer, n, "%.1f", json_real_value(value));
        break;
    case JSON_ARRAY:
        snprintf(buffer, n, "an array of %zu", json_array_size(value));
        break;
    case JSON_OBJECT:
        return "an object";
    case JSON_TRUE:
        return "true";
    case JSON_FALSE:
        return "false";
    case JSON_NULL:
        return "null";
    }
    return buffer;
}

void yard_json_fail(yard_json_reader *r, yard_status status, const char *key, const char *fmt, ...)
{
    char text[YARD_ERROR_MESSAGE_BYTES];
    va_list args;

    if (r->status)
        return;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    r->status = yard_fail(r->err, status, "%s: %s%s: %s", r->file, r->where, key, text);
}

const json_t *yard_json_get(yard_json_reader *r, const char *key, bool *present)
{
    const json_t *value = json_object_get(r->object, key);

    if (r->n_keys < YARD_JSON_MAX_KEYS)
        r->keys[r->n_keys++] = key;
    if (present)
        *present = value != NULL;
    return value && !json_is_null(value) ? value : NULL;
}

static const json_t *get_required(yard_json_reader *r, const char *key, const char *want)
{
    bool present;
    const json_t *value = yard_json_get(r, key, &present);

    if (!present)
        yard_json_fail(r, YARD_EFORMAT, key, "missing");
    else if (!value)
        yard_json_fail(r, YARD_EFORMAT, key, "want %s, found null", want);
    return value;
}

uint64_t yard_json_get_u64(yard_json_reader *r, const char *key, uint64_t min, uint64_t max)
{
    char what[YARD_JSON_DESCRIBE_BYTES];
    const json_t *value = get_required(r, key, "a whole number");
    json_int_t n;

    if (!value)
        return 0;
    n = json_integer_value(value);
    if (!json_is_integer(value) || n < 0 || (uint64_t)n < min || (uint64_t)n > max) {
        yard_json_fail(r, YARD_EFORMAT, key, "want a whole number from %llu to %llu, found %s",
                       (unsigned long long)min, (unsigned long long)max,
                       yard_json_describe(value, what));
        return 0;
    }
    return (uint64_t)n;
}

double yard_json_get_number(yard_json_reader *r, const char *key, double min, double max)
{
    char what[YARD_JSON_DESCRIBE_BYTES];
    const json_t *value = get_required(r, key, "a number");
    double x;

    if (!value)
        return 0;
    x = json_number_value(value);
    if (!json_is_number(value) || !(x >= min && x <= max)) {
        yard_json_fail(r, YARD_EFORMAT, key, "want a number from %g to %g, found %s", min, max,
                       yard_json_describe(value, what));
        return 0;
    }
    return x;
}

bool yard_json_get_bool(yard_json_reader *r, const char *key)
{
    char what[YARD_JSON_DESCRIBE_BYTES];
    const json_t *value = get_required(r, key, "true or false");

    if (value && !json_is_boolean(value))
        yard_json_fail(r, YARD_EFORMAT, key, "want true or false, found %s",
                       yard_json_describe(value, what));
    return value && json_is_true(value);
}

void yard_json_expect(yard_json_reader *r, const char *key, const char *want, bool optional)
{
    char what[YARD_JSON_DESCRIBE_BYTES];
    const json_t *value = optional ? yard_json_get(r, key, NULL) : get_required(r, key, want);

    if (value && strcmp(yard_json_describe(value, what), want) != 0)
        yard_json_fail(r, YARD_ENOTSUP, key, "only %s is implemented, found %s", want,
                       yard_json_describe(value, what));
}

static bool is_asked(const yard_json_reader *r, const char *key)
{
    for (uint32_t i = 0; i < r->n_keys; i++)
        if (!strcmp(r->keys[i], key))
            return true;
    return false;
}

void yard_json_warn_unread(const yard_json_reader *r, const char *const *ignored,
                           const yard_notify *notify)
{
    for (void *i = json_object_iter((json_t *)r->object); i;
         i = json_object_iter_next((json_t *)r->object, i)) {
        const char *key = json_object_iter_key(i);
        const char *const *known = ignored;
        while (known && *known && strcmp(*known, key) != 0)
            known++;
        if (!is_asked(r, key) && !(known && *known))
            yard_warn(notify, "%s: unknown key '%s%s' ignored", r->file, r->where, key);
    }
}
