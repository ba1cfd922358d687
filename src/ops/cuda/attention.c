/* The attention operations of the CUDA table: which kernel, and its arguments. */
#include <math.h>

#include <cuda_runtime_api.h>

#include "ops/cuda/attention.h"
#include "ops/cuda/cuda.h"

/* ---- a stream's memory ----------------------------------------------------------------------- */

enum { SPARE_ITEMS = 2048 }; /* a block's, beyond one a row: parts of rows */

static bool has_latents(const yard_ops_limits *limits)
{
    return limits->kv_rank == MLA_RANK && limits->rope_dims == MLA_ROPE && limits->max_tokens > 0;
}

static size_t items_bytes(const yard_ops_limits *limits)
{
    return (size_t)2 * MLA_MAX_BLOCKS * (limits->max_tokens + SPARE_ITEMS) * MLA_ITEM_BYTES;
}

static const size_t splits_bytes = (size_t)2 * MLA_MAX_BLOCKS * MLA_MAX_BLOCKS * MLA_SPLIT_BYTES;

static const size_t records_bytes = (size_t)2 * MLA_MAX_BLOCKS * MLA_RECORD_BYTES;

/* Partial results of that many thread blocks. */
static size_t count_rooms(uint32_t n_blocks, bool deterministic)
{
    return (size_t)n_blocks * (deterministic ? MLA_FIXED_BLOCK_ROOMS : MLA_BLOCK_ROOMS);
}

static const size_t room_lse_bytes = MLA_ROWS * sizeof(float);

/* Heads that the tensor-core kernel expands. */
static bool expands(const yard_ops_limits *limits)
{
    return limits->nope_dims == PREFILL_NOPE && limits->v_dims == PREFILL_V &&
           limits->max_heads > 0;
}

static size_t keys_bytes(uint32_t n_clusters)
{
    return (size_t)n_clusters * PREFILL_RANGE * PREFILL_KEY * sizeof(uint16_t);
}

static size_t values_bytes(uint32_t n_clusters)
{
    return (size_t)n_clusters * PREFILL_RANGE * PREFILL_V * sizeof(uint16_t);
}

static size_t states_bytes(const yard_ops_limits *limits)
{
    return (size_t)limits->max_tokens * limits->max_heads * 2 * sizeof(float);
}

static size_t sums_bytes(const yard_ops_limits *limits)
{
    return (size_t)limits->max_tokens * limits->max_heads * PREFILL_V * sizeof(float);
}

/* At most: how many clusters there are is the device's to say. */
static size_t prefill_bytes(const yard_ops_limits *limits)
{
    return keys_bytes(PREFILL_MAX_CLUSTERS) + values_bytes(PREFILL_MAX_CLUSTERS) +
           sums_bytes(limits) + states_bytes(limits);
}

/* The most: which table and which device is not known here. */
size_t yard_cuda_attention_bytes(const yard_ops_limits *limits)
{
    if (!has_latents(limits))
        return 0;
    return items_bytes(limits) + splits_bytes + records_bytes +
           count_rooms(MLA_MAX_BLOCKS, true) * (MLA_ROOM_BYTES + room_lse_bytes) +
           sizeof(yard_mla_meeting) + (expands(limits) ? prefill_bytes(limits) : 0);
}

static yard_status take(void **out, size_t n_bytes, yard_error *err)
{
    const cudaError_t code = cudaMalloc(out, n_bytes);

    if (code != cudaSuccess)
        return yard_fail(err, YARD_ENOMEM, "cuda: attention: %zu bytes: %s", n_bytes,
                         cudaGetErrorString(code));
    return YARD_OK;
}

static yard_status take_zeros(void **out, size_t n_bytes, yard_error *err)
{
    yard_status st = take(out, n_bytes, err);

    if (st == YARD_OK && cudaMemset(*out, 0, n_bytes) != cudaSuccess)
        st = yard_fail(err, YARD_EDEVICE, "cuda: attention: cannot clear %zu bytes", n_bytes);
    return st;
}

