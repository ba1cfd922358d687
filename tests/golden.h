/* What the golden tests share: reading tests/golden/<name>.json, engines on models/demo. */
#ifndef YARD_TESTS_GOLDEN_H
#define YARD_TESTS_GOLDEN_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>
#include <jansson.h>

#include "engine/engine.h"

#define DEMO_DIR "models/demo"

static inline json_t *golden_load(const char *path)
{
    json_error_t error;
    json_t *root = json_load_file(path, 0, &error);

    if (!root)
        fail_msg("%s:%d: %s", path, error.line, error.text);
    return root;
}

/* Integers of a JSON array; malloc'd. */
static inline int32_t *golden_ids(const json_t *array, uint32_t *n)
{
    int32_t *ids = malloc((json_array_size(array) + 1) * sizeof(*ids));

    *n = (uint32_t)json_array_size(array);
    for (uint32_t i = 0; i < *n; i++)
        ids[i] = (int32_t)json_integer_value(json_array_get(array, i));
    return ids;
}

static inline float golden_float(const json_t *array, size_t i)
{
    return (float)json_number_value(json_array_get(array, i));
}

static inline const char *golden_string(const json_t *object, const char *key)
{
    return json_string_value(json_object_get(object, key));
}

static inline yard_engine *golden_engine(yard_engine_config config)
{
    yard_engine *engine = NULL;
    yard_error err = { 0 };

    config.model_dir = DEMO_DIR;
    if (yard_engine_create(&engine, &config, &err) != YARD_OK)
        fail_msg("%s", err.message);
    return engine;
}

static inline int32_t largest(const float *logits, uint32_t n)
{
    uint32_t best = 0;

    for (uint32_t i = 1; i < n; i++)
        if (logits[i] > logits[best])
            best = i;
    return (int32_t)best;
}

#endif
