/* Any text as config.json: refused with a message, or a description that can be counted and laid
 * out. */
#include <stdlib.h>

#include "model/model.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void use(const yard_model_config *c)
{
    float *inv_freq = malloc((c->rope_dims / 2) * sizeof(*inv_freq));
    yard_param_count n;
    yard_rank_memory m;

    if (!inv_freq)
        return;
    yard_model_inv_freq(c, inv_freq);
    free(inv_freq);
    if (!(yard_model_softmax_scale(c) > 0))
        abort();
    yard_model_count_params(c, &n);
    if (n.total < n.embedding || yard_model_kv_bytes_per_token(c, YARD_BF16) == 0)
        abort();
    if (yard_model_rank_memory(c, (yard_layout){ 1, 1, 1 }, 0, &m, NULL) ||
        m.weight_bytes < n.total)
        abort();
    yard_model_rank_memory(c, (yard_layout){ 6, 3, 2 }, 5, &m, NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    yard_model_config c;
    yard_error err = { 0 };
    const yard_status st =
        yard_model_config_parse(&c, (const char *)data, size, "fuzz", NULL, &err);

    if ((st == YARD_OK) == (err.message[0] != '\0'))
        abort();
    if (st == YARD_OK)
        use(&c);
    return 0;
}