static yard_status open_prefill(cuda_stream *s, yard_error *err)
{
    yard_prefill_workspace *w = &s->prefill;
    uint64_t n_rows;
    yard_status st = yard_cuda_mla_prefill_open(&w->n_clusters, err);

    n_rows = (uint64_t)w->n_clusters * PREFILL_RANGE;
    w->max_rows = s->limits.max_tokens;
    w->max_heads = s->limits.max_heads;
    if (st == YARD_OK)
        st = take((void **)&w->keys, keys_bytes(w->n_clusters), err);
    if (st == YARD_OK)
        st = take((void **)&w->values, values_bytes(w->n_clusters), err);
    if (st == YARD_OK)
        st = take((void **)&w->sums, sums_bytes(&s->limits), err);
    if (st == YARD_OK)
        st = take((void **)&w->states, states_bytes(&s->limits), err);
    if (st == YARD_OK)
        st = yard_cuda_encode_chunks(&w->key_map, w->keys, n_rows, PREFILL_KEY / 64,
                                     PREFILL_KEY * sizeof(uint16_t), 128, PREFILL_KEY / 64, err);
    if (st == YARD_OK)
        st = yard_cuda_encode_chunks(&w->value_map, w->values, n_rows, PREFILL_V / 64,
                                     PREFILL_V * sizeof(uint16_t), 128, PREFILL_V / 64, err);
    return st;
}

yard_status yard_cuda_attention_open(cuda_stream *s, yard_error *err)
{
    yard_mla_workspace *w = &s->mla;
    size_t n_rooms;
    yard_status st;

    if (!has_latents(&s->limits))
        return YARD_OK;
    w->max_rows = s->limits.max_tokens;
    w->max_items = w->max_rows + SPARE_ITEMS;
    w->patience_ns = MLA_PATIENCE_NS;
    st = yard_cuda_mla_decode_open(&w->n_thread_blocks, err);
    n_rooms = count_rooms(w->n_thread_blocks, s->deterministic);
    if (st == YARD_OK)
        st = take(&w->items, items_bytes(&s->limits), err);
    if (st == YARD_OK)
        st = take(&w->splits, splits_bytes, err);
    if (st == YARD_OK)
        st = take_zeros(&w->records, records_bytes, err);
    if (st == YARD_OK)
        st = take(&w->partial, n_rooms * MLA_ROOM_BYTES, err);
    if (st == YARD_OK)
        st = take((void **)&w->lse, n_rooms * room_lse_bytes, err);
    if (st == YARD_OK)
        st = take_zeros((void **)&w->meeting, sizeof(*w->meeting), err);
    if (st == YARD_OK && expands(&s->limits))
        st = open_prefill(s, err);
    return st;
}

void yard_cuda_attention_close(cuda_stream *s)
{
    cudaFree(s->mla.items);
    cudaFree(s->mla.splits);
    cudaFree(s->mla.records);
    cudaFree(s->mla.partial);
    cudaFree(s->mla.lse);
    cudaFree(s->mla.meeting);
    cudaFree(s->prefill.keys);
    cudaFree(s->prefill.values);
    cudaFree(s->prefill.sums);
    cudaFree(s->prefill.states);
}

/* ---- arguments ------------------------------------------------------------------------------- */

static yard_status check_plain(const char *op, const char *name, yard_dtype dtype, const void *data,
                               yard_error *err)
{
    if (!data || (dtype != YARD_F32 && dtype != YARD_BF16))
        return yard_fail(err, YARD_EINVAL, "%s: %s: want f32 or bf16, got %s%s", op, name,
                         yard_dtype_name(dtype), data ? "" : " without data");
    return YARD_OK;
}

/* fp8: the cache may be, with rows in whole pieces of 16 bytes. */
static yard_status check_attend(const char *op, const yard_rows *q, const yard_kv_layer *cache,
                                bool fp8, const yard_rows *y, yard_error *err)
{
    yard_status st = check_plain(op, "q", q->dtype, q->data, err);

    if (st == YARD_OK &&
        !(fp8 && cache->dtype == YARD_FP8_E4M3 && cache->data && (uintptr_t)cache->data % 16 == 0))
        st = check_plain(op, "cache", cache->dtype, cache->data, err);
    if (st == YARD_OK)
        st = check_plain(op, "y", y->dtype, y->data, err);
    return st;
}

/* bf16 in whole pieces of 16 bytes. */
static bool in_pieces(const yard_rows *r)
{
    return r->dtype == YARD_BF16 && (uintptr_t)r->data % 16 == 0 && r->ld % 8 == 0;
}

/* ---- latent attention ------------------------------------------------------------------------ */

