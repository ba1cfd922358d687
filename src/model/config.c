/* config.json: the family it belongs to, and the family's fields. */
#include "model/config.h"

#include <stdio.h>
#include <stdlib.h>

#include "model/config_families.h"
#include "model/config_parts.h"

enum { MAX_BLOCK_ROWS = 1 << 16 };

/* What the families of this architecture (NULL: all of them) bear there, each once: "'a' and 'b'
 * are". */
static void list_names(const char *architecture, bool model_types, char text[160])
{
    const char *names[8];
    uint32_t n = 0;
    size_t at = 0;

    for (uint32_t i = 0; i < yard_family_count(); i++) {
        const yard_family *f = &yard_families[i];
        const char *const name = model_types ? f->model_type : f->architecture;
        if ((!architecture || !strcmp(f->architecture, architecture)) &&
            (n == 0 || strcmp(names[n - 1], name) != 0))
            names[n++] = name;
    }
    for (uint32_t i = 0; i < n; i++)
        at += (size_t)snprintf(text + at, 160 - at, "%s'%s'",
                               i == 0       ? ""
                               : i + 1 == n ? " and "
                                            : ", ",
                               names[i]);
    snprintf(text + at, 160 - at, n == 1 ? " is" : " are");
}

/* One of the families of an architecture by its model_type; absent means the first. */
static const yard_family *find_by_type(yard_json_reader *r, const char *architecture)
{
    char what[YARD_JSON_DESCRIBE_BYTES], list[160];
    const json_t *type = yard_json_get(r, "model_type", NULL);

    for (uint32_t i = 0; i < yard_family_count(); i++) {
        const yard_family *f = &yard_families[i];
        if (!strcmp(f->architecture, architecture) &&
            (!type || (json_is_string(type) && !strcmp(f->model_type, json_string_value(type)))))
            return f;
    }
    list_names(architecture, true, list);
    yard_json_fail(r, YARD_ENOTSUP, "model_type",
                   "of architecture '%s' only %s implemented, found %s", architecture, list,
                   yard_json_describe(type, what));
    return NULL;
}

/* By the top-level architecture: nested parts of multimodal models may claim another one. */
static const yard_family *find_family(yard_json_reader *r)
{
    char what[YARD_JSON_DESCRIBE_BYTES], known[160];
    bool present;
    const json_t *list = yard_json_get(r, "architectures", &present);
    const char *name =
        json_array_size(list) == 1 ? json_string_value(json_array_get(list, 0)) : NULL;

    if (!name && present)
        yard_json_fail(r, YARD_EFORMAT, "architectures", "want a list of one name, found %s",
                       yard_json_describe(list, what));
    else if (!name)
        yard_json_fail(r, YARD_EFORMAT, "architectures", "missing");
    if (!name)
        return NULL;
    for (uint32_t i = 0; i < yard_family_count(); i++)
        if (!strcmp(yard_families[i].architecture, name))
            return find_by_type(r, name);
    list_names(NULL, false, known);
    yard_json_fail(r, YARD_ENOTSUP, "architectures", "only %s implemented, found '%.64s'", known,
                   name);
    return NULL;
}

static void read_sizes(yard_model_config *c, const yard_family *f, yard_json_reader *r)
{
    for (const yard_size_field *s = f->sizes; s->key; s++) {
        const json_t *raw = json_object_get(r->object, s->key);
        uint32_t value = 0;
        if ((s->presence != YARD_REQUIRED && json_is_null(raw)) ||
            (s->presence == YARD_OPTIONAL && !raw))
            yard_json_get(r, s->key, NULL);
        else
            value = (uint32_t)yard_json_get_u64(r, s->key, s->min, s->max);
        memcpy((char *)c + s->offset, &value, sizeof(value));
    }
    for (const yard_fixed_field *x = f->fixed; x->key; x++)
        yard_json_expect(r, x->key, x->want, x->optional);
}

/* DeepSeek-V2's: "greedy" ignores groups. Weights are normalised, or else scaled. */
static void read_greedy(yard_model_config *c, yard_json_reader *r)
{
    char what[YARD_JSON_DESCRIBE_BYTES];
    const json_t *method = yard_json_get(r, "topk_method", NULL);

    yard_json_describe(method, what);
    if (!method)
        yard_json_fail(r, YARD_EFORMAT, "topk_method", "missing");
    else if (!strcmp(what, "'greedy'"))
        c->n_groups = c->top_groups = 1;
    else if (strcmp(what, "'group_limited_greedy'") != 0)
        yard_json_fail(r, YARD_ENOTSUP, "topk_method",
                       "only 'greedy' and 'group_limited_greedy' are implemented, found %s", what);
    else if (c->n_groups == 0 || c->top_groups == 0)
        yard_json_fail(r, YARD_EFORMAT, c->n_groups ? "topk_group" : "n_group",
                       "missing, which topk_method 'group_limited_greedy' needs");
    c->normalise_topk = c->normalise_topk && c->top_k > 1;
    if (c->normalise_topk)
        c->routed_scale = 1;
}

