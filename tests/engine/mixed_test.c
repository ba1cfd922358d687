/* Checkpoints whose projections are not all FP8: some authors keep a few plain. Every mixture gives
 * about the same logits with quantised activations as without, or is refused by name. */
#include "golden.h"

#include <math.h>

#include "model/small_checkpoint.h"

enum { N_IDS = 40, N_KINDS = 6 };

struct kind {
    const char *what;
    const char *part;  /* tensors with this in their name become plain; NULL: none */
    const char *also;  /* and this; NULL: no matter */
    const char *error; /* NULL: it runs */
};

static const struct kind kinds[N_KINDS] = {
    { "all FP8", NULL, NULL, NULL },
    { "all plain", "_proj.weight", NULL, NULL },
    { "plain experts", ".mlp.experts.", NULL, NULL },
    { "plain attention", ".self_attn.", NULL, NULL },
    { "plain down projections", ".experts.", "down_proj", NULL },
    { "one plain expert", "layers.1.mlp.experts.3.up_proj", NULL,
      "model.layers.1.mlp.experts.3.up_proj.weight: dtype: want fp8_e4m3 like gate_proj of expert "
      "0, found bf16" },
};

static bool becomes_plain(const struct kind *k, const yard_tensor *t)
{
    return k->part && t->dtype == YARD_FP8_E4M3 && strstr(t->name, k->part) &&
           (!k->also || strstr(t->name, k->also));
}

/* The FP8 tensor's values in bf16; malloc'd. */
static uint16_t *plain_values(const yard_checkpoint *ckpt, const yard_tensor *t)
{
    const uint64_t rows = t->shape[0], cols = t->shape[1];
    uint16_t *values = malloc(rows * cols * sizeof(*values));
    char name[256];
    const yard_tensor *scale;

    snprintf(name, sizeof(name), "%s_scale_inv", t->name);
    scale = yard_checkpoint_find(ckpt, name);
    for (uint64_t r = 0; r < rows; r++)
        for (uint64_t c = 0; c < cols; c++)
            values[r * cols + c] = yard_bf16_from_f32(
                yard_f32_from_e4m3(((const uint8_t *)t->data)[r * cols + c]) *
                ((const float *)scale->data)[r / 128 * scale->shape[1] + c / 128]);
    return values;
}

static bool is_scale_of_plain(const yard_checkpoint *ckpt, const struct kind *k,
                              const yard_tensor *t)
{
    const char *end = strstr(t->name, "_scale_inv");
    char name[256];
    const yard_tensor *of;

    if (!end)
        return false;
    snprintf(name, sizeof(name), "%.*s", (int)(end - t->name), t->name);
    of = yard_checkpoint_find(ckpt, name);
    return of && becomes_plain(k, of);
}

static json_t *describe(const yard_tensor *t, bool plain, size_t at, size_t n_bytes)
{
    static const char *const names[] = { "F32", "BF16", "F16", "F8_E4M3" };
    json_t *shape = json_array();

    for (uint32_t d = 0; d < t->n_dims; d++)
        json_array_append_new(shape, json_integer((json_int_t)t->shape[d]));
    return json_pack("{s:s, s:o, s:[I,I]}", "dtype", plain ? "BF16" : names[t->dtype], "shape",
                     shape, "data_offsets", (json_int_t)at, (json_int_t)(at + n_bytes));
}

/* from's checkpoint as one file in to. */
static void write_mixture(const char *from, const char *to, const struct kind *k)
{
    yard_checkpoint *ckpt = NULL;
    json_t *header = json_object();
    char path[256], *text;
    FILE *data = tmpfile(), *out;
    uint64_t n_header;
    size_t at = 0, n;
    char buffer[65536];

    assert_int_equal(yard_checkpoint_open(&ckpt, from, NULL, NULL), YARD_OK);
    for (uint32_t i = 0; i < yard_checkpoint_tensor_count(ckpt); i++) {
        const yard_tensor *t = yard_checkpoint_tensor(ckpt, i);
        const bool plain = becomes_plain(k, t);
        const size_t n_bytes = plain ? 2 * t->n_bytes : t->n_bytes;
        const size_t gap = yard_align_up(at, 4) - at;

        if (is_scale_of_plain(ckpt, k, t))
            continue;
        if (gap > 0) { /* no holes are allowed: only tensors of odd size would make one */
            fail_msg("%s: %zu bytes", t->name, n_bytes);
        }
        json_object_set_new(header, t->name, describe(t, plain, at, n_bytes));
        if (plain) {
            uint16_t *values = plain_values(ckpt, t);
            fwrite(values, 1, n_bytes, data);
            free(values);
        } else {
            fwrite(t->data, 1, n_bytes, data);
        }
        at += n_bytes;
    }
    small_path(path, to, "model.safetensors");
    out = fopen(path, "wb");
    text = json_dumps(header, JSON_COMPACT);
    n_header = strlen(text);
    while (n_header % 8) /* so that the data is aligned */
        n_header++;
    fwrite(&n_header, sizeof(n_header), 1, out);
    fprintf(out, "%-*s", (int)n_header, text);
    rewind(data);
    while ((n = fread(buffer, 1, sizeof(buffer), data)) > 0)
        fwrite(buffer, 1, n, out);
    fclose(out);
    fclose(data);
    free(text);
    json_decref(header);
    yard_checkpoint_close(ckpt);
}

