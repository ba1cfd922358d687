/* The parts of the synthetic checkpoint's writer. Private to the model room. */
#ifndef YARD_MODEL_SYNTH_PARTS_H
#define YARD_MODEL_SYNTH_PARTS_H

#include <jansson.h>
#include <stdio.h>

#include "model/synth.h"
#include "model/tensor_table.h"

/* One tensor to be written. */
typedef struct yard_synth_tensor {
    char name[YARD_TENSOR_NAME_BYTES + 16]; /* room for "_scale_inv" */
    yard_dtype dtype;
    uint32_t n_dims;
    uint32_t shape[2];
    float mean, sigma;
    bool is_scale; /* block scales of an FP8 matrix whose values have deviation sigma */
    uint64_t n_bytes;
    uint32_t shard_idx;
    uint64_t begin; /* in the shard's data */
} yard_synth_tensor;

typedef struct yard_synth_plan {
    yard_synth_tensor *tensors; /* sorted by shard and place */
    uint32_t n_tensors, max_tensors;
    uint32_t n_shards;
    uint64_t total_bytes; /* of data */
} yard_synth_plan;

/* Every tensor of c with its shard and place. The caller frees plan->tensors, also on failure. */
yard_status yard_synth_plan_make(yard_synth_plan *plan, const yard_model_config *c,
                                 uint64_t shard_bytes, yard_error *err);

/* config.json that yard_model_config_parse() reads back as c; NULL when memory ran out. */
json_t *yard_synth_config_json(const yard_model_config *c);

#endif
