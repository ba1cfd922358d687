/* Optional members of a JSON object with types and ranges. Private to the serve room. */
#ifndef YARD_SERVE_API_FIELDS_H
#define YARD_SERVE_API_FIELDS_H

#include <jansson.h>

#include "serve/api_error.h"

/* One object being read. The first failure sticks; later reads change nothing. */
typedef struct yard_api_fields {
    const json_t *object;
    const char *where; /* "", or the object's own name and a dot ("stream_options.") */
    yard_status status;
    yard_api_error *err;
} yard_api_fields;

/* "a string", "12", "null"; values of strings are not repeated: they may be secrets. buffer: [32].
 */
const char *yard_api_describe(const json_t *value, char buffer[32]);

/* Records "where.key: want .., got .." as the failure, unless there is one. */
void yard_api_want(yard_api_fields *f, const char *key, const char *want, const json_t *got);
/* Records "where.key: is not supported here". */
void yard_api_not_supported(yard_api_fields *f, const char *key);
/* Records that memory ran out: YARD_ENOMEM, 500. */
void yard_api_no_memory(yard_api_fields *f);

/* NULL when it is absent or null, or something has failed. */
const json_t *yard_api_get(const yard_api_fields *f, const char *key);

/* Each leaves *out as it is when the member is absent or null, and refuses another type or a value
 * out of range. Return whether *out was set. */
bool yard_api_get_bool(yard_api_fields *f, const char *key, bool *out);
bool yard_api_get_number(yard_api_fields *f, const char *key, double min, double max, float *out);
bool yard_api_get_integer(yard_api_fields *f, const char *key, int64_t min, int64_t max,
                          int64_t *out);
bool yard_api_get_string(yard_api_fields *f, const char *key, const char **out);

/* An array of whole numbers from 0 to 2^31 - 1 (token ids); *ids is malloc'd. */
void yard_api_read_ids(yard_api_fields *f, const char *key, const json_t *array, int32_t **ids,
                       uint32_t *n_ids);

#endif
