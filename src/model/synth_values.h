/* The numbers of a synthetic checkpoint: functions of seed, tensor name and position, so that any
 * thread can make any piece. Private to the model room. */
#ifndef YARD_MODEL_SYNTH_VALUES_H
#define YARD_MODEL_SYNTH_VALUES_H

#include "base/base.h"

/* value = mean + sigma * Gaussian in the tensor's dtype; FP8 codes span the whole range, their
 * block scales (see yard_synth_fill_scales) bring them to size. */
typedef struct yard_synth_source {
    uint64_t key;
    yard_dtype dtype;
    union {
        uint8_t u8[256];
        uint16_t u16[256];
        float f32[256];
    } table; /* quantiles: one random byte picks one */
} yard_synth_source;

/* The 256 quantiles of the Gaussian that every source is made from. */
typedef struct yard_synth_gaussian {
    float z[256];
} yard_synth_gaussian;

void yard_synth_gaussian_init(yard_synth_gaussian *g);

void yard_synth_source_init(yard_synth_source *s, const yard_synth_gaussian *g, uint64_t seed,
                            const char *name, yard_dtype dtype, float mean, float sigma);

/* Values [first, first + n) of the tensor; first is a multiple of 8. */
void yard_synth_fill(const yard_synth_source *s, void *out, uint64_t first, size_t n);

/* Block scales [first, first + n): such that code * scale has standard deviation sigma, give or
 * take a factor of the block. */
void yard_synth_fill_scales(const yard_synth_source *s, float *out, uint64_t first, size_t n,
                            float sigma, bool ue8m0);

#endif
