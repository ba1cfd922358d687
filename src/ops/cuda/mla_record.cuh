/* Plans of MLA decode that are found again. The layers of a step have the same batch, so all but
 * the first two of its launches need no plan: a block keeps its own, and what it was made from. */
#ifndef YARD_OPS_CUDA_MLA_RECORD_CUH
#define YARD_OPS_CUDA_MLA_RECORD_CUH

#include "ops/cuda/mla_plan.cuh"
#include "ops/cuda/ptx.cuh"

/* A block's plan of the launch before the last, and the batch it is of; its lists are of it too. */
struct plan_record {
    plan_kept kept;
    uint32_t n_rows, n_heads; /* n_rows 0: no plan */
    int32_t position[PLAN_THREADS], seq[PLAN_THREADS];
    uint8_t absorbed[PLAN_THREADS];
};
static_assert(sizeof(plan_record) <= MLA_RECORD_BYTES, "yard_mla_workspace");

/* Words of the plan are read and written by instruction: through a pointer to words the compiler
 * would lose sight of where it lies, and that all threads see the same. */

/* The plan that is there, if it is of this batch. All threads; a barrier must follow. */
static __device__ bool recall_plan(const yard_mla_decode_task &t, const plan_record &r,
                                   plan_kept &kept)
{
    const uint32_t i = threadIdx.x, n = min((uint32_t)*t.batch.n_tokens, t.max_rows);
    const int32_t position = __ldcg(&r.position[i]), seq = __ldcg(&r.seq[i]);
    const uint8_t absorbed = __ldcg(&r.absorbed[i]);
    const uint32_t n_words = sizeof(kept) / 4;
    const uint32_t word = __ldcg((const uint32_t *)&r.kept + min(i, n_words - 1));
    bool same = n == __ldcg(&r.n_rows) && n > 0 && t.n_heads == __ldcg(&r.n_heads);

    if (same && i < n) /* n is at most PLAN_THREADS then */
        same = t.batch.position[i] == position && t.batch.seq[i] == seq &&
               t.batch.absorbed[i] == absorbed;
    if (!__syncthreads_and(same))
        return false;
    if (i < n_words)
        store_shared(shared_address(&kept) + 4 * i, word);
    return true;
}

static __device__ void keep_plan(const yard_mla_decode_task &t, const plan_kept &kept,
                                 plan_record *r)
{
    const uint32_t i = threadIdx.x, n = min((uint32_t)*t.batch.n_tokens, t.max_rows);

    if (i < min(n, (uint32_t)PLAN_THREADS)) {
        r->position[i] = t.batch.position[i];
        r->seq[i] = t.batch.seq[i];
        r->absorbed[i] = t.batch.absorbed[i];
    }
    if (i < sizeof(kept) / 4)
        ((uint32_t *)&r->kept)[i] = load_shared(shared_address(&kept) + 4 * i);
    if (i == 0) {
        r->n_heads = t.n_heads;
        r->n_rows = n <= PLAN_THREADS ? n : 0;
    }
}

#endif
