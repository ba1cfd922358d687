/* The planner: what a deployment will give before it is bought.
 *
 *     yard_plan_config c = YARD_PLAN_CONFIG_INIT;
 *     c.model = yard_plan_model_find("deepseek-v3");
 *     c.gpu = yard_plan_gpu_find("h100");
 *     c.profile = yard_plan_profile_find("article");
 *     c.ep = 128; c.batch = 128; c.schedule = YARD_PLAN_MICRO_BATCH;
 *     yard_plan_point(&c, &result, &err);
 *
 * From model dimensions and device rates: the kernels of a layer with their operations and bytes,
 * the step on a virtual clock in the order of the engine's own stage tables, memory, and what comes
 * out a second. Each kernel says where its efficiency comes from. Structs are plain data; what a
 * config points to must outlive the call. Times are microseconds and GB are 10^9 bytes unless a
 * name says otherwise. Threads: every call may run at any time; there is no shared state. */
#ifndef YARD_PLAN_H
#define YARD_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <yard/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Where a number comes from. */
typedef enum yard_plan_origin {
    YARD_PLAN_ASSUMED,   /* a judgement */
    YARD_PLAN_PUBLISHED, /* printed by somebody; the source is named beside it */
    YARD_PLAN_FITTED,    /* chosen so that published times come out */
    YARD_PLAN_MEASURED,  /* from a measurement file of this program or of this project's machines */
    YARD_PLAN_EXACT,     /* a count, or a floor: no efficiency in it */
    YARD_PLAN_GIVEN      /* by the user */
} yard_plan_origin;
YARD_API const char *yard_plan_origin_name(yard_plan_origin origin); /* static */

enum { YARD_PLAN_NAME_BYTES = 32, YARD_PLAN_MAX_KERNELS = 32, YARD_PLAN_WHY_BYTES = 192 };

/* models */

typedef enum yard_plan_attention { YARD_PLAN_MLA, YARD_PLAN_GQA } yard_plan_attention;

typedef struct yard_plan_model {
    size_t size;
    char name[YARD_PLAN_NAME_BYTES];
    yard_plan_attention attention;
    uint32_t vocab, hidden, n_layers, n_dense_layers; /* the first n_dense_layers have no experts */
    uint32_t n_heads, n_kv_heads, head_dims;          /* the latter two: GQA */
    uint32_t q_rank, kv_rank, nope_dims, rope_dims, v_dims; /* MLA; q_rank 0: one projection */
    uint32_t dense_inter, expert_inter;
    uint32_t n_experts, n_shared_experts, top_k, n_groups,
        top_groups; /* n_experts 0: dense model */
    uint32_t n_mtp;
    bool router_bias;     /* one correction value an expert counts as a parameter */
    uint32_t weight_bits; /* 8: FP8 with a scale per 128 x 128; 16; 4: a scale byte per 16 */
} yard_plan_model;

/* Built-in: deepseek-v3, deepseek-v2-lite, kimi-k2, mixtral-8x7b, llama-3-70b. NULL if there is no
 * such name. yard_plan_model_at(i) lists them and ends with NULL. */
YARD_API const yard_plan_model *yard_plan_model_find(const char *name);
YARD_API const yard_plan_model *yard_plan_model_at(uint32_t i);

/* From dir/config.json, whatever the engine can load. Errors: YARD_EIO, YARD_EFORMAT, YARD_ENOTSUP.
 */
YARD_API yard_status yard_plan_model_load(yard_plan_model *out, const char *dir, yard_error *err);

typedef struct yard_plan_params {
    uint64_t total;  /* without MTP modules */
    uint64_t active; /* of one token, with head, without embedding */
    uint64_t active_with_embedding;
    uint64_t attention_per_layer, dense_mlp, expert, router, embedding;
} yard_plan_params;
YARD_API void yard_plan_count_params(const yard_plan_model *m, yard_plan_params *out);
/* Parameters a step reads that touches n_experts different experts in every MoE layer, with head.
 */
YARD_API uint64_t yard_plan_params_read(const yard_plan_model *m, uint32_t n_experts);
/* 8 bits of a latent: codes with an f32 scale per 128 and the rotated key in bf16, as the engine
 * caches them. */
YARD_API uint64_t yard_plan_kv_bytes_per_token(const yard_plan_model *m, uint32_t kv_bits);

/* hardware */

/* A GPU as deployed: rates of one GPU, and of its share of the links. */
typedef struct yard_plan_gpu {
    size_t size;
    char name[YARD_PLAN_NAME_BYTES];
    double hbm_gb;
    double hbm_bytes_per_s;
    double fp8_flops, bf16_flops, fp4_flops; /* dense; fp4 0: FP4 weights compute in FP8 */
    double nvlink_bytes_per_s;               /* one direction */
    double network_bytes_per_s;              /* one direction */
    uint32_t gpus_per_node;                  /* a machine */
    uint32_t gpus_per_island;                /* one NVLink domain */
    double price_per_hour;                   /* USD a GPU */
    yard_plan_origin origin, price_origin;
    const char *source;
} yard_plan_gpu;

