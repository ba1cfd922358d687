/* switchyard bench ops: every operation of a table at the sizes of a model, beside what the
 * hardware could do at best. */
#include "cli/bench_ops_run.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { MAX_THREADS = 1024, MAX_TOKENS = 1 << 16, MAX_CONTEXT = 1 << 20, MAX_EXPERTS = 4096 };
enum {
    KEY_DEVICE = 0x1000,
    KEY_MODEL,
    KEY_OPS,
    KEY_TOKENS,
    KEY_CONTEXT,
    KEY_EXPERTS,
    KEY_THREADS,
    KEY_VARIANT,
    KEY_PIN,
    KEY_KV_DTYPE,
    KEY_TABLE,
    KEY_REPEAT,
    KEY_BLAS
};

static const yard_bench_ops_device *const devices[] = { &yard_bench_ops_cpu, &yard_bench_ops_cuda };
enum { DEFAULT_EXPERTS = 32 };
enum { N_DEVICES = sizeof(devices) / sizeof(devices[0]) };

static error_t parse(int key, char *arg, struct argp_state *state)
{
    ops_args *a = state->input;
    yard_error err = { 0 };

    switch (key) {
    case KEY_DEVICE:
        a->device = arg;
        break;
    case KEY_MODEL:
        a->model = arg;
        break;
    case KEY_OPS:
        a->ops = arg;
        break;
    case KEY_TOKENS:
        if (yard_bench_parse_list("--tokens", arg, MAX_TOKENS, &a->tokens, &err) != YARD_OK)
            argp_error(state, "%s", err.message);
        break;
    case KEY_CONTEXT:
        a->context = yard_cli_argp_u64(state, "--context", arg, 1, MAX_CONTEXT);
        break;
    case KEY_KV_DTYPE:
        a->kv_dtype = yard_cli_argp_kv_dtype(state, arg);
        break;
    case KEY_EXPERTS:
        a->n_experts = yard_cli_argp_u64(state, "--experts", arg, 1, MAX_EXPERTS);
        break;
    case KEY_THREADS:
        a->n_threads = yard_cli_argp_u64(state, "--threads", arg, 1, MAX_THREADS);
        break;
    case KEY_VARIANT:
        a->variant = yard_cli_argp_cpu_variant(state, arg);
        break;
    case KEY_PIN:
        a->pin = yard_cli_argp_pin(state, arg);
        break;
    case KEY_TABLE:
        if (strcmp(arg, "fast") != 0 && strcmp(arg, "deterministic") != 0)
            argp_error(state, "--table: want fast or deterministic, got '%s'", arg);
        a->table = arg;
        break;
    case KEY_BLAS:
        a->blas = arg;
        break;
    case KEY_REPEAT:
        a->n_repeats = yard_cli_argp_u64(state, "--repeat", arg, 1, 100000);
        break;
    case 'j':
        a->json = true;
        break;
    default:
        return ARGP_ERR_UNKNOWN;
    }
    return 0;
}

static const struct argp_option option_list[] = {
    { "device", KEY_DEVICE, "NAME", 0, "cpu or cuda (default cpu)", 0 },
    { "model", KEY_MODEL, "NAME", 0,
      "An architecture's name, or a directory with a config.json (default deepseek-v3)", 0 },
    { "ops", KEY_OPS, "LIST", 0, "Operations, or uses of them such as q_b (default: all)", 0 },
    { "tokens", KEY_TOKENS, "LIST", 0, "Numbers of tokens (default 1,16,512)", 0 },
    { "context", KEY_CONTEXT, "N", 0, "Cached positions that decoding reads (default 1024)", 0 },
    { "kv-dtype", KEY_KV_DTYPE, "TYPE", 0, "Cache of latents: bf16 (default) or fp8", 0 },
    { "experts", KEY_EXPERTS, "N", 0, "Experts of this rank (default 32, or all)", 0 },
    { "table", KEY_TABLE, "NAME", 0, "fast or deterministic (default: all the device has)", 0 },
    { "threads", KEY_THREADS, "N", 0, "CPU threads (default: all processors)", 0 },
    { "pin", KEY_PIN, "WHERE", 0, YARD_CLI_PIN_HELP, 0 },
    { "cpu-variant", KEY_VARIANT, "NAME", 0, YARD_CLI_CPU_VARIANT_HELP, 0 },
    { "repeat", KEY_REPEAT, "N", 0, "Timed calls of a case, at most 2 s of them (default 30)", 0 },
    { "blas", KEY_BLAS, "LIBRARY", 0,
      "Beside each linear, the same product by sgemm of this library (libopenblas.so.0)", 0 },
    { "json", 'j', NULL, 0, "One JSON object a row", 0 },
    { 0 },
};

