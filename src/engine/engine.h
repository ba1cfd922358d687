/* The engine room's header for its neighbours: the public interface, the names of cache pages, and
 * the model runner below it for tools that want logits rather than tokens. */
#ifndef YARD_ENGINE_ROOM_H
#define YARD_ENGINE_ROOM_H

#include <yard/engine.h>

#include "engine/page_hash.h"
#include "engine/pod.h"
#include "engine/report.h"
#include "model/model.h"

/* What the engine was built from; owned by the engine. */
const yard_model_config *yard_engine_model_config(const yard_engine *engine);

/* What the engine has to do now; n_seen and step_age_us are left 0, for whoever asks knows. */
void yard_engine_get_report(const yard_engine *engine, yard_engine_report *out);

/* The parent of first pages: of the model's identity, everything else that changes cached bits
 * (numeric mode, TP, page format), and config.cache_salt. */
yard_page_hash yard_engine_page_root(const yard_engine *engine);

/* Takes up to max_events changes of what the cache holds, oldest first; returns how many. A caller
 * that takes too few loses them: then, as at the beginning and after yard_engine_rejoin(),
 * YARD_PAGES_UNKNOWN comes, and all pages that are held. */
uint32_t yard_engine_poll_pages(yard_engine *engine, yard_page_event *events, uint32_t max_events);

/* The same as if they had been lost. */
void yard_engine_pages_anew(yard_engine *engine);

/* Bytes of a page on this rank. */
size_t yard_engine_page_bytes(const yard_engine *engine);

/* Copies a page that the cache holds.
 *   out        [yard_engine_page_bytes()]
 *   generated  set: some of its tokens, or of those before it, were not computed as a prompt
 * Errors: YARD_EAGAIN: it does not hold the page now; those of the device. */
yard_status yard_engine_export_page(yard_engine *engine, yard_page_hash name, void *out,
                                    bool *generated);

/* The cache gets a page that the same rank of an instance with the same page root exported. All
 * ranks of an instance get it, each its own bytes, at the same place among their requests and
 * aborts; with several ranks it is there a step later. Dropped when the cache has it already, or
 * requests hold all pages. data is copied. Errors: YARD_EINVAL (the cache is off; generated and the
 * cache is strict), YARD_ENOMEM. */
yard_status yard_engine_import_page(yard_engine *engine, yard_page_hash name, bool generated,
                                    const void *data);

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
