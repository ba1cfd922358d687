/* Fields of JSON objects by name, with errors that say file, field, expected and found. Private to
 * the model room. */
#ifndef YARD_MODEL_JSON_READER_H
#define YARD_MODEL_JSON_READER_H

#include <jansson.h>

#include "base/base.h"

enum { YARD_JSON_MAX_KEYS = 96, YARD_JSON_DESCRIBE_BYTES = 64 };

/* One object being read. The first failure sticks in status; later reads return zero values, so
 * that a caller reads everything and looks once. */
typedef struct yard_json_reader {
    const json_t *object;
    const char *file;  /* for messages */
    const char *where; /* "", or the object's own field and a dot ("rope_scaling.") */
    const char *keys[YARD_JSON_MAX_KEYS]; /* asked for so far */
    uint32_t n_keys;
    yard_status status;
    yard_error *err;
} yard_json_reader;

/* Reads dir/name whole. malloc'd. A file that is no regular file or larger than max_bytes is
 * refused. *absent (may be NULL) becomes true, with YARD_OK and *text NULL, when there is none. */
yard_status yard_json_read_file(char **text, size_t *n_bytes, const char *dir, const char *name,
                                size_t max_bytes, bool *absent, yard_error *err);

/* Parses one JSON object, refusing members given twice. The caller owns *out (json_decref). */
yard_status yard_json_parse_object(json_t **out, const char *text, size_t n_bytes, const char *file,
                                   yard_error *err);

/* What a value is, for messages: 'text', 12, 0.5, 64.0, true, null, an array of 3, an object; none
 * for NULL. */
const char *yard_json_describe(const json_t *value, char buffer[YARD_JSON_DESCRIBE_BYTES]);

/* NULL when the field is absent or null; present (may be NULL) tells the two apart. */
const json_t *yard_json_get(yard_json_reader *r, const char *key, bool *present);

/* Each of these refuses an absent field, another type and a value out of range. */
uint64_t yard_json_get_u64(yard_json_reader *r, const char *key, uint64_t min, uint64_t max);
double yard_json_get_number(yard_json_reader *r, const char *key, double min, double max);
bool yard_json_get_bool(yard_json_reader *r, const char *key);

/* The field must describe as want ("'silu'", "false", "1"); optional: it may be absent or null. */
void yard_json_expect(yard_json_reader *r, const char *key, const char *want, bool optional);

/* Records "file: where.key: " and the message as the reader's failure, unless it has one. */
void yard_json_fail(yard_json_reader *r, yard_status status, const char *key, const char *fmt, ...)
    YARD_PRINTF(4, 5);

/* One warning for every member that nobody asked for and ignored (NULL-terminated, may be NULL)
 * does not list. */
void yard_json_warn_unread(const yard_json_reader *r, const char *const *ignored,
                           const yard_notify *notify);

#endif
