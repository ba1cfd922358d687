/* The kernels of a layer: operations, bytes and floors.
 *
 * A projection of m rows does 2 m n k operations and moves its weights, m rows of input in the
 * weights' width (with a scale per 128) and m rows of BF16 results. Absorbed attention does
 * 2 x tokens x heads x cached x (576 + 512) operations and reads a request's cache once. Grouped
 * products read the experts that have rows. Buffer copies are read and written once. */
#include <math.h>

#include "plan/plan.h"

typedef struct builder {
    const yard_plan_config *c;
    const yard_plan_model *m;
    yard_plan_kernel *kernels;
    uint32_t n;
    double t;     /* tokens */
    double heads; /* of this rank */
    uint32_t bits;
} builder;

uint32_t yard_plan_dp(const yard_plan_config *c)
{
    return c->ep / c->tp;
}

uint32_t yard_plan_slots(const yard_plan_config *c)
{
    return (c->model->n_experts + c->redundant) / c->ep;
}

uint32_t yard_plan_weight_bits(const yard_plan_config *c)
{
    return c->weight_bits ? c->weight_bits : c->model->weight_bits;
}

double yard_plan_weight_bytes(uint32_t bits, double n, double k)
{
    if (bits == 4) /* a scale byte for 16 values */
        return n * k * 0.5 + n * ceil(k / 16);
    if (bits == 8)
        return n * k + 4 * ceil(n / 128) * ceil(k / 128);
    return 2 * n * k;
}

/* Rows of activations as a projection reads them. */
static double input_bytes(uint32_t bits, double rows, double k)
{
    if (bits == 4)
        return rows * (k * 0.5 + ceil(k / 16));
    if (bits == 8)
        return rows * (k + 4 * ceil(k / 128));
    return 2 * rows * k;
}

static double peak(const yard_plan_config *c, uint32_t bits)
{
    if (bits == 4 && c->gpu->fp4_flops > 0)
        return c->gpu->fp4_flops;
    return bits == 16 ? c->gpu->bf16_flops : c->gpu->fp8_flops;
}

static yard_plan_kernel make_kernel(const yard_plan_config *c, const char *name,
                                    yard_plan_class cls, uint8_t stage, double flops, double bytes,
                                    uint32_t bits)
{
    const double compute_us = flops / peak(c, bits) * 1e6;
    const double memory_us = bytes / c->gpu->hbm_bytes_per_s * 1e6;

    return (yard_plan_kernel){ .name = name,
                               .cls = cls,
                               .stage = stage,
                               .flops = flops,
                               .bytes = bytes,
                               .peak_flops = peak(c, bits),
                               .floor_us = fmax(compute_us, memory_us),
                               .bound = compute_us > memory_us ? "compute" : "memory" };
}

static yard_plan_kernel *add(builder *b, const char *name, yard_plan_class cls, uint8_t stage,
                             double flops, double bytes, uint32_t bits)
{
    b->kernels[b->n] = make_kernel(b->c, name, cls, stage, flops, bytes, bits);
    return &b->kernels[b->n++];
}

static void add_gemm(builder *b, const char *name, uint8_t stage, double rows, double n, double k)
{
    add(b, name, YARD_PLAN_GEMM, stage, 2 * rows * n * k,
        yard_plan_weight_bytes(b->bits, n, k) + input_bytes(b->bits, rows, k) + 2 * rows * n,
        b->bits)
        ->rows = rows;
}

/* flops and bytes of one row; work of this kind is done in 32-bit arithmetic and bound by memory.
 */
static void add_vector(builder *b, const char *name, uint8_t stage, double rows, double flops,
                       double bytes)
{
    add(b, name, YARD_PLAN_VECTOR, stage, rows * flops, rows * bytes, 16);
}

static double scale_bytes(double k)
{
    return 4 * ceil(k / 128);
}

/* Ring over the DP group's NVLink: what each rank sends. */
static void add_all_reduce(builder *b, const char *name, uint8_t stage, double rows)
{
    const double tp = b->c->tp, bytes = rows * b->m->hidden * 2 * 2 * (tp - 1) / tp;
    yard_plan_kernel *k;

    if (b->c->tp == 1)
        return;
    k = add(b, name, YARD_PLAN_ALL_REDUCE, stage, 0, 0, 16);
    k->nvlink_bytes = bytes;
    k->floor_us = bytes / b->c->gpu->nvlink_bytes_per_s * 1e6;
    k->bound = "nvlink";
}

static void add_mla_decode(builder *b, double requests)
{
    const yard_plan_model *m = b->m;
    const double latent = m->kv_rank + m->rope_dims, head_io = latent + m->kv_rank;

    add(b, "k_b_bmm", YARD_PLAN_BMM, 1, 2 * b->t * b->heads * m->nope_dims * m->kv_rank,
        b->heads * (yard_plan_weight_bytes(b->bits, m->kv_rank, m->nope_dims) +
                    2 * b->t * (m->nope_dims + m->kv_rank)),
        b->bits);
    add(b, "mla_attention", YARD_PLAN_ATTENTION, 2, 2 * b->t * b->heads * b->c->kv * head_io,
        requests * b->c->kv * yard_plan_kv_row_bytes(b->c) + 2 * b->t * b->heads * head_io, 16);
    add(b, "v_b_bmm", YARD_PLAN_BMM, 2, 2 * b->t * b->heads * m->v_dims * m->kv_rank,
        b->heads * (yard_plan_weight_bytes(b->bits, m->v_dims, m->kv_rank) +
                    2 * b->t * (m->v_dims + m->kv_rank)),
        b->bits);
}

