#include "serve/api_fields.h"

#include <stdio.h>
#include <stdlib.h>

const char *yard_api_describe(const json_t *value, char buffer[32])
{
    if (!value)
        return "nothing";
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        snprintf(buffer, 32, "an array of %zu", json_array_size(value));
        return buffer;
    case JSON_STRING:
        return json_string_length(value) > 0 ? "a string" : "an empty string";
    case JSON_INTEGER:
        snprintf(buffer, 32, "%lld", (long long)json_integer_value(value));
        return buffer;
    case JSON_REAL:
        snprintf(buffer, 32, "%.9g", json_real_value(value));
        if (!strpbrk(buffer, ".e")) /* 64.0 is no whole number in JSON: show why */
            snprintf(buffer, 32, "%.1f", json_real_value(value));
        return buffer;
    case JSON_TRUE:
        return "true";
    case JSON_FALSE:
        return "false";
    default:
        return "null";
    }
}

static void name_of(const yard_api_fields *f, const char *key, char out[96])
{
    snprintf(out, 96, "%s%s", f->where, key);
}

void yard_api_want(yard_api_fields *f, const char *key, const char *want, const json_t *got)
{
    char name[96], what[32];

    if (f->status)
        return;
    name_of(f, key, name);
    f->status =
        yard_api_refuse(f->err, NULL, name, "want %s, got %s", want, yard_api_describe(got, what));
}

void yard_api_not_supported(yard_api_fields *f, const char *key)
{
    char name[96];

    if (f->status)
        return;
    name_of(f, key, name);
    f->status = yard_api_refuse(f->err, "unsupported_parameter", name, "is not supported here");
}

void yard_api_no_memory(yard_api_fields *f)
{
    yard_error err;

    if (f->status)
        return;
    yard_fail(&err, YARD_ENOMEM, "request: no memory");
    f->status = yard_api_error_from(f->err, &err);
}

const json_t *yard_api_get(const yard_api_fields *f, const char *key)
{
    const json_t *value = f->status ? NULL : json_object_get(f->object, key);

    return json_is_null(value) ? NULL : value;
}

bool yard_api_get_bool(yard_api_fields *f, const char *key, bool *out)
{
    const json_t *value = yard_api_get(f, key);

    if (!value)
        return false;
    if (!json_is_boolean(value)) {
        yard_api_want(f, key, "true or false", value);
        return false;
    }
    *out = json_is_true(value);
    return true;
}

bool yard_api_get_number(yard_api_fields *f, const char *key, double min, double max, float *out)
{
    const json_t *value = yard_api_get(f, key);
    char want[64];

    if (!value)
        return false;
    if (!json_is_number(value) || !(json_number_value(value) >= min) ||
        !(json_number_value(value) <= max)) {
        snprintf(want, sizeof(want), "a number from %g to %g", min, max);
        yard_api_want(f, key, want, value);
        return false;
    }
    *out = (float)json_number_value(value);
    return true;
}

bool yard_api_get_integer(yard_api_fields *f, const char *key, int64_t min, int64_t max,
                          int64_t *out)
{
    const json_t *value = yard_api_get(f, key);
    char want[80];

    if (!value)
        return false;
    if (!json_is_integer(value) || json_integer_value(value) < min ||
        json_integer_value(value) > max) {
        snprintf(want, sizeof(want), "a whole number from %lld to %lld", (long long)min,
                 (long long)max);
        yard_api_want(f, key, want, value);
        return false;
    }
    *out = json_integer_value(value);
    return true;
}

bool yard_api_get_string(yard_api_fields *f, const char *key, const char **out)
{
    const json_t *value = yard_api_get(f, key);

    if (!value)
        return false;
    if (!json_is_string(value)) {
        yard_api_want(f, key, "a string", value);
        return false;
    }
    *out = json_string_value(value);
    return true;
}

void yard_api_read_ids(yard_api_fields *f, const char *key, const json_t *array, int32_t **ids,
                       uint32_t *n_ids)
{
    const size_t n = json_array_size(array);
    const json_t *value;
    size_t i;

    if (f->status)
        return;
    *ids = malloc((n + 1) * sizeof(**ids));
    if (!*ids || n > INT32_MAX) {
        yard_api_no_memory(f);
        return;
    }
    json_array_foreach((json_t *)array, i, value)
    {
        if (!json_is_integer(value) || json_integer_value(value) < 0 ||
            json_integer_value(value) > INT32_MAX) {
            yard_api_want(f, key, "token ids", value);
            return;
        }
        (*ids)[i] = (int32_t)json_integer_value(value);
    }
    *n_ids = (uint32_t)n;
}