static void read_routing(yard_model_config *c, const yard_family *f, yard_json_reader *r)
{
    if (f->routing == YARD_ROUTING_NORMALISED) {
        c->normalise_topk = true;
        c->routed_scale = 1;
        c->n_groups = c->top_groups = 1;
        return;
    }
    c->normalise_topk = yard_json_get_bool(r, "norm_topk_prob");
    c->routed_scale = (float)yard_json_get_number(r, "routed_scaling_factor", 1e-6, 1e6);
    if (f->routing == YARD_ROUTING_GREEDY)
        read_greedy(c, r);
}

static void read_quantisation(yard_model_config *c, yard_json_reader *r, const yard_notify *notify)
{
    static const char *const ignored[] = { "modules_to_not_convert", NULL };
    yard_json_reader in = { .file = r->file, .where = "quantization_config.", .err = r->err };
    const json_t *block, *object = yard_json_get(r, "quantization_config", NULL);
    char what[YARD_JSON_DESCRIBE_BYTES];

    if (!object || r->status)
        return;
    if (!json_is_object(object)) {
        yard_json_fail(r, YARD_EFORMAT, "quantization_config", "want an object, found %s",
                       yard_json_describe(object, what));
        return;
    }
    in.object = object;
    c->fp8 = true;
    yard_json_expect(&in, "quant_method", "'fp8'", false);
    yard_json_expect(&in, "fmt", "'e4m3'", true); /* each tensor says its dtype anyway */
    yard_json_expect(&in, "activation_scheme", "'dynamic'", false);
    yard_json_expect(&in, "scale_fmt", "'ue8m0'", true);
    c->ue8m0 = json_is_string(json_object_get(object, "scale_fmt"));
    block = yard_json_get(&in, "weight_block_size", NULL);
    if (!block)
        yard_json_fail(&in, YARD_EFORMAT, "weight_block_size", "missing");
    else if (json_array_size(block) != 2 || !json_is_integer(json_array_get(block, 0)) ||
             !json_is_integer(json_array_get(block, 1)))
        yard_json_fail(&in, YARD_EFORMAT, "weight_block_size", "want two whole numbers, found %s",
                       yard_json_describe(block, what));
    else {
        const json_int_t rows = json_integer_value(json_array_get(block, 0));
        const json_int_t cols = json_integer_value(json_array_get(block, 1));
        if (rows < 1 || rows > MAX_BLOCK_ROWS || cols != YARD_GROUP)
            yard_json_fail(&in, YARD_ENOTSUP, "weight_block_size",
                           "only [1 to %d, %d] is implemented, found [%lld, %lld]", MAX_BLOCK_ROWS,
                           YARD_GROUP, (long long)rows, (long long)cols);
        c->block_rows = (uint32_t)rows;
    }
    if (!in.status)
        yard_json_warn_unread(&in, ignored, notify);
    r->status = in.status;
}

/* The dtype of what is not FP8, for counting bytes; each tensor says its own when it is read. */
static void read_dtype(yard_model_config *c, yard_json_reader *r)
{
    const char *const key = yard_json_get(r, "dtype", NULL) ? "dtype" : "torch_dtype";
    const json_t *value = yard_json_get(r, key, NULL);

    c->plain_bytes = json_is_string(value) && !strcmp(json_string_value(value), "float32") ? 4 : 2;
}

static void read_token_ids(yard_model_config *c, yard_json_reader *r)
{
    c->bos = -1;
    if (yard_json_get(r, "bos_token_id", NULL))
        c->bos = (int32_t)yard_json_get_u64(r, "bos_token_id", 0, c->vocab ? c->vocab - 1 : 0);
    yard_config_read_eos(c->eos, &c->n_eos, c->vocab, r);
}

