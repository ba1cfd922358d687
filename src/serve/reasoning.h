/* Splits what a reasoning model says into its thoughts and its answer: <think> thoughts </think>
 * answer. Bytes are passed on as they are (a client that sends the answer back must get the same
 * prompt), but for the two marks. Private to the serve room. */
#ifndef YARD_SERVE_REASONING_H
#define YARD_SERVE_REASONING_H

#include "serve/api_out.h"

typedef enum yard_reasoning_state {
    YARD_REASONING_START,  /* nothing yet: <think> may come */
    YARD_REASONING_INSIDE, /* until </think>; where a template has written <think> itself */
    YARD_REASONING_ANSWER  /* to the end */
} yard_reasoning_state;

/* One text. Begins with the state and all else zero. */
typedef struct yard_reasoning {
    yard_reasoning_state state;
    size_t n_held; /* bytes of a mark that may be complete with the next text */
} yard_reasoning;

/* Appends what is decided to the one or the other. */
void yard_reasoning_push(yard_reasoning *r, const char *text, size_t n_bytes,
                         yard_api_out *thoughts, yard_api_out *answer);
/* The end: what was held back is no mark. */
void yard_reasoning_finish(yard_reasoning *r, yard_api_out *thoughts, yard_api_out *answer);

#endif