YARD_API const yard_plan_gpu *yard_plan_gpu_find(const char *name);
YARD_API const yard_plan_gpu *yard_plan_gpu_at(uint32_t i);

/* A user's file: a JSON object of the fields above ("gpus_per_island" and the prices may be
 * missing). Errors: YARD_EIO; YARD_EFORMAT naming an unknown or missing field, and the legal ones.
 */
YARD_API yard_status yard_plan_gpu_load(yard_plan_gpu *out, const char *path, yard_error *err);

typedef struct yard_plan_nic {
    size_t size;
    char name[YARD_PLAN_NAME_BYTES];
    double bytes_per_s;      /* per GPU, one direction */
    double extra_latency_us; /* over a NIC the GPU drives itself */
    yard_plan_origin origin;
    const char *source;
} yard_plan_nic;

YARD_API const yard_plan_nic *yard_plan_nic_find(const char *name);
YARD_API const yard_plan_nic *yard_plan_nic_at(uint32_t i);

/* efficiencies */

typedef enum yard_plan_class {
    YARD_PLAN_GEMM,
    YARD_PLAN_GROUP_GEMM,
    YARD_PLAN_ATTENTION,
    YARD_PLAN_PREFILL_ATTENTION,
    YARD_PLAN_BMM,
    YARD_PLAN_VECTOR, /* norms, quantisation, SiLU, top-k */
    YARD_PLAN_COPY,   /* into and out of exchange buffers */
    YARD_PLAN_NVLINK,
    YARD_PLAN_NETWORK,
    YARD_PLAN_ALL_REDUCE, /* of TP, over NVLink */
    YARD_PLAN_CLASS_COUNT
} yard_plan_class;
YARD_API const char *yard_plan_class_name(yard_plan_class c); /* static */

/* time = fixed_us + max(operations / (peak x compute), bytes / (rate x memory)). Links use memory
 * and fixed_us. half_rows: rows a group at which compute reaches half of its value; 0: constant. */
typedef struct yard_plan_share {
    double compute, memory, fixed_us, half_rows;
    yard_plan_origin origin;
    const char *source;
} yard_plan_share;

/* A measured all-to-all: time = base_us + us_per_token x (tokens of a rank - 1), both copies in. */
typedef struct yard_plan_exchange {
    uint32_t ep;
    double dispatch_base_us, dispatch_us_per_token, combine_base_us, combine_us_per_token;
} yard_plan_exchange;

typedef struct yard_plan_profile {
    size_t size;
    char name[YARD_PLAN_NAME_BYTES];
    const char *what;
    yard_plan_share share[YARD_PLAN_CLASS_COUNT];
    const yard_plan_exchange
        *exchange; /* [n_exchange]; used where EP, model shape and links match */
    uint32_t n_exchange;
    const char *exchange_source;
    /* of the time an exchange takes without rows (base_us, fixed_us), what its send and receive
     * kernels spend on the device: nothing can be hidden behind that */
    double exchange_kernel_us;
    /* share of the multiprocessors that throughput exchange kernels hold: prefill across nodes */
    double exchange_sm_share;
    yard_plan_origin exchange_origin;
    double stretch; /* every kernel's time on the device times this: what a whole stack loses */
    yard_plan_origin stretch_origin;
    double step_us; /* scheduling, sampling and launch of a step that no kernel covers */
    yard_plan_origin step_origin;
} yard_plan_profile;

/* Built-in: floor (nothing lost), article, public, deepseek, sglang, trtllm, trtllm-2025. */
YARD_API const yard_plan_profile *yard_plan_profile_find(const char *name);
YARD_API const yard_plan_profile *yard_plan_profile_at(uint32_t i);

/* Replaces shares of a profile by what rows of `switchyard bench --json` at path reached. Errors:
 * YARD_EIO; YARD_EFORMAT; YARD_EINVAL when the rows come from other hardware than gpu, or none of
 * them is of a known benchmark. */
YARD_API yard_status yard_plan_profile_measure(yard_plan_profile *profile, const yard_plan_gpu *gpu,
                                               const char *path, yard_error *err);

/* one point */

typedef enum yard_plan_schedule {
    YARD_PLAN_NONE,
    YARD_PLAN_DISPATCH_OVERLAP,
    YARD_PLAN_MICRO_BATCH,
    YARD_PLAN_MICRO_BATCH_STAGES, /* the other reading of the order: stage by stage */
    YARD_PLAN_SCHEDULE_COUNT
} yard_plan_schedule;
YARD_API const char *yard_plan_schedule_name(yard_plan_schedule s); /* static */

