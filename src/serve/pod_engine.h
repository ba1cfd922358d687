/* A pod as what a yard_engine_server serves. */
#ifndef YARD_SERVE_POD_ENGINE_H
#define YARD_SERVE_POD_ENGINE_H

#include "serve/engine_server.h"

typedef struct yard_pod_engine {
    yard_pod *pod;  /* borrowed */
    char name[200]; /* of the model: the last part of its path */
    uint32_t max_requests, context, vocab, n_ranks;
} yard_pod_engine;

/* config: what the pod was created with; only read here. Errors: YARD_EFORMAT, .. of a checkpoint
 * that changed since. */
yard_status yard_pod_engine_open(yard_pod_engine *out, yard_pod *pod, const yard_pod_config *config,
                                 yard_error *err);

/* engine must live as long as the server. */
yard_served_engine yard_pod_engine_served(yard_pod_engine *engine);

#endif
