/* The engine room's header for its neighbours: the public interface, the names of cache pages, and
 * the model runner below it for tools that want logits rather than tokens. */
#ifndef YARD_ENGINE_ROOM_H
#define YARD_ENGINE_ROOM_H

#include <yard/engine.h>

#include "engine/page_hash.h"
#include "engine/pod.h"
#include "model/model.h"

/* What an instance says about itself, after every step and at least a few times a second. */
typedef struct yard_engine_report {
    uint64_t n_seen;     /* requests of the asker that the numbers know of, ended ones included */
    uint32_t n_requests; /* waiting and running, of all askers */
    uint64_t prompt_tokens;  /* of these, still to be computed */
    uint64_t running_tokens; /* that these hold in the cache */
    uint64_t step_age_us;    /* since the last finished step while there is work; 0 when idle */
} yard_engine_report;

/* What the engine was built from; owned by the engine. */
const yard_model_config *yard_engine_model_config(const yard_engine *engine);

/* Runs one sequence of n_ids prompt tokens through prefill in chunks of max_tokens and calls
 * each(ctx, pos, logits, draft) for every position with pos % every == 0 and for the last one:
 *   logits [vocab] f32, valid during the call.
 * With the MTP module loaded, draft is its logits at pos (predicting pos + 2), NULL at the last
 * position and otherwise. Uses pages of the engine while it runs; no request may be running.
 * Errors: as yard_engine_submit(); YARD_EFORMAT when logits are not finite. */
typedef void (*yard_logits_fn)(void *ctx, uint32_t pos, const float *logits, const float *draft);
yard_status yard_engine_score(yard_engine *engine, const int32_t *ids, uint32_t n_ids,
                              uint32_t every, yard_logits_fn each, void *ctx);

#endif