typedef enum yard_plan_phase { YARD_PLAN_DECODE, YARD_PLAN_PREFILL } yard_plan_phase;

/* How often a token crosses the wire. */
typedef enum yard_plan_copies {
    YARD_PLAN_PER_EXPERT, /* once for each expert: the articles, low-latency kernels */
    YARD_PLAN_PER_RANK,   /* once for each rank that holds one of its experts */
    YARD_PLAN_PER_NODE    /* once for each island, then NVLink */
} yard_plan_copies;

typedef struct yard_plan_config {
    size_t size;
    const yard_plan_model *model;     /* required */
    const yard_plan_gpu *gpu;         /* required */
    const yard_plan_nic *nic;         /* NULL: what the GPU's entry says */
    const yard_plan_profile *profile; /* required */
    yard_plan_phase phase;
    yard_plan_schedule schedule;
    yard_plan_copies copies;
    uint32_t ep, tp;    /* ep = dp x tp ranks */
    uint32_t redundant; /* expert slots beyond one an expert, in the whole group */
    uint32_t batch;     /* decode: requests of a DP group */
    uint32_t query;     /* decode: tokens a step and request, drafts included */
    uint32_t kv;        /* decode: cached tokens of a request; prefill: cached prefix of a prompt */
    uint32_t prompt;    /* prefill: new tokens of a prompt */
    uint32_t chunk;     /* prefill: tokens of a DP group in a step */
    double acceptance;  /* of a drafted token, [0, 1] */
    double imbalance;   /* busiest rank's rows over the mean, >= 1 */
    const double
        *load; /* [n_load] measured rows of each rank, any unit, or NULL; replaces imbalance */
    uint32_t n_load;
    uint32_t weight_bits, kv_bits; /* weight_bits 0: the model's; kv_bits 16 or 8 */
    bool no_draft;                 /* the draft module is not run, though query > 1 */
    bool kv_one_scale; /* kv_bits 8: the cache has 8 bits of every value, one scale for all, as
                          TensorRT-LLM's: 576 bytes a token and layer of DeepSeek-V3, not 656 */
} yard_plan_config;

#define YARD_PLAN_CONFIG_INIT                                                                      \
    {                                                                                              \
        .size = sizeof(yard_plan_config), .ep = 1, .tp = 1, .batch = 1, .query = 2, .kv = 5000,    \
        .prompt = 4096, .chunk = 16384, .acceptance = 0.6, .imbalance = 1.0, .kv_bits = 16         \
    }

typedef struct yard_plan_memory {
    double weights_gb, mtp_gb, exchange_gb, graphs_gb, scratch_gb, kv_gb, total_gb;
    uint32_t max_batch;       /* requests of a DP group that fit with all of these */
    uint32_t max_batch_bound; /* with weights and cache alone */
} yard_plan_memory;

typedef struct yard_plan_kernel {
    const char *name; /* static */
    yard_plan_class cls;
    uint8_t stage; /* 1 to 5, 0: outside of layers */
    double rows;   /* of a product, mean of its groups; 0: no product */
    double flops, bytes;
    double peak_flops; /* a second, of the arithmetic it uses */
    double network_bytes, nvlink_bytes;
    double floor_us, us;
    const char *bound; /* "compute", "memory", "network", "nvlink" */
    yard_plan_origin origin;
} yard_plan_kernel;

typedef struct yard_plan_result {
    uint32_t dp, n_gpus;
    uint32_t rows_per_rank; /* tokens a rank's DP group computes in a step */
    double rows_per_expert; /* m, mean over all slots */
    double active_experts;  /* expected, of one rank */
    double layer_us;        /* a MoE layer, in place in the step */
    double layer_floor_us;  /* by the rates alone, with perfect hiding */
    double dense_layer_us, head_us, draft_us, other_us;
    double step_us, step_floor_us;
    double tokens_per_step; /* of one request */
    double tokens_per_s_per_request, tokens_per_s_per_gpu, tokens_per_s_per_node;
    double prompt_us; /* prefill: one step, the time to a first token without queueing */
    /* parts of a MoE layer; dispatch and combine hold the waiting that nothing hid */
    double dispatch_us, combine_us, group_gemm_us, gemm_us, attention_us, rest_us;
    double wire_us, idle_us; /* the links' busy time; the GPU's time without work */
    yard_plan_memory memory;
    bool fits;
    bool split;                    /* micro-batches were possible */
    char why[YARD_PLAN_WHY_BYTES]; /* why it does not fit; "" */
    const char *bound;             /* what a step waits for most */
    uint32_t n_kernels;
    yard_plan_kernel kernel[YARD_PLAN_MAX_KERNELS]; /* of one MoE layer with the whole batch */
} yard_plan_result;

