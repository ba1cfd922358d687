#include "serve/reasoning.h"

static const char *mark_of(yard_reasoning_state state)
{
    return state == YARD_REASONING_START ? "<think>" : "</think>";
}

static void pass(const yard_reasoning *r, const char *bytes, size_t n_bytes, yard_api_out *thoughts,
                 yard_api_out *answer)
{
    yard_api_put_bytes(r->state == YARD_REASONING_INSIDE ? thoughts : answer, bytes, n_bytes);
}

/* What was held is no mark after all. At the start that settles it: there are no thoughts. */
static void give_up(yard_reasoning *r, yard_api_out *thoughts, yard_api_out *answer)
{
    const char *mark = mark_of(r->state);

    if (r->state == YARD_REASONING_START)
        r->state = YARD_REASONING_ANSWER;
    pass(r, mark, r->n_held, thoughts, answer);
    r->n_held = 0;
}

/* A mark begins with the only '<' in it, so a byte that does not continue one can only begin
 * another. */
static void push_byte(yard_reasoning *r, char c, yard_api_out *thoughts, yard_api_out *answer)
{
    const char *mark = mark_of(r->state);

    if (c != mark[r->n_held] && (r->n_held > 0 || r->state == YARD_REASONING_START)) {
        give_up(r, thoughts, answer);
        mark = mark_of(r->state);
    }
    if (r->state == YARD_REASONING_ANSWER || c != mark[r->n_held]) {
        pass(r, &c, 1, thoughts, answer);
        return;
    }
    if (mark[++r->n_held])
        return;
    r->state = r->state == YARD_REASONING_START ? YARD_REASONING_INSIDE : YARD_REASONING_ANSWER;
    r->n_held = 0;
}

void yard_reasoning_push(yard_reasoning *r, const char *text, size_t n_bytes,
                         yard_api_out *thoughts, yard_api_out *answer)
{
    size_t i = 0;

    while (i < n_bytes && r->state != YARD_REASONING_ANSWER)
        push_byte(r, text[i++], thoughts, answer);
    pass(r, text + i, n_bytes - i, thoughts, answer);
}

void yard_reasoning_finish(yard_reasoning *r, yard_api_out *thoughts, yard_api_out *answer)
{
    give_up(r, thoughts, answer);
}
