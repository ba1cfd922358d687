/* Sampling one row of logits: the definition that the sample operation runs per row. */
#ifndef YARD_OPS_CPU_SAMPLE_H
#define YARD_OPS_CPU_SAMPLE_H

#include "ops/cpu/cpu.h"

/* Scratch of one call; one per thread that samples. */
size_t yard_cpu_sample_scratch_bytes(uint32_t n_vocab);

/* Chooses one token.
 *
 *   row      its bias, prompt and output ids lie in [0, n_vocab): the engine checked them.
 *   logits   [n_vocab] f32, in, changed: afterwards they hold bias and penalties.
 *   scratch  yard_cpu_sample_scratch_bytes(n_vocab), aligned to 8; content does not matter.
 *   token    out. A NaN counts as minus infinity; nothing above minus infinity gives id 0.
 *
 * A candidate's weight is exp((logit - largest) * (1 / temperature)) in f32, in whole units of
 * 2^-32, rounded to nearest even; what weighs nothing is no candidate. Sums of weights are exact,
 * so that no variant's order of adding can change a token. Candidates are ordered by that
 * exponential, then by logit, descending, then by id ascending. top-k keeps the first k; top-p the
 * shortest prefix with at least that share of what top-k left; min-p those with at least that
 * share of the first one's weight. At least one candidate always stays. The token is the first at
 * which the weights from the first one on pass the random number's share of what is kept. */
void yard_cpu_sample_row(const cpu_kernels *k, const yard_sample_row *row, float *logits,
                         uint32_t n_vocab, void *scratch, int32_t *token);

/* The row's random number, in [0, 1) with 53 bits: a pure function, so a token does not depend on
 * who else is in the batch, and a request that is computed again draws the same numbers. */
double yard_cpu_sample_uniform(uint64_t seed, uint64_t position);

#endif