/* Errors: YARD_EINVAL naming the field, what is legal and the nearest legal value. A point that
 * does not fit in memory is no error: fits is false. */
YARD_API yard_status yard_plan_point(const yard_plan_config *config, yard_plan_result *out,
                                     yard_error *err);

/* Floors of a MoE layer with perfect hiding, for the whole batch; micro_batch_us is negative when
 * there is one request. Buffer copies count as compute. */
typedef struct yard_plan_floors {
    double no_overlap_us, dispatch_overlap_us, micro_batch_us, dense_layer_us, head_us, step_us;
} yard_plan_floors;
YARD_API yard_status yard_plan_floor(const yard_plan_config *config, yard_plan_floors *out,
                                     yard_error *err);

/* Memory of one rank. kv_b_on_all_ranks: count the articles' copy of kv_b on every TP rank. */
YARD_API yard_status yard_plan_memory_of(const yard_plan_config *config, bool kv_b_on_all_ranks,
                                         yard_plan_memory *out, yard_error *err);

/* What the clock saw, for drawings: one call per piece of work. */
typedef struct yard_plan_event {
    uint32_t rank_class; /* 0: the busiest ranks */
    uint32_t layer, half;
    uint8_t stage;        /* 1 to 5 */
    const char *resource; /* "compute", "copy", "network" */
    const char *what;     /* "shared expert", "dispatch", ... */
    double start_us, end_us;
} yard_plan_event;
YARD_API yard_status yard_plan_timeline(const yard_plan_config *config, uint32_t n_layers,
                                        void (*fn)(void *ctx, const yard_plan_event *event),
                                        void *ctx, yard_error *err);

/* validation */

typedef enum yard_plan_half { YARD_PLAN_FIT_HALF, YARD_PLAN_BLIND_HALF } yard_plan_half;

/* One published run with its conditions, and what the planner says. */
typedef struct yard_plan_deployment {
    const char *id, *what, *conditions, *source, *stack; /* static */
    yard_plan_half half;
    double published; /* in unit; 0: withheld */
    double predicted;
    double error; /* predicted / published - 1 */
    const char *unit;
    yard_plan_config config;
    yard_plan_result result;
} yard_plan_deployment;

enum { YARD_PLAN_MAX_DEPLOYMENTS = 40 };

/* Predicts all of them; profile replaces every stack's own when not NULL. *n_out is how many. */
YARD_API yard_status yard_plan_predict(yard_plan_deployment out[YARD_PLAN_MAX_DEPLOYMENTS],
                                       const yard_plan_profile *profile, uint32_t *n_out,
                                       yard_error *err);

/* The stretch and step time that make the fit half of a stack come out best, and the largest error
 * that is left there. YARD_EINVAL for an unknown stack. */
YARD_API yard_status yard_plan_fit(const char *stack, double *stretch, double *step_us,
                                   double *worst, yard_error *err);

/* One check against a number that is known: a count, a floor, a published time. */
typedef struct yard_plan_check_result {
    const char *id, *what; /* static */
    double expected, got, tolerance;
    bool at_least; /* got >= expected is enough */
    bool passed;
} yard_plan_check_result;

enum { YARD_PLAN_MAX_CHECKS = 128 };
YARD_API yard_status yard_plan_run_checks(yard_plan_check_result out[YARD_PLAN_MAX_CHECKS],
                                          uint32_t *n_out, yard_error *err);

/* sweep */

typedef struct yard_plan_sweep {
    size_t size;
    const uint32_t *ep, *tp, *batch; /* [n_..] */
    uint32_t n_ep, n_tp, n_batch;
    const yard_plan_schedule *schedule; /* [n_schedule]; the best of them is kept a point */
    uint32_t n_schedule;
    uint32_t max_gpus;                 /* 0: any */
    const yard_plan_gpu *one_node_gpu; /* GPU of layouts within one machine; NULL: base's */
} yard_plan_sweep;

typedef struct yard_plan_choice {
    yard_plan_config config;
    yard_plan_result result;
    bool on_frontier; /* of its EP */
    bool best;        /* on the frontier of all */
} yard_plan_choice;

/* Every legal combination, by EP, then rising speed. *out is malloc'd; illegal layouts are left
 * out; points that do not fit are in it and on no frontier. base gives what is not swept. */
YARD_API yard_status yard_plan_sweep_run(const yard_plan_config *base, const yard_plan_sweep *sweep,
                                         yard_plan_choice **out, uint32_t *n_out, yard_error *err);

/* Tokens/s a node of the frontier of ep at that speed (0: any EP), by linear interpolation between
 * its points in log(throughput); 0 where the frontier does not reach the speed. */
YARD_API double yard_plan_frontier_at(const yard_plan_choice *list, uint32_t n, uint32_t ep,
                                      double tokens_per_s_per_request);

#ifdef __cplusplus
}
#endif

#endif