/* Prompt tokens take the multi-head form: latents are expanded once, the cached prefix included. */
static void add_mla_prefill(builder *b)
{
    const yard_plan_model *m = b->m;
    const yard_plan_config *c = b->c;
    const double prefix = (double)c->kv * b->t / c->prompt;
    const double context = c->kv + c->prompt / 2.0;
    const double head = m->nope_dims + m->rope_dims + m->v_dims;

    add_gemm(b, "kv_b_expand", 1, b->t + prefix, b->heads * (m->nope_dims + m->v_dims), m->kv_rank);
    add(b, "mla_prefill", YARD_PLAN_PREFILL_ATTENTION, 2, 2 * b->t * b->heads * context * head,
        2 * b->heads * ((2 * b->t + prefix) * head), 16);
}

static void add_mla(builder *b, double requests)
{
    const yard_plan_model *m = b->m;
    const double q_dims = b->heads * (m->nope_dims + m->rope_dims);
    const double latent = m->kv_rank + m->rope_dims;
    const double v = b->heads * m->v_dims;

    add_gemm(b, "qkv_a_proj", 1, b->t, (m->q_rank ? m->q_rank : q_dims) + latent, m->hidden);
    add_vector(b, "latent_norms_rope_append_kv", 1, b->t, 4 * (m->q_rank + latent),
               2 * (m->q_rank + latent) + m->q_rank + scale_bytes(m->q_rank) +
                   yard_plan_kv_row_bytes(b->c));
    if (m->q_rank)
        add_gemm(b, "q_b_proj", 1, b->t, q_dims, m->q_rank);
    if (b->c->phase == YARD_PLAN_DECODE)
        add_mla_decode(b, requests);
    else
        add_mla_prefill(b);
    add_vector(b, "o_quant", 2, b->t, 2 * v, 3 * v + scale_bytes(v));
    add_gemm(b, "o_proj", 2, b->t, m->hidden, v);
}

static void add_gqa(builder *b, double requests)
{
    const yard_plan_model *m = b->m;
    const yard_plan_config *c = b->c;
    const double kv_heads = fmax(1, (double)m->n_kv_heads / c->tp);
    const double q = b->heads * m->head_dims, kv = 2 * kv_heads * m->head_dims;
    const bool prefill = c->phase == YARD_PLAN_PREFILL;
    const double context = prefill ? c->kv + c->prompt / 2.0 : c->kv;
    const double cached = prefill ? b->t / c->prompt * (c->kv + c->prompt) : requests * c->kv;

    add_gemm(b, "qkv_proj", 1, b->t, q + kv, m->hidden);
    add_vector(b, "rope_append_kv", 1, b->t, 4 * (q + kv), 2 * (q + kv) + kv * c->kv_bits / 8);
    add(b, "attention", prefill ? YARD_PLAN_PREFILL_ATTENTION : YARD_PLAN_ATTENTION, 2,
        4 * b->t * q * context, cached * kv * c->kv_bits / 8 + 4 * b->t * q, 16);
    add_vector(b, "o_quant", 2, b->t, 2 * q, 3 * q + scale_bytes(q));
    add_gemm(b, "o_proj", 2, b->t, m->hidden, q);
}

static const struct mlp_names {
    const char *gate_up, *silu, *down;
} dense_names = { "dense_gate_up", "dense_silu_quant", "dense_down" },
  shared_names = { "shared_gate_up", "shared_silu_quant", "shared_down" };

static double silu_bytes(double inter)
{
    return 5 * inter + scale_bytes(inter);
}

static void add_mlp(builder *b, const struct mlp_names *names, double inter)
{
    add_gemm(b, names->gate_up, 3, b->t, 2 * inter, b->m->hidden);
    add_vector(b, names->silu, 3, b->t, 8 * inter, silu_bytes(inter));
    add_gemm(b, names->down, 3, b->t, b->m->hidden, inter);
}

double yard_plan_expert_rows(const yard_plan_config *c, double tokens)
{
    return tokens * c->model->top_k / c->tp;
}

double yard_plan_active_experts(const yard_plan_config *c, double tokens_of_group)
{
    const yard_plan_model *m = c->model;
    const double slots = yard_plan_slots(c);
    const double all = slots * c->ep;
    const double miss = 1 - m->top_k / all; /* that a token chooses some other slot */

    return slots * (1 - pow(miss, tokens_of_group));
}

static void add_group_gemm(builder *b, const char *name, double active, double rows, double n,
                           double k)
{
    add(b, name, YARD_PLAN_GROUP_GEMM, 4, 2 * rows * n * k,
        active * yard_plan_weight_bytes(b->bits, n, k) + input_bytes(b->bits, rows, k) +
            2 * rows * n,
        b->bits)
        ->rows = rows / yard_plan_slots(b->c);
}