static bool decode_fits(const cuda_stream *s, const yard_mla_decode_args *a)
{
    return s->mla.items && a->kv_rank == MLA_RANK && a->rope_dims == MLA_ROPE &&
           (a->cache.dtype == YARD_BF16 || a->cache.dtype == YARD_FP8_E4M3) &&
           a->cache.width == MLA_WIDTH && (uintptr_t)a->cache.data % 16 == 0 &&
           in_pieces(&a->q_latent) && in_pieces(&a->q) && in_pieces(&a->y) &&
           a->head_dim % 8 == 0 && a->batch->page_table_ld <= UINT16_MAX &&
           yard_ceil_div(a->n_heads, MLA_ROWS) <= s->mla.n_thread_blocks;
}

/* How many pages there are is not known. */
static yard_status map_cache(yard_mla_decode_maps *maps, const yard_kv_layer *cache,
                             yard_error *err)
{
    enum { MOST_ROWS = 1 << 30, CHUNKS = MLA_WIDTH / 64 };
    const yard_latent_row row = yard_latent_row_of(cache->dtype, MLA_RANK, MLA_ROPE);
    yard_status st;

    maps->fp8 = cache->dtype == YARD_FP8_E4M3;
    st = yard_cuda_encode_chunks(&maps->cache, cache->data, MOST_ROWS,
                                 maps->fp8 ? MLA_CODES_CHUNKS : CHUNKS, row.n_bytes,
                                 YARD_PAGE_TOKENS, maps->fp8 ? MLA_CODES_CHUNKS : CHUNKS / 3, err);
    if (st == YARD_OK && maps->fp8)
        st = yard_cuda_encode_chunks(&maps->keys, (const uint8_t *)cache->data + row.rope_at,
                                     MOST_ROWS, 1, row.n_bytes, YARD_PAGE_TOKENS, 1, err);
    return st;
}

static yard_status decode_tiles(cuda_stream *s, const yard_mla_decode_args *a, yard_error *err)
{
    const yard_mla_decode_task task = { .batch = *a->batch,
                                        .n_heads = a->n_heads,
                                        .head_dim = a->head_dim,
                                        .scale_log2 = a->softmax_scale * (float)M_LOG2E,
                                        .q_latent = a->q_latent,
                                        .q = a->q,
                                        .y = a->y,
                                        .deterministic = s->deterministic,
                                        .boxes = a->n_heads % MLA_BOX_HEADS == 0 };
    yard_mla_decode_maps maps = { 0 };
    yard_status st = map_cache(&maps, &a->cache, err);

    if (st == YARD_OK && task.boxes)
        st = yard_cuda_encode_heads(&maps.latent, (const uint16_t *)a->q_latent.data,
                                    s->limits.max_tokens, a->n_heads, MLA_RANK, a->q_latent.ld,
                                    MLA_RANK / 64, MLA_BOX_HEADS, err);
    if (st == YARD_OK && task.boxes)
        st = yard_cuda_encode_heads(
            &maps.rotated, (const uint16_t *)a->q.data + a->head_dim - MLA_ROPE,
            s->limits.max_tokens, a->n_heads, a->head_dim, a->q.ld, 1, MLA_BOX_HEADS, err);
    if (st == YARD_OK)
        st = yard_cuda_mla_decode_launch(&maps, &task, &s->mla, s->stream, err);
    return st;
}

static yard_status decode_plain(const cuda_stream *s, const yard_mla_decode_args *a,
                                yard_error *err)
{
    const yard_attend_args args = {
        .batch = *a->batch,
        .which = ATTEND_ABSORBED_ONLY,
        .n_heads = a->n_heads,
        .n_shared = a->n_heads,
        .q0 = { .rows = a->q_latent, .dims = a->kv_rank, .stride = a->kv_rank },
        .q1 = { .rows = a->q,
                .dims = a->rope_dims,
                .stride = a->head_dim,
                .first = a->head_dim - a->rope_dims },
        .cache = a->cache,
        .kv_rank = a->kv_rank,
        .cached = yard_latent_row_of(a->cache.dtype, a->kv_rank, a->rope_dims),
        .n_v = a->kv_rank,
        .scale = a->softmax_scale,
        .y = a->y,
    };

    return yard_cuda_attend_launch(&args, s->limits.max_tokens, s->stream, err);
}

void yard_cuda_mla_decode(yard_stream stream, const yard_mla_decode_args *a)
{
    cuda_stream *s = cuda_of(stream);
    yard_error err = { 0 };
    yard_status st = check_attend("mla_decode", &a->q, &a->cache, true, &a->y, &err);

    if (st == YARD_OK)
        st = check_plain("mla_decode", "q_latent", a->q_latent.dtype, a->q_latent.data, &err);
    if (st == YARD_OK)
        decode_fits(s, a) ? decode_tiles(s, a, &err) : decode_plain(s, a, &err);
    yard_cuda_set_error(s, &err);
}

