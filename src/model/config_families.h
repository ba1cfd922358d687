/* What config.json says in each family: one table for those who read it and those who write it.
 * Private to the model room. */
#ifndef YARD_MODEL_CONFIG_FAMILIES_H
#define YARD_MODEL_CONFIG_FAMILIES_H

#include "model/config.h"

/* Bounds that no model comes near and that keep every product of sizes within 64 bits:
 * layers * experts * 3 * hidden * inter stays below 2^60. */
enum {
    YARD_MAX_LAYERS = 1 << 10,
    YARD_MAX_EXPERTS = 1 << 12,
    YARD_MAX_HIDDEN = 1 << 17,
    YARD_MAX_INTER = 1 << 18,
    YARD_MAX_VOCAB = 1 << 24,
    YARD_MAX_HEADS = 1 << 12,
    YARD_MAX_HEAD_DIMS = 1 << 12,
    YARD_MAX_POSITIONS = 1 << 30
};

typedef enum yard_presence {
    YARD_REQUIRED,
    YARD_NULLABLE, /* null is 0 */
    YARD_OPTIONAL  /* null and absent are 0 */
} yard_presence;

/* A whole number and where it goes in yard_model_config. */
typedef struct yard_size_field {
    const char *key;
    size_t offset;
    uint32_t min, max;
    yard_presence presence;
} yard_size_field;

/* A field with the one value that is implemented, as yard_json_describe() shows it. */
typedef struct yard_fixed_field {
    const char *key, *want;
    bool optional;
} yard_fixed_field;

/* Where the weights of the chosen experts come from. */
typedef enum yard_routing_fields {
    YARD_ROUTING_NOAUX_TC,  /* norm_topk_prob, then routed_scaling_factor */
    YARD_ROUTING_GREEDY,    /* topk_method; norm_topk_prob, or else routed_scaling_factor */
    YARD_ROUTING_NORMALISED /* no fields: scores divided by their sum */
} yard_routing_fields;

/* One family of checkpoints. Another model of the same kind is another row, not a branch in the
 * code that reads the description. */
typedef struct yard_family {
    const char *name, *architecture, *model_type;
    yard_attention_kind attention;
    yard_weight_names names;
    yard_rope_layout rope_layout;
    yard_router_score score;
    yard_group_value group_value;
    yard_routing_fields routing;
    bool router_bias;
    bool mtp_reads_normed_hidden;
    const yard_size_field *sizes;  /* ends with a NULL key */
    const yard_fixed_field *fixed; /* ends with a NULL key */
    const char *const *ignored;    /* known, and of no meaning for inference; ends with NULL */
} yard_family;

extern const yard_family yard_families[];
uint32_t yard_family_count(void);
const yard_family *yard_family_find(const char *name); /* by name; NULL if there is none */

/* The members of c that follow from the family. */
void yard_family_apply(const yard_family *f, yard_model_config *c);

#endif