/* Grouped-query attention: the whole of a head turns. */
static void complete_heads(yard_model_config *c, yard_json_reader *r)
{
    if (r->status)
        return;
    if (c->n_heads % c->n_kv_heads)
        yard_json_fail(r, YARD_EFORMAT, "num_key_value_heads",
                       "want a divisor of num_attention_heads %u, found %u", c->n_heads,
                       c->n_kv_heads);
    if (c->rope_dims == 0 && (c->hidden % c->n_heads || c->hidden / c->n_heads < 2 ||
                              c->hidden / c->n_heads > YARD_MAX_HEAD_DIMS))
        yard_json_fail(r, YARD_EFORMAT, "head_dim",
                       "missing, and hidden_size %u does not give one for %u heads", c->hidden,
                       c->n_heads);
    if (c->rope_dims == 0)
        c->rope_dims = c->hidden / c->n_heads;
    c->v_dims = c->rope_dims;
}

static void check_heads(yard_model_config *c, yard_json_reader *r)
{
    const bool gqa = c->attention == YARD_ATTENTION_GQA;

    if (gqa)
        complete_heads(c, r);
    else if (c->n_kv_heads != c->n_heads)
        yard_json_fail(r, YARD_ENOTSUP, "num_key_value_heads",
                       "want num_attention_heads %u, found %u", c->n_heads, c->n_kv_heads);
    if (c->rope_dims % 2)
        yard_json_fail(r, YARD_EFORMAT, gqa ? "head_dim" : "qk_rope_head_dim",
                       "want an even number, found %u", c->rope_dims);
}

static void check_experts(const yard_model_config *c, yard_json_reader *r)
{
    uint32_t n_eligible;

    if (c->n_dense_layers > c->n_layers)
        yard_json_fail(r, YARD_EFORMAT, "first_k_dense_replace",
                       "want at most num_hidden_layers %u, found %u", c->n_layers,
                       c->n_dense_layers);
    if (r->status || c->n_groups == 0)
        return;
    if (c->n_experts % c->n_groups)
        yard_json_fail(r, YARD_EFORMAT, "n_group",
                       "want a divisor of n_routed_experts %u, found %u", c->n_experts,
                       c->n_groups);
    if (c->top_groups > c->n_groups)
        yard_json_fail(r, YARD_EFORMAT, "topk_group", "want at most n_group %u, found %u",
                       c->n_groups, c->top_groups);
    n_eligible = c->top_groups * (c->n_experts / c->n_groups);
    if (c->top_k > n_eligible)
        yard_json_fail(r, YARD_EFORMAT, "num_experts_per_tok",
                       "want at most the %u experts of topk_group groups, found %u", n_eligible,
                       c->top_k);
    if ((uint64_t)c->n_shared_experts * c->expert_inter > YARD_MAX_INTER)
        yard_json_fail(r, YARD_EFORMAT, "n_shared_experts",
                       "want at most %d rows in all, found %u of %u", YARD_MAX_INTER,
                       c->n_shared_experts, c->expert_inter);
}

static void read_model(yard_model_config *c, yard_json_reader *r, const yard_notify *notify)
{
    const yard_family *f = find_family(r);

    if (!f)
        return;
    yard_family_apply(f, c);
    read_sizes(c, f, r);
    read_routing(c, f, r);
    c->norm_eps = (float)yard_json_get_number(r, "rms_norm_eps", 1e-30, 1);
    c->tied_embedding = yard_json_get_bool(r, "tie_word_embeddings");
    check_heads(c, r);
    check_experts(c, r);
    yard_config_read_rope(c, r, notify);
    read_quantisation(c, r, notify);
    read_token_ids(c, r);
    read_dtype(c, r);
    if (!r->status)
        yard_json_warn_unread(r, f->ignored, notify);
}

yard_status yard_model_config_parse(yard_model_config *out, const char *json, size_t n_bytes,
                                    const char *name, const yard_notify *notify, yard_error *err)
{
    yard_model_config c = { 0 };
    yard_json_reader r = { .file = name, .where = "", .err = err };
    json_t *root = NULL;
    yard_status st = yard_json_parse_object(&root, json, n_bytes, name, err);

    if (st)
        return st;
    r.object = root;
    read_model(&c, &r, notify);
    json_decref(root);
    if (!r.status)
        *out = c;
    return r.status;
}

yard_status yard_model_config_load(yard_model_config *out, const char *dir,
                                   const yard_notify *notify, yard_error *err)
{
    static const char *const name = "config.json";
    yard_model_config c = { 0 };
    char *text = NULL;
    size_t n_bytes = 0;
    yard_status st;

    st = yard_json_read_file(&text, &n_bytes, dir, name, YARD_CONFIG_MAX_BYTES, NULL, err);
    if (!st)
        st = yard_model_config_parse(&c, text, n_bytes, name, notify, err);
    free(text);
    if (!st && c.n_eos == 0)
        st = yard_fail(err, YARD_EFORMAT, "config.json: eos_token_id: missing");
    if (!st)
        *out = c;
    return st;
}