static bool prefill_fits(const cuda_stream *s, const yard_mla_prefill_args *a)
{
    const struct yard_prepared *w = a->kv_b.prepared;
    const bool fp8 = w->all.dtype == YARD_FP8_E4M3;

    return s->prefill.states && a->kv_rank == PREFILL_RANK && a->nope_dims == PREFILL_NOPE &&
           a->rope_dims == PREFILL_ROPE && a->v_dims == PREFILL_V &&
           a->n_heads <= s->prefill.max_heads &&
           (a->cache.dtype == YARD_BF16 || a->cache.dtype == YARD_FP8_E4M3) &&
           a->cache.width == MLA_WIDTH && (uintptr_t)a->cache.data % 16 == 0 && in_pieces(&a->q) &&
           in_pieces(&a->y) && w->tiled && a->quantise == fp8;
}

static yard_status prefill_tiles(const cuda_stream *s, const yard_mla_prefill_args *a,
                                 yard_error *err)
{
    const struct yard_prepared *w = a->kv_b.prepared;
    const yard_prefill_task task = { .batch = *a->batch,
                                     .n_heads = a->n_heads,
                                     .scale_log2 = a->softmax_scale * (float)M_LOG2E,
                                     .q = a->q,
                                     .y = a->y,
                                     .cache = a->cache,
                                     .fp8 = a->quantise,
                                     .ue8m0 = a->ue8m0,
                                     .w_first = a->kv_b.prepared_idx * w->padded_rows,
                                     .w_scale = a->kv_b.scale,
                                     .w_scale_ld = a->kv_b.scale_ld };

    return yard_cuda_mla_prefill_launch(&w->map, &task, &s->prefill, s->stream, err);
}

void yard_cuda_mla_prefill(yard_stream stream, const yard_mla_prefill_args *a)
{
    cuda_stream *s = cuda_of(stream);
    yard_error err = { 0 };
    yard_status st = check_attend("mla_prefill", &a->q, &a->cache, true, &a->y, &err);

    if (st == YARD_OK && !a->kv_b.prepared)
        st = yard_fail(&err, YARD_EINVAL,
                       "mla_prefill: kv_b: want weights that prepare made, got others");
    if (st == YARD_OK && prefill_fits(s, a))
        prefill_tiles(s, a, &err);
    else if (st == YARD_OK)
        yard_cuda_attend_expanded_launch(a, s->limits.max_tokens, s->stream, &err);
    yard_cuda_set_error(s, &err);
}

/* ---- grouped-query attention ----------------------------------------------------------------- */

static bool gqa_fits(const yard_gqa_attend_args *a)
{
    return (a->head_dim == 64 || a->head_dim == 128) && a->n_heads / a->n_kv_heads <= 16 &&
           a->cache.dtype == YARD_BF16 && (uintptr_t)a->cache.data % 16 == 0 &&
           a->cache.width % 8 == 0 && in_pieces(&a->q) && in_pieces(&a->y);
}

void yard_cuda_gqa_attend(yard_stream stream, const yard_gqa_attend_args *a)
{
    cuda_stream *s = cuda_of(stream);
    yard_error err = { 0 };
    const yard_status st = check_attend("gqa_attend", &a->q, &a->cache, false, &a->y, &err);
    const yard_attend_args args = {
        .batch = *a->batch,
        .which = ATTEND_ALL_ROWS,
        .n_heads = a->n_heads,
        .n_shared = a->n_heads / a->n_kv_heads,
        .q0 = { .rows = a->q, .dims = a->head_dim, .stride = a->head_dim },
        .cache = a->cache,
        .key_stride = a->head_dim,
        .value_first = a->n_kv_heads * a->head_dim,
        .value_stride = a->head_dim,
        .n_v = a->head_dim,
        .window = a->window,
        .scale = a->softmax_scale,
        .y = a->y,
    };

    if (st == YARD_OK && gqa_fits(a))
        yard_cuda_gqa_launch(&args, s->limits.max_tokens, s->stream, &err);
    else if (st == YARD_OK)
        yard_cuda_attend_launch(&args, s->limits.max_tokens, s->stream, &err);
    yard_cuda_set_error(s, &err);
}
