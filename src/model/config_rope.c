/* Rotary embedding and YaRN: the fields, the frequencies, the softmax scale. */
#include <math.h>

#include "model/config_parts.h"

static const double pi = 3.14159265358979323846;

static void read_yarn(yard_model_config *c, yard_json_reader *r)
{
    c->has_yarn = true;
    c->yarn_factor = yard_json_get_number(r, "factor", 1, 1e6);
    c->yarn_original_positions =
        (uint32_t)yard_json_get_u64(r, "original_max_position_embeddings", 1, 1u << 30);
    c->yarn_beta_fast = yard_json_get_number(r, "beta_fast", 1e-6, 1e6);
    c->yarn_beta_slow = yard_json_get_number(r, "beta_slow", 1e-6, 1e6);
    c->yarn_mscale = yard_json_get_number(r, "mscale", 1e-6, 1e6);
    c->yarn_mscale_all_dim = yard_json_get_number(r, "mscale_all_dim", 1e-6, 1e6);
    yard_json_expect(r, "truncate", "true", true);
    if (r->status)
        return;
    if (c->yarn_beta_fast < c->yarn_beta_slow)
        yard_json_fail(r, YARD_EFORMAT, "beta_fast", "want at least beta_slow %g, found %g",
                       c->yarn_beta_slow, c->yarn_beta_fast);
    /* Their ratio would multiply cos and sin; every published checkpoint of the family has 1. */
    if (c->yarn_mscale != c->yarn_mscale_all_dim)
        yard_json_fail(r, YARD_ENOTSUP, "mscale",
                       "only the value of mscale_all_dim (%g) is implemented, found %g",
                       c->yarn_mscale_all_dim, c->yarn_mscale);
    if (yard_json_get(r, "attention_factor", NULL))
        yard_json_fail(r, YARD_ENOTSUP, "attention_factor", "only null is implemented");
}

static void read_rope_object(yard_model_config *c, yard_json_reader *r)
{
    const bool mla = c->attention == YARD_ATTENTION_MLA;
    char what[YARD_JSON_DESCRIBE_BYTES];
    const json_t *type = yard_json_get(r, "rope_type", NULL);
    const json_t *old_type = yard_json_get(r, "type", NULL); /* asked for either way: both known */

    if (!type)
        type = old_type;
    if (!type) {
        yard_json_fail(r, YARD_EFORMAT, "rope_type", "missing");
        return;
    }
    yard_json_describe(type, what);
    if (!strcmp(what, "'yarn'") && mla)
        read_yarn(c, r);
    else if (strcmp(what, "'default'") != 0)
        yard_json_fail(r, YARD_ENOTSUP, "rope_type",
                       mla ? "only 'yarn' and 'default' are implemented, found %s"
                           : "only 'default' is implemented, found %s",
                       what);
}

void yard_config_read_rope(yard_model_config *c, yard_json_reader *r, const yard_notify *notify)
{
    bool has_scaling, has_parameters;
    const json_t *scaling = yard_json_get(r, "rope_scaling", &has_scaling);
    const json_t *parameters = yard_json_get(r, "rope_parameters", &has_parameters);
    const json_t *object = parameters ? parameters : scaling;
    yard_json_reader in = { .object = object,
                            .file = r->file,
                            .where = parameters ? "rope_parameters." : "rope_scaling.",
                            .err = r->err };
    const json_t *inner_theta = parameters ? yard_json_get(&in, "rope_theta", NULL) : NULL;

    /* Long contexts of the MLA families come from YaRN; Mixtral's files never had the field. */
    if (!has_scaling && !has_parameters && c->attention == YARD_ATTENTION_MLA)
        yard_json_fail(r, YARD_EFORMAT, "rope_scaling", "missing (null when there is none)");
    if (scaling && parameters)
        yard_json_fail(r, YARD_EFORMAT, "rope_parameters", "want this or rope_scaling, found both");
    if (object && !json_is_object(object))
        yard_json_fail(r, YARD_EFORMAT, parameters ? "rope_parameters" : "rope_scaling",
                       "want an object or null");
    if (r->status)
        return;
    c->rope_theta = yard_json_get_number(inner_theta ? &in : r, "rope_theta", 1.0001, 1e15);
    if (object) {
        read_rope_object(c, &in);
        if (!r->status && !in.status)
            yard_json_warn_unread(&in, NULL, notify);
    }
    if (!r->status)
        r->status = in.status;
}

/* The pair whose wave turns that often within the original positions. */
static double correction_pair(const yard_model_config *c, double rotations)
{
    return c->rope_dims * log(c->yarn_original_positions / (rotations * 2 * pi)) /
           (2 * log(c->rope_theta));
}

/* YaRN (arXiv 2309.00071), as in the published DeepSeek-V3 code: pairs that turn often keep their
 * frequency, those that turn rarely are stretched by factor, a ramp joins them. */
void yard_model_inv_freq(const yard_model_config *c, float *inv_freq)
{
    double low = 0, high = 1;

    if (c->has_yarn) {
        low = fmax(floor(correction_pair(c, c->yarn_beta_fast)), 0);
        high = fmin(ceil(correction_pair(c, c->yarn_beta_slow)), c->rope_dims - 1.0);
        if (low == high)
            high += 0.001; /* the published code's guard against a division by zero */
    }
    for (uint32_t i = 0; i < c->rope_dims / 2; i++) {
        const double plain = 1 / pow(c->rope_theta, 2.0 * i / c->rope_dims);
        if (c->has_yarn) {
            const double ramp = fmin(fmax((i - low) / (high - low), 0), 1);
            inv_freq[i] = (float)(ramp * plain / c->yarn_factor + (1 - ramp) * plain);
        } else {
            inv_freq[i] = (float)plain;
        }
    }
}

float yard_model_softmax_scale(const yard_model_config *c)
{
    const double mscale = c->has_yarn ? 0.1 * c->yarn_mscale_all_dim * log(c->yarn_factor) + 1 : 1;

    return (float)(mscale * mscale / sqrt((double)c->nope_dims + c->rope_dims));
}