static void add_exchange(builder *b, const char *name, uint8_t stage, double row_bytes)
{
    yard_plan_kernel *k = add(b, name, YARD_PLAN_NETWORK, stage, 0, 0, 16);
    double network_us, nvlink_us;

    yard_plan_exchange_bytes(b->c, b->t, row_bytes, &k->network_bytes, &k->nvlink_bytes);
    network_us = k->network_bytes / yard_plan_network_rate(b->c) * 1e6;
    nvlink_us = k->nvlink_bytes / b->c->gpu->nvlink_bytes_per_s * 1e6;
    k->floor_us = fmax(network_us, nvlink_us);
    k->bound = network_us > nvlink_us ? "network" : "nvlink";
    k->cls = network_us > nvlink_us ? YARD_PLAN_NETWORK : YARD_PLAN_NVLINK;
}

static void add_copy(builder *b, const char *name, uint8_t stage, double bytes)
{
    add(b, name, YARD_PLAN_COPY, stage, 0, bytes, 16);
}

static double wire_payload(const builder *b)
{
    return input_bytes(b->bits, 1, b->m->hidden);
}

static void add_experts(builder *b, double load)
{
    const yard_plan_model *m = b->m;
    const double rows = yard_plan_expert_rows(b->c, b->t) * load;
    const double active = yard_plan_active_experts(b->c, b->t * yard_plan_dp(b->c));
    const double inter = m->expert_inter;

    add_exchange(b, "dispatch", 3, yard_plan_dispatch_row_bytes(b->c));
    if (m->n_shared_experts)
        add_mlp(b, &shared_names, (double)m->n_shared_experts * inter);
    add_copy(b, "dispatch_recv_copy", 4, 2 * rows * wire_payload(b));
    add_group_gemm(b, "moe_gate_up", active, rows, 2 * inter, m->hidden);
    add_vector(b, "moe_silu_quant", 4, rows, 8 * inter, silu_bytes(inter));
    add_group_gemm(b, "moe_down", active, rows, m->hidden, inter);
    add_copy(b, "combine_send_copy", 4, 2 * rows * 2.0 * m->hidden);
    add_exchange(b, "combine", 5, yard_plan_combine_row_bytes(b->c));
    add_copy(b, "combine_recv_sum", 5,
             yard_plan_expert_rows(b->c, b->t) * 2.0 * m->hidden + 2 * b->t * 2.0 * m->hidden);
}

uint32_t yard_plan_layer_kernels(const yard_plan_config *c, yard_plan_layer_kind kind,
                                 yard_plan_rows rows,
                                 yard_plan_kernel kernels[YARD_PLAN_MAX_KERNELS])
{
    const yard_plan_model *m = c->model;
    const double h = m->hidden;
    builder b = { .c = c,
                  .m = m,
                  .kernels = kernels,
                  .t = rows.tokens,
                  .heads = (double)m->n_heads / c->tp,
                  .bits = yard_plan_weight_bits(c) };

    /* residual, what the last layer added, and the sum: BF16; out: FP8, after attention BF16 too */
    add_vector(&b, "input_norm_quant", 1, b.t, 4 * h, 7 * h + scale_bytes(h));
    if (m->attention == YARD_PLAN_MLA)
        add_mla(&b, rows.requests);
    else
        add_gqa(&b, rows.requests);
    add_all_reduce(&b, "o_all_reduce", 2, b.t);
    add_vector(&b, "post_norm_quant", 2, b.t, 4 * h, 9 * h + scale_bytes(h));
    if (kind == YARD_PLAN_DENSE_LAYER) {
        add_mlp(&b, &dense_names, (double)m->dense_inter / c->tp);
        add_all_reduce(&b, "mlp_all_reduce", 3, b.t);
        return b.n;
    }
    add(&b, "router_gemm", YARD_PLAN_GEMM, 2, 2 * b.t * h * m->n_experts,
        2 * h * m->n_experts + 2 * b.t * h + 4 * b.t * m->n_experts, 16);
    add_vector(&b, "router_topk", 2, b.t, 8.0 * m->n_experts, 4.0 * m->n_experts + 8.0 * m->top_k);
    add_experts(&b, rows.load);
    return b.n;
}

yard_plan_kernel yard_plan_head_kernel(const yard_plan_config *c, double n_rows)
{
    const double h = c->model->hidden, v = c->model->vocab;

    return make_kernel(c, "head", YARD_PLAN_GEMM, 0, 2 * n_rows * h * v,
                       2 * (h * v + n_rows * h + n_rows * v), 16);
}

yard_plan_kernel yard_plan_draft_kernel(const yard_plan_config *c, double n_rows)
{
    const double h = c->model->hidden;
    const uint32_t bits = yard_plan_weight_bits(c);

    return make_kernel(c, "draft_join", YARD_PLAN_GEMM, 0, 4 * n_rows * h * h,
                       yard_plan_weight_bytes(bits, h, 2 * h) + input_bytes(bits, n_rows, 2 * h) +
                           2 * n_rows * h,
                       bits);
}