static const struct argp ops_argp = {
    .options = option_list,
    .parser = parse,
    .doc = "Measures the operations of one layer at a model's dimensions, with random values."
           "\v\"fraction\" is the floor over the median. The floor is the longer of two times: the "
           "bytes of the call at the rate of a plain read, and its operations at the rate of "
           "multiply-adds, both measured in the same run with as many threads. Calls walk over so "
           "many copies that caches do not help. \"verified\" says that a piece of each result is "
           "what the plain C definition gives.\n\n"
           "Examples:\n"
           "  switchyard bench ops\n"
           "  switchyard bench ops --model deepseek-v2-lite --ops linear,grouped_linear \\\n"
           "      --tokens 1\n"
           "  switchyard bench ops --ops mla_decode --context 5000 --kv-dtype fp8\n"
           "  switchyard bench ops --device cuda --json >rows.jsonl &&\n"
           "      switchyard plan --gpu h200 --measured rows.jsonl\n",
};

typedef yard_status (*case_fn)(ops_bench *b, const yard_bench_ops_case *c, yard_error *err);

static bool is_wanted(const ops_bench *b, const yard_bench_ops_case *c)
{
    const yard_bench_ops_size size = { .model = &b->model };

    return c->applies(&size) && (!b->args.ops || yard_bench_is_listed(b->args.ops, c->op) ||
                                 yard_bench_is_listed(b->args.ops, c->what));
}

static const yard_bench_ops_case *(*const files[])(uint32_t *) = {
    yard_bench_ops_products, yard_bench_ops_latent, yard_bench_ops_gqa,
    yard_bench_ops_moe,      yard_bench_ops_rows,   yard_bench_ops_sample
};
enum { N_FILES = sizeof(files) / sizeof(files[0]) };

/* An operation of any model, or a use of one. */
static bool is_known(const char *name)
{
    for (size_t f = 0; f < N_FILES; f++) {
        uint32_t n;
        const yard_bench_ops_case *list = files[f](&n);

        for (uint32_t i = 0; i < n; i++)
            if (!strcmp(list[i].op, name) || !strcmp(list[i].what, name))
                return true;
    }
    return false;
}

/* Every operation once, in the order of the tables. */
static void list_ops(char *text, size_t n_bytes)
{
    const char *last = "";
    size_t at = 0;

    for (size_t f = 0; f < N_FILES; f++) {
        uint32_t n;
        const yard_bench_ops_case *list = files[f](&n);

        for (uint32_t i = 0; i < n && at < n_bytes; last = list[i++].op)
            if (strcmp(list[i].op, last) != 0)
                at += (size_t)snprintf(text + at, n_bytes - at, "%s, ", list[i].op);
    }
    snprintf(text + (at < n_bytes ? at : n_bytes - 1), at < n_bytes ? n_bytes - at : 1,
             "or uses such as q_b");
}

static yard_status walk(ops_bench *b, uint32_t *n_found, case_fn fn, yard_error *err)
{
    yard_status st = YARD_OK;

    *n_found = 0;
    for (size_t f = 0; f < N_FILES; f++) {
        uint32_t n;
        const yard_bench_ops_case *list = files[f](&n);

        for (uint32_t i = 0; i < n && !st; i++)
            if (is_wanted(b, &list[i])) {
                ++*n_found;
                st = fn ? fn(b, &list[i], err) : YARD_OK;
            }
    }
    return st;
}

