/* generation_config.json: the authors' sampling defaults, and end-of-sequence ids. */
#include <stdlib.h>

#include "model/config_parts.h"

static void add_eos(int32_t *eos, uint32_t *n_eos, uint32_t n_vocab, yard_json_reader *r,
                    const json_t *id)
{
    char what[YARD_JSON_DESCRIBE_BYTES];
    const json_int_t n = json_integer_value(id);

    if (!json_is_integer(id) || n < 0 || n >= n_vocab) {
        yard_json_fail(r, YARD_EFORMAT, "eos_token_id",
                       "want an id below vocab_size %u or a list of them, found %s", n_vocab,
                       yard_json_describe(id, what));
        return;
    }
    for (uint32_t i = 0; i < *n_eos; i++)
        if (eos[i] == n)
            return;
    if (*n_eos == YARD_MAX_EOS)
        yard_json_fail(r, YARD_ENOTSUP, "eos_token_id", "at most %d ids are implemented",
                       YARD_MAX_EOS);
    else
        eos[(*n_eos)++] = (int32_t)n;
}

void yard_config_read_eos(int32_t *eos, uint32_t *n_eos, uint32_t n_vocab, yard_json_reader *r)
{
    const json_t *ids = yard_json_get(r, "eos_token_id", NULL);

    if (json_is_array(ids))
        for (size_t i = 0; i < json_array_size(ids); i++)
            add_eos(eos, n_eos, n_vocab, r, json_array_get(ids, i));
    else if (ids)
        add_eos(eos, n_eos, n_vocab, r, ids);
}

static double number_or(yard_json_reader *r, const char *key, double absent, double min, double max)
{
    return yard_json_get(r, key, NULL) ? yard_json_get_number(r, key, min, max) : absent;
}

static void read_generation(yard_generation_config *g, yard_json_reader *r)
{
    yard_sample_params *p = &g->params;

    g->do_sample = yard_json_get(r, "do_sample", NULL) && yard_json_get_bool(r, "do_sample");
    /* A file that samples without giving a temperature means 1. */
    p->temperature = (float)number_or(r, "temperature", 1, 0, 100);
    if (!g->do_sample)
        p->temperature = 0;
    p->top_p = (float)number_or(r, "top_p", 1, 1e-6, 1);
    p->min_p = (float)number_or(r, "min_p", 0, 0, 1);
    p->repetition_penalty = (float)number_or(r, "repetition_penalty", 1, 1e-3, 1e3);
    yard_config_read_eos(g->eos, &g->n_eos, INT32_MAX, r);
    if (yard_json_get(r, "top_k", NULL))
        p->top_k = (int32_t)yard_json_get_u64(r, "top_k", 0, INT32_MAX);
}

yard_status yard_generation_config_load(yard_generation_config *out, const char *dir,
                                        const yard_notify *notify, yard_error *err)
{
    static const char *const name = "generation_config.json";
    static const char *const ignored[] = { "_from_model_config",
                                           "bos_token_id",
                                           "pad_token_id",
                                           "max_length",
                                           "max_new_tokens",
                                           "transformers_version",
                                           NULL };
    yard_generation_config g = { .params = { .top_p = 1, .repetition_penalty = 1 } };
    yard_json_reader r = { .file = name, .where = "", .err = err };
    json_t *root = NULL;
    char *text = NULL;
    size_t n_bytes;
    bool absent;
    yard_status st;

    st = yard_json_read_file(&text, &n_bytes, dir, name, YARD_CONFIG_MAX_BYTES, &absent, err);
    if (!st && !absent)
        st = yard_json_parse_object(&root, text, n_bytes, name, err);
    if (root) {
        r.object = root;
        read_generation(&g, &r);
        st = r.status;
        if (!st)
            yard_json_warn_unread(&r, ignored, notify);
    }
    json_decref(root);
    free(text);
    if (!st)
        *out = g;
    return st;
}