struct sums {
    float *logits, *drafts; /* [N_IDS, vocab] of the exact pass */
    bool exact;
    uint32_t vocab;
    double error, size, draft_error, draft_size;
};

static void take(struct sums *s, uint32_t pos, const float *x, float *kept, double *error,
                 double *size)
{
    for (uint32_t i = 0; i < s->vocab; i++) {
        const double want = (double)kept[(size_t)pos * s->vocab + i];
        if (s->exact) {
            kept[(size_t)pos * s->vocab + i] = x[i];
            continue;
        }
        *error += ((double)x[i] - want) * ((double)x[i] - want);
        *size += want * want;
    }
}

static void each(void *ctx, uint32_t pos, const float *logits, const float *draft)
{
    struct sums *s = ctx;

    take(s, pos, logits, s->logits, &s->error, &s->size);
    if (draft)
        take(s, pos, draft, s->drafts, &s->draft_error, &s->draft_size);
}

static void run_kind(const char *dir, const yard_model_config *c, const struct kind *k)
{
    struct sums s = { .vocab = c->vocab };
    int32_t ids[N_IDS];

    s.logits = calloc(N_IDS * c->vocab, sizeof(float));
    s.drafts = calloc(N_IDS * c->vocab, sizeof(float));
    for (int i = 0; i < N_IDS; i++)
        ids[i] = i * 37 % (int)c->vocab;
    for (int exact = 1; exact >= 0; exact--) {
        yard_engine_config config = YARD_ENGINE_CONFIG_INIT;
        yard_engine *engine = NULL;
        yard_error err = { 0 };

        config.model_dir = dir;
        config.mode = exact ? YARD_EXACT : YARD_QUANTISED;
        config.mtp = true;
        s.exact = exact;
        if (k->error) {
            assert_int_equal(yard_engine_create(&engine, &config, &err), YARD_ENOTSUP);
            assert_string_equal(err.message, k->error);
            continue;
        }
        if (yard_engine_create(&engine, &config, &err) != YARD_OK)
            fail_msg("%s: %s", k->what, err.message);
        assert_int_equal(yard_engine_score(engine, ids, N_IDS, 1, each, &s), YARD_OK);
        yard_engine_destroy(engine);
    }
    if (!k->error) {
        const double error = sqrt(s.error / s.size);
        const double draft_error = sqrt(s.draft_error / s.draft_size);
        print_message("%-24s relative error %.3f, drafts %.3f\n", k->what, error, draft_error);
        assert_true(error < 0.05);
        assert_true(draft_error < 0.05);
    }
    free(s.logits);
    free(s.drafts);
}

static void mixtures(void **state)
{
    char from[] = "/tmp/yard-mixed-XXXXXX";
    const yard_synth_options options = { .seed = 4, .n_threads = 1 };
    yard_model_config c = small_config();

    (void)state;
    c.routed_scale = 1.0f;
    assert_non_null(mkdtemp(from));
    assert_int_equal(yard_synth_write(from, &c, &options, NULL, NULL), YARD_OK);
    for (int i = 0; i < N_KINDS; i++) {
        char to[] = "/tmp/yard-mixed-XXXXXX", path[256], command[600];

        assert_non_null(mkdtemp(to));
        small_path(path, from, "config.json");
        snprintf(command, sizeof(command), "cp %s %s/", path, to);
        assert_int_equal(system(command), 0);
        write_mixture(from, to, &kinds[i]);
        run_kind(to, &c, &kinds[i]);
        small_remove(to);
    }
    small_remove(from);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mixtures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