/* Tables that grow operation by operation do not have all of them. */
static bool has_op(const yard_ops *ops, const char *op)
{
    static const struct {
        const char *name;
        size_t at;
    } list[] = {
#define OP(name) { #name, offsetof(yard_ops, name) }
        OP(linear),      OP(grouped_linear), OP(head_linear),    OP(mla_decode),
        OP(mla_prefill), OP(moe_route),      OP(moe_scatter),    OP(moe_gather),
        OP(rope_q),      OP(rope_append_kv), OP(rms_norm_quant), OP(silu_mul_quant),
        OP(gqa_attend),  OP(gqa_append_kv),  OP(quantise),       OP(residual_add),
        OP(sample),
#undef OP
    };
    void (*fn)(void) = NULL;

    for (size_t i = 0; i < sizeof(list) / sizeof(list[0]); i++)
        if (!strcmp(list[i].name, op))
            memcpy(&fn, (const char *)ops + list[i].at, sizeof(fn));
    return fn != NULL;
}

static yard_status bench_tokens(ops_bench *b, const yard_bench_ops_case *c, yard_error *err)
{
    yard_status st = YARD_OK;

    if (!has_op(b->ops, c->op))
        return YARD_OK;
    for (uint32_t i = 0; i < b->args.tokens.n && !st; i++)
        st = yard_bench_ops_time_case(b, c, b->args.tokens.value[i], err);
    return st;
}

