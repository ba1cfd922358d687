#include "engine/signature.h"

#include <stdio.h>

#include "model/model.h"

yard_status yard_engine_sign(const yard_engine_config *c, char out[YARD_ENGINE_SIGNATURE_BYTES],
                             yard_error *err)
{
    char identity[YARD_IDENTITY_BYTES];
    yard_checkpoint *ckpt = NULL;
    yard_status st = yard_checkpoint_open(&ckpt, c->model_dir, NULL, err);

    if (st == YARD_OK)
        st = yard_checkpoint_identity(ckpt, c->model_dir, identity, err);
    yard_checkpoint_close(ckpt);
    if (st == YARD_OK)
        snprintf(
            out, YARD_ENGINE_SIGNATURE_BYTES,
            "device %s, mode %s, KV cache %s, tp %u, max_seqs %u, max_tokens %u, kv_tokens %llu, "
            "prefill_budget %u, "
            "mtp %d, prefix_cache %d, checkpoint %s",
            c->device ? c->device : "cpu", c->mode == YARD_EXACT ? "exact" : "quantised",
            c->kv_dtype == YARD_KV_FP8 ? "fp8" : "bf16", c->tp ? c->tp : 1, c->max_seqs,
            c->max_tokens, (unsigned long long)c->kv_tokens, c->prefill_budget, c->mtp,
            (int)c->prefix_cache, identity);
    return st;
}
