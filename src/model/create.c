/* Creating a model: what it needs, checks, and the memory under its buffers. */
#include <stdlib.h>

#include "model/forward_impl.h"
#include "model/memory.h"

static const yard_layout one_rank = { 1, 1, 1 };

static uint32_t max_u32(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

/* What the host fills; the page table comes last, so that its unused end need not travel. */
static void lay_out_inputs(yard_model *m, yard_arena *arena)
{
    const yard_model_options *o = &m->options;
    const size_t t = o->max_tokens * sizeof(int32_t);

    m->n_logits = yard_arena_take(arena, sizeof(int32_t));
    m->logit_index = yard_arena_take(arena, o->max_logits * sizeof(int32_t));
    m->count = yard_arena_take(arena, (1 + YARD_MAX_HALVES) * sizeof(int32_t));
    m->step.token = yard_arena_take(arena, t);
    m->step.position = yard_arena_take(arena, t);
    m->step.seq = yard_arena_take(arena, t);
    m->step.absorbed = yard_arena_take(arena, o->max_tokens);
    if (o->mtp)
        m->next_token = yard_arena_take(arena, t);
    m->page_table_at = arena->used_bytes;
    m->step.page_table =
        yard_arena_take(arena, (size_t)o->max_seqs * o->max_pages_per_seq * sizeof(int32_t));
}

static void lay_out_experts(yard_model *m, yard_arena *arena)
{
    const yard_model_config *c = &m->config;
    const uint32_t n = m->share.experts.n;

    m->expert_count = yard_arena_take(arena, n * sizeof(int32_t));
    m->offset = yard_arena_take(arena, (n + 1) * sizeof(int32_t));
    m->expert_x = yard_activation_take(m, arena, m->expert_rows, c->hidden);
    m->expert_gate_up = yard_rows_take(arena, m->plain, m->expert_rows, 2 * c->expert_inter);
    m->expert_mid = yard_activation_take(m, arena, m->expert_rows, c->expert_inter);
}

static uint32_t cached_layers(const yard_model *m)
{
    return m->config.n_layers + (m->options.mtp ? 1 : 0);
}

static uint32_t cache_width(const yard_model *m)
{
    return yard_model_kv_width(&m->config, m->options.layout.tp);
}

static size_t layer_cache_bytes(const yard_model *m)
{
    return (size_t)m->options.n_pages * YARD_PAGE_TOKENS *
           yard_model_kv_row_bytes(&m->config, m->options.layout.tp, m->cached);
}

/* Called twice: to measure, then to place. */
static void lay_out(yard_model *m, yard_arena *arena)
{
    const yard_model_config *c = &m->config;
    const yard_model_options *o = &m->options;

    m->inv_freq = yard_arena_take(arena, (c->rope_dims / 2 + 1) * sizeof(float));
    yard_part_lay_out(m, &m->all, arena);
    lay_out_experts(m, arena);
    m->selected = yard_arena_take(arena, (size_t)o->max_logits * c->hidden * sizeof(float));
    m->selected_norm = yard_activation_take(m, arena, o->max_logits, c->hidden);
    m->logits = yard_arena_take(arena, (size_t)o->max_logits * c->vocab * sizeof(float));
    if (o->mtp) {
        m->next_embed = yard_arena_take(arena, (size_t)o->max_tokens * c->hidden * sizeof(float));
        m->joined = yard_rows_take(arena, m->plain, o->max_tokens, 2 * c->hidden);
    }
    for (uint32_t i = 0; i < cached_layers(m); i++) {
        void *data = yard_arena_take(arena, layer_cache_bytes(m));
        if (arena->base)
            m->layers[i].cache = (yard_kv_layer){ m->cached, cache_width(m), data };
    }
}

static yard_status check_fabric(const yard_model_options *o, yard_error *err)
{
    const yard_layout l = o->layout;

    if (l.ep > 1 && (!o->fabric || yard_fabric_size(o->fabric) != l.ep ||
                     yard_fabric_rank(o->fabric) != o->rank))
        return yard_fail(err, YARD_EINVAL, "fabric: want rank %u of %u, got %s", o->rank, l.ep,
                         o->fabric ? "another" : "none");
    return l.tp > 1 ? yard_layout_check_nodes(l, o->fabric, err) : YARD_OK;
}

static yard_status check_cache(const yard_model_config *config, const yard_model_options *o,
                               yard_error *err)
{
    if (o->fp8_cache && config->attention != YARD_ATTENTION_MLA)
        return yard_fail(
            err, YARD_ENOTSUP,
            "KV cache fp8: want a model that caches latents, got %s, which caches keys "
            "and values: bf16 only",
            config->family);
    if (o->fp8_cache && o->exact)
        return yard_fail(err, YARD_EINVAL,
                         "KV cache fp8: want quantised mode, got exact, which rounds nothing");
    return YARD_OK;
}

/* Layout, mode and what follows from them. */
static yard_status choose(yard_model *m, const yard_model_config *config,
                          const yard_model_options *options, yard_error *err)
{
    yard_model_options *const o = &m->options;
    yard_status st;

    m->config = *config;
    *o = *options;
    if (o->layout.ep == 0)
        o->layout = one_rank;
    if (!o->ops)
        o->ops = &yard_ops_cpu;
    st = yard_layout_check(config, o->layout, o->exact, err);
    if (st == YARD_OK && o->rank >= o->layout.ep)
        st = yard_fail(err, YARD_EINVAL, "rank: want below EP %u, got %u", o->layout.ep, o->rank);
    if (st == YARD_OK)
        st = check_cache(config, o, err);
    if (st == YARD_OK)
        st = yard_exchange_size(&m->config, o, &m->expert_rows, &m->heap_bytes, err);
    if (st != YARD_OK)
        return st;
    m->share = yard_layout_share(config, o->layout, o->rank);
    o->mtp = options->mtp && config->n_mtp > 0;
    m->plain = options->exact ? YARD_F32 : YARD_BF16;
    m->cached = options->fp8_cache ? YARD_FP8_E4M3 : m->plain;
    m->quantise = config->fp8 && !options->exact;
    return YARD_OK;
}

static yard_status allocate_inputs(yard_model *m, yard_error *err)
{
    const yard_mirror *in = &m->inputs;
    yard_arena arena = { 0 };
    yard_status st;

    lay_out_inputs(m, &arena);
    st = yard_mirror_open(m, &m->inputs, arena.used_bytes, err);
    if (st != YARD_OK)
        return st;
    arena = (yard_arena){ .base = in->host, .size_bytes = in->n_bytes };
    lay_out_inputs(m, &arena);
    m->all.batch = (yard_batch){ .n_tokens = yard_mirrored(in, &m->count[0]),
                                 .token = yard_mirrored(in, m->step.token),
                                 .position = yard_mirrored(in, m->step.position),
                                 .seq = yard_mirrored(in, m->step.seq),
                                 .absorbed = yard_mirrored(in, m->step.absorbed),
                                 .page_table = yard_mirrored(in, m->step.page_table),
                                 .page_table_ld = m->options.max_pages_per_seq };
    return YARD_OK;
}

static yard_status bring_inv_freq(yard_model *m, yard_error *err)
{
    const uint32_t n = m->config.rope_dims / 2 + 1;
    float *inv_freq = yard_alloc(n * sizeof(*inv_freq));
    yard_status st;

    if (!inv_freq)
        return yard_fail(err, YARD_ENOMEM, "model: %u frequencies", n);
    yard_model_inv_freq(&m->config, inv_freq);
    st = m->ops->upload(m->stream, m->inv_freq, inv_freq, n * sizeof(*inv_freq), err);
    free(inv_freq);
    return st;
}

static yard_status allocate(yard_model *m, yard_error *err)
{
    yard_arena arena = { 0 };
    yard_status st;

    m->layers = yard_alloc(cached_layers(m) * sizeof(*m->layers));
    if (!m->layers)
        return yard_fail(err, YARD_ENOMEM, "model: %u layers", cached_layers(m));
    lay_out(m, &arena);
    m->block_bytes = arena.used_bytes;
    if (m->ops->allocate(&m->block, m->stream, m->block_bytes, NULL) != YARD_OK)
        return yard_fail(err, YARD_ENOMEM,
                         "cache of %u pages and buffers for %u rows: want %zu MB, the %s refused",
                         m->options.n_pages, m->options.max_tokens, m->block_bytes / 1000000,
                         m->ops->in_host_memory ? "system" : "device");
    arena = (yard_arena){ .base = m->block, .size_bytes = m->block_bytes };
    lay_out(m, &arena);
    for (uint32_t i = 0; i < m->config.n_layers; i++)
        m->layers[i].w = &m->weights->layers[i];
    if (m->options.mtp)
        m->layers[m->config.n_layers].w = &m->weights->mtp[0].layer;
    m->softmax_scale = yard_model_softmax_scale(&m->config);
    m->step.max_rows = m->options.max_tokens;
    st = bring_inv_freq(m, err);
    return st == YARD_OK ? allocate_inputs(m, err) : st;
}

static yard_ops_config ops_config(const yard_model *m)
{
    const yard_model_config *c = &m->config;
    uint32_t max_in = max_u32(2 * c->hidden, c->n_heads * c->v_dims);
    yard_ops_config config = { .n_threads = m->options.n_threads,
                               .variant = m->options.variant,
                               .choices = m->options.choices,
                               .pin = m->options.pin };

    max_in = max_u32(max_in, max_u32(c->dense_inter, c->q_rank));
    max_in = max_u32(max_in, max_u32(c->n_shared_experts, 1) * c->expert_inter);
    config.limits = (yard_ops_limits){ .max_tokens = m->options.max_tokens,
                                       .max_rows = (uint32_t)m->expert_rows,
                                       .max_in = max_in,
                                       .max_vocab = c->vocab,
                                       .max_experts = c->n_experts,
                                       .max_heads = c->n_heads,
                                       .kv_rank = c->kv_rank,
                                       .nope_dims = c->nope_dims,
                                       .rope_dims = c->rope_dims,
                                       .v_dims = c->v_dims };
    return config;
}

static yard_status open_stream(yard_model *m, yard_error *err)
{
    const yard_ops_config config = ops_config(m);
    const yard_status st = m->options.ops->open(&m->stream, &config, err);

    if (st == YARD_OK)
        m->ops = m->options.ops;
    return st;
}

yard_status yard_model_budget_of(const yard_model_config *config, const yard_model_options *options,
                                 yard_model_budget *out, yard_error *err)
{
    yard_model m = { 0 };
    yard_arena arena = { 0 };
    yard_rank_memory memory;
    yard_ops_config ops;
    yard_status st = choose(&m, config, options, err);

    if (st == YARD_OK)
        st = yard_model_rank_memory(config, m.options.layout, m.options.rank, &memory, err);
    if (st != YARD_OK)
        return st;
    lay_out(&m, &arena);
    lay_out_inputs(&m, &arena);
    ops = ops_config(&m);
    out->weight_bytes = memory.weight_bytes + (m.options.mtp ? memory.mtp_weight_bytes : 0);
    out->heap_bytes = m.heap_bytes;
    out->cache_bytes = (uint64_t)cached_layers(&m) * layer_cache_bytes(&m);
    out->scratch_bytes = arena.used_bytes - out->cache_bytes + m.options.ops->workspace_bytes(&ops);
    return YARD_OK;
}

/* What prepare keeps beside the weights: kv_b's key half, transposed. */
static uint64_t transposed_bytes(const yard_model *m)
{
    const yard_model_config *c = &m->config;

    if (m->ops->in_host_memory || c->attention == YARD_ATTENTION_GQA)
        return 0;
    return (uint64_t)cached_layers(m) * m->share.heads.n * c->nope_dims * c->kv_rank *
           (c->fp8 ? 1 : c->plain_bytes);
}

/* A device takes all of it at once; a host as it is used. The stream has its workspace already. */
static yard_status check_memory(const yard_model *m, yard_error *err)
{
    uint64_t available = UINT64_MAX, want;
    const yard_ops_config ops = ops_config(m);
    yard_model_budget b;
    yard_status st = yard_model_budget_of(&m->config, &m->options, &b, err);

    if (st == YARD_OK)
        st = m->ops->available(&available, m->stream, err);
    if (st != YARD_OK)
        return st;
    b.weight_bytes += transposed_bytes(m);
    want = b.weight_bytes + b.cache_bytes + b.scratch_bytes - m->ops->workspace_bytes(&ops);
    if (want <= available)
        return YARD_OK;
    return yard_fail(err, YARD_ENOMEM,
                     "device %s: want %.1f GB (weights %.1f, cache %.1f, buffers %.1f), %.1f are "
                     "free: take fewer tokens of KV cache or a smaller model",
                     m->ops->name, (double)want * 1e-9, (double)b.weight_bytes * 1e-9,
                     (double)b.cache_bytes * 1e-9, (double)b.scratch_bytes * 1e-9,
                     (double)available * 1e-9);
}

static const char *dtype_of(const yard_matrix *w)
{
    return yard_dtype_name(w->dtype);
}

/* A grouped product reads the rows of all its experts in one form: plain, or FP8. gate and up read
 * the dispatched rows, down those between. */
static yard_status check_experts(const yard_model *m, uint32_t layer_idx,
                                 const yard_layer_weights *layer, yard_error *err)
{
    const yard_moe_weights *w = &layer->moe;
    const uint32_t first = m->share.experts.first;
    const struct {
        const char *name;
        const yard_matrix *experts, *like;
    } kinds[] = { { "gate_proj", w->gate, &w->gate[0] },
                  { "up_proj", w->up, &w->gate[0] },
                  { "down_proj", w->down, &w->down[0] } };

    for (uint32_t k = 0; k < 3; k++)
        for (uint32_t e = 0; e < m->share.experts.n; e++)
            if (kinds[k].experts[e].dtype != kinds[k].like->dtype)
                return yard_fail(err, YARD_ENOTSUP,
                                 "model.layers.%u.mlp.experts.%u.%s.weight: dtype: want %s like "
                                 "%s of expert %u, found %s",
                                 layer_idx, first + e, kinds[k].name, dtype_of(kinds[k].like),
                                 k == 2 ? "down_proj" : "gate_proj", first,
                                 dtype_of(&kinds[k].experts[e]));
    /* All layers share one form of rows on the wire. */
    if (m->options.layout.ep > 1 && m->quantise && w->gate[0].dtype != YARD_FP8_E4M3)
        return yard_fail(err, YARD_ENOTSUP,
                         "model.layers.%u.mlp.experts.%u.gate_proj.weight: dtype: want fp8_e4m3 "
                         "like the other layers' experts when there are several ranks, found %s",
                         layer_idx, first, dtype_of(&w->gate[0]));
    return YARD_OK;
}

static yard_status check_layers(const yard_model *m, yard_error *err)
{
    const uint32_t n = m->config.n_layers;
    yard_status st = YARD_OK;

    for (uint32_t i = 0; i < n && st == YARD_OK; i++)
        if (m->weights->layers[i].is_moe)
            st = check_experts(m, i, &m->weights->layers[i], err);
    if (st == YARD_OK && m->options.mtp && m->weights->mtp[0].layer.is_moe)
        st = check_experts(m, n, &m->weights->mtp[0].layer, err);
    return st;
}

yard_status yard_model_create(yard_model **out, const char *dir, const yard_model_config *config,
                              const yard_model_options *options, const yard_notify *notify,
                              yard_error *err)
{
    yard_model *m = yard_alloc(sizeof(*m));
    yard_status st;

    if (!m)
        return yard_fail(err, YARD_ENOMEM, "model: %zu bytes", sizeof(*m));
    st = choose(m, config, options, err);
    if (st == YARD_OK)
        st = check_fabric(&m->options, err);
    if (st == YARD_OK)
        st = open_stream(m, err);
    if (st == YARD_OK)
        st = check_memory(m, err);
    if (st == YARD_OK)
        st = yard_weights_load(&m->weights, dir, config, &m->share,
                               options->n_threads ? options->n_threads : yard_cpu_count(), notify,
                               err);
    if (st == YARD_OK)
        st = yard_checkpoint_identity(m->weights->ckpt, dir, m->identity, err);
    if (st == YARD_OK)
        st = check_layers(m, err);
    if (st == YARD_OK)
        st = allocate(m, err);
    if (st == YARD_OK)
        st = yard_model_place_weights(m, notify, err);
    if (st == YARD_OK)
        st = yard_exchange_create(m, err);
    if (st != YARD_OK) {
        yard_model_destroy(m);
        return st;
    }
    *out = m;
    return YARD_OK;
}

void yard_model_destroy(yard_model *m)
{
    if (!m)
        return;
    yard_exchange_destroy(m);
    if (m->ops) {
        yard_model_release_replays(m);
        yard_model_release_weights(m);
        yard_mirror_close(m, &m->inputs);
        yard_mirror_close(m, &m->sampling);
        m->ops->release(m->stream, m->block);
        m->ops->close(m->stream);
    }
    free(m->read_logits);
    free(m->layers);
    yard_weights_free(m->weights);
    free(m);
}

yard_status yard_model_rejoin(yard_model *m, yard_fabric *fabric, yard_error *err)
{
    yard_model_release_replays(m); /* of kernels of the old group */
    yard_exchange_destroy(m);
    m->failed = YARD_OK;
    m->options.fabric = fabric;
    return yard_exchange_create(m, err);
}

yard_step *yard_model_step(yard_model *m)
{
    return &m->step;
}

const char *yard_model_describe(const yard_model *m)
{
    return m->ops->describe(m->stream);
}

const char *yard_model_identity(const yard_model *m)
{
    return m->identity;
}

bool yard_model_has_mtp(const yard_model *m)
{
    return m->options.mtp;
}

void yard_model_set_trace(yard_model *m, void (*fn)(void *ctx, const yard_layer_trace *trace),
                          void *ctx)
{
    m->trace = fn;
    m->trace_ctx = ctx;
}