static uint32_t max_u32(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

static yard_ops_limits limits_of(const ops_bench *b)
{
    const yard_model_config *m = &b->model;
    uint32_t n_tokens = 1;

    for (uint32_t i = 0; i < b->args.tokens.n; i++)
        n_tokens = max_u32(n_tokens, b->args.tokens.value[i]);
    return (yard_ops_limits){
        .max_tokens = n_tokens,
        .max_in = max_u32(max_u32(m->hidden, m->n_heads * max_u32(m->v_dims, m->kv_rank)),
                          max_u32(max_u32(m->dense_inter, m->q_rank),
                                  max_u32(1, m->n_shared_experts) * m->expert_inter)),
        .max_vocab = m->vocab,
        .max_experts = max_u32(1, m->n_experts),
        .max_heads = m->n_heads,
        .kv_rank = m->kv_rank,
        .nope_dims = m->nope_dims,
        .rope_dims = m->rope_dims,
        .v_dims = m->v_dims,
    };
}

static yard_status find_device(ops_bench *b, yard_error *err)
{
    for (int i = 0; i < N_DEVICES; i++)
        if (!strcmp(devices[i]->name, b->args.device))
            b->device = devices[i];
    if (!b->device)
        return yard_fail(err, YARD_ENOTSUP, "--device: want cpu or cuda, got '%s'", b->args.device);
    if (!yard_ops_find(b->device->name))
        return yard_fail(err, YARD_ENOTSUP,
                         "--device: this build has no %s: it was made without nvcc",
                         b->args.device);
    return YARD_OK;
}

static yard_status choose_experts(ops_bench *b, yard_error *err)
{
    const uint32_t all = b->model.n_experts;

    if (b->args.n_experts > all)
        return yard_fail(err, YARD_EINVAL, "--experts: want at most the %u of %s, got %" PRIu64,
                         all, b->args.model, b->args.n_experts);
    if (b->args.n_experts == 0)
        b->args.n_experts = all < DEFAULT_EXPERTS ? all : DEFAULT_EXPERTS;
    return YARD_OK;
}

/* An architecture by its name, or else a directory. */
static yard_status find_model(ops_bench *b, yard_error *err)
{
    const bool is_name = yard_synth_dimensions(&b->model, b->args.model, NULL) == YARD_OK;
    const bool is_path =
        strchr(b->args.model, '/') || yard_cli_check_model(b->args.model, NULL) == YARD_OK;
    const yard_status st =
        is_path && !is_name
            ? yard_model_config_load(&b->model, b->args.model, yard_cli_notify(), err)
            : yard_synth_dimensions(&b->model, b->args.model, err);

    if (!st && b->args.kv_dtype == YARD_KV_FP8 && b->model.attention != YARD_ATTENTION_MLA)
        return yard_fail(err, YARD_ENOTSUP,
                         "--kv-dtype fp8: want a model that caches latents, got %s", b->args.model);
    return st ? st : choose_experts(b, err);
}

/* One of the device's tables. */
static yard_status bench_table(ops_bench *b, const char *name, yard_error *err)
{
    yard_ops_config config = b->config;
    yard_status st;
    uint32_t n;

    b->table = name;
    b->ops = b->device->table(name);
    if (!b->ops)
        return YARD_OK;
    if (b->device->tables_are_variants)
        config.variant = name;
    st = b->ops->open(&b->stream, &config, err);
    if (!st)
        st = walk(b, &n, bench_tokens, err);
    if (b->stream)
        b->ops->close(b->stream);
    b->stream = NULL;
    return st;
}

static yard_status bench_all(ops_bench *b, yard_error *err)
{
    static const char *const tables[] = { "fast", "deterministic" };
    const yard_ops_config definition = { .n_threads = b->config.n_threads,
                                         .variant = "c",
                                         .limits = b->config.limits };
    yard_status st = yard_ops_cpu.open(&b->definition, &definition, err);

    if (!st && b->args.blas)
        st = yard_bench_blas_open(&b->blas, b->args.blas, b->config.n_threads, err);
    b->read_rate = st ? 0 : b->device->read_rate(&b->config);
    for (int i = 0; i < 2 && !st; i++)
        if (!b->args.table || !strcmp(b->args.table, tables[i]))
            st = bench_table(b, tables[i], err);
    yard_ops_cpu.close(b->definition);
    yard_bench_blas_close(b->blas);
    if (b->pool)
        b->device->release(b->pool, b->pool_bytes);
    if (!st && b->n_rows == 0)
        st = yard_fail(err, YARD_ENOTSUP, "--table: %s has no %s table", b->device->name,
                       b->args.table);
    return st;
}

static yard_status prepare(ops_bench *b, yard_error *err)
{
    yard_status st = find_device(b, err);
    uint32_t n = 0;

    if (!st)
        st = find_model(b, err);
    if (!st && b->args.ops) {
        char names[512];

        list_ops(names, sizeof(names));
        st = yard_bench_check_names("--ops", b->args.ops, is_known, names, err);
    }
    if (!st)
        st = walk(b, &n, NULL, err);
    if (!st && n == 0)
        st = yard_fail(err, YARD_EINVAL, "--ops: no operation of %s is named in '%s'",
                       b->args.model, b->args.ops ? b->args.ops : "");
    b->config = (yard_ops_config){ .n_threads = b->args.n_threads ? (uint32_t)b->args.n_threads
                                                                  : yard_cpu_count(),
                                   .variant = b->args.variant,
                                   .pin = b->args.pin,
                                   .limits = limits_of(b) };
    return st;
}

int yard_bench_ops(int argc, char **argv)
{
    ops_bench b = { .args = { .device = "cpu",
                              .model = "deepseek-v3",
                              .tokens = { 3, { 1, 16, 512 } },
                              .context = 1024,
                              .n_repeats = 30 } };
    yard_error err = { 0 };
    yard_status st;
    int rc;

    yard_cli_parse_args(&ops_argp, "switchyard bench ops", argc, argv, 0, &b.args);
    st = prepare(&b, &err);
    if (st == YARD_OK) {
        yard_bench_print_head(b.args.json);
        st = bench_all(&b, &err);
    }
    if (st == YARD_OK && b.n_wrong > 0)
        st = yard_fail(&err, YARD_EDEVICE, "%u of %u rows are not what the definition gives",
                       b.n_wrong, b.n_rows);
    rc = yard_cli_close_stdout("bench ops");
    if (st != YARD_OK)
        rc = yard_cli_fail("bench ops", &err);
    return rc;
}
