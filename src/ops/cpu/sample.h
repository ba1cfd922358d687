/* Sampling one row of logits: the definition that the sample operation runs per row. */
#ifndef YARD_OPS_CPU_SAMPLE_H
#define YARD_OPS_CPU_SAMPLE_H

#include "ops/ops.h"

/* Scratch of one call; one per thread that samples. */
size_t yard_cpu_sample_scratch_bytes(uint32_t n_vocab);

/* Chooses one token.
 *
 *   row      its bias, prompt and output ids lie in [0, n_vocab): the engine checked them.
 *   logits   [n_vocab] f32, in, changed: afterwards they hold bias and penalties.
 *   scratch  yard_cpu_sample_scratch_bytes(n_vocab), aligned to 8; content does not matter.
 *   token    out. A NaN counts as minus infinity; nothing above minus infinity gives id 0.
 *
 * Candidates are ordered by logit descending, then id ascending. top-k keeps the first k; top-p
 * the shortest prefix with at least that share of what top-k left; min-p those with at least that
 * share of the first one's probability. At least one candidate always stays. */
void yard_cpu_sample_row(const yard_sample_row *row, float *logits, uint32_t n_vocab, void *scratch,
                         int32_t *token);

/* The row's random number, in [0, 1) with 53 bits: a pure function, so a token does not depend on
 * who else is in the batch, and a request that is computed again draws the same numbers. */
double yard_cpu_sample_uniform(uint64_t seed, uint64_t position);

#endif
