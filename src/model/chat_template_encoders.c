/* The encoders: what each published Jinja template writes, said in C. Oddities of a template (a
 * mark that is missing after a single tool call, say) are kept: the model has seen them. */
#include "model/chat_template_impl.h"

#define USER "<｜User｜>"
#define ASSISTANT "<｜Assistant｜>"
#define END "<｜end▁of▁sentence｜>"
#define CALLS_BEGIN "<｜tool▁calls▁begin｜>"
#define CALLS_END "<｜tool▁calls▁end｜>"
#define CALL_BEGIN "<｜tool▁call▁begin｜>"
#define CALL_END "<｜tool▁call▁end｜>"
#define SEPARATOR "<｜tool▁sep｜>"
#define OUTPUTS_BEGIN "<｜tool▁outputs▁begin｜>"
#define OUTPUTS_END "<｜tool▁outputs▁end｜>"
#define OUTPUT_BEGIN "<｜tool▁output▁begin｜>"
#define OUTPUT_END "<｜tool▁output▁end｜>"
#define THINK_END "</think>"

static void put_system(yard_prompt *prompt, const yard_conversation *talk, bool join)
{
    const yard_message *last = NULL;

    yard_prompt_span(prompt, talk->bos);
    for (size_t i = 0; i < talk->n_messages; i++) {
        const yard_message *m = &talk->messages[i];
        if (m->role != YARD_ROLE_SYSTEM)
            continue;
        if (join && last)
            yard_prompt_put(prompt, "\n\n");
        if (join)
            yard_prompt_span(prompt, m->content);
        last = m;
    }
    if (!join && last)
        yard_prompt_span(prompt, last->content);
}

/* type, name and arguments in a JSON fence: the form up to R1-0528. */
static void put_fenced_call(yard_prompt *prompt, const yard_tool_call *call)
{
    yard_prompt_put(prompt, CALL_BEGIN);
    yard_prompt_span(prompt, call->type);
    yard_prompt_put(prompt, SEPARATOR);
    yard_prompt_span(prompt, call->name);
    yard_prompt_put(prompt, "\n```json\n");
    yard_prompt_span(prompt, call->arguments);
    yard_prompt_put(prompt, "\n```" CALL_END);
}

static void put_output(yard_prompt *prompt, const yard_message *m)
{
    yard_prompt_put(prompt, OUTPUT_BEGIN);
    yard_prompt_span(prompt, m->content);
    yard_prompt_put(prompt, OUTPUT_END);
}

/* What follows a </think>: the last one, or the first. */
static yard_span after_thoughts(yard_span content, bool last)
{
    const size_t n_mark = sizeof(THINK_END) - 1;
    const char *mark;

    while (content.n_bytes > 0 &&
           (mark = memmem(content.bytes, content.n_bytes, THINK_END, n_mark))) {
        content.n_bytes -= (size_t)(mark - content.bytes) + n_mark;
        content.bytes = mark + n_mark;
        if (!last)
            break;
    }
    return content;
}

void yard_encode_demo(const yard_template_rules *rules, const yard_conversation *talk,
                      yard_prompt *prompt)
{
    bool in_outputs = false;

    put_system(prompt, talk, rules->join_system);
    for (size_t i = 0; i < talk->n_messages; i++) {
        const yard_message *m = &talk->messages[i];
        if (m->role == YARD_ROLE_TOOL) {
            if (!in_outputs)
                yard_prompt_put(prompt, OUTPUTS_BEGIN);
            in_outputs = true;
            put_output(prompt, m);
            continue;
        }
        if (in_outputs)
            yard_prompt_put(prompt, OUTPUTS_END);
        if (m->role == YARD_ROLE_USER) {
            yard_prompt_put(prompt, USER);
            yard_prompt_span(prompt, m->content);
        } else if (m->role == YARD_ROLE_ASSISTANT) {
            if (!in_outputs)
                yard_prompt_put(prompt, ASSISTANT);
            yard_prompt_span(prompt, m->content);
            for (size_t k = 0; k < m->n_calls; k++) {
                yard_prompt_put(prompt, k == 0 ? CALLS_BEGIN : "\n");
                put_fenced_call(prompt, &m->calls[k]);
            }
            yard_prompt_put(prompt, m->n_calls ? CALLS_END END : END);
        }
        in_outputs = false;
    }
    if (in_outputs)
        yard_prompt_put(prompt, OUTPUTS_END);
    else if (talk->generation_prompt)
        yard_prompt_put(prompt, ASSISTANT);
}

typedef struct turn_state {
    bool in_outputs;    /* tool outputs are open */
    bool calls_begun;   /* never reset by these templates: later calls have no begin mark */
    bool outputs_begun; /* likewise */
} turn_state;

static void put_v3_calls(const yard_template_rules *rules, yard_prompt *prompt,
                         const yard_message *m, turn_state *state)
{
    state->in_outputs = false;
    for (size_t i = 0; i < m->n_calls; i++) {
        const bool first = !state->calls_begun;
        if (first) {
            yard_prompt_put(prompt, ASSISTANT);
            yard_prompt_span(prompt, m->content);
        }
        yard_prompt_put(prompt, first ? CALLS_BEGIN : "\n");
        put_fenced_call(prompt, &m->calls[i]);
        state->calls_begun = true;
        if (!first && !rules->calls_beat_text)
            yard_prompt_put(prompt, CALLS_END END);
    }
    if (rules->calls_beat_text)
        yard_prompt_put(prompt, CALLS_END END);
}

static void put_v3_answer(const yard_template_rules *rules, yard_prompt *prompt,
                          const yard_message *m, turn_state *state)
{
    if (state->in_outputs) {
        yard_prompt_put(prompt, OUTPUTS_END);
        yard_prompt_span(prompt, m->content);
    } else {
        yard_prompt_put(prompt, ASSISTANT);
        yard_prompt_span(prompt,
                         rules->drop_thoughts ? after_thoughts(m->content, true) : m->content);
    }
    yard_prompt_put(prompt, END);
    state->in_outputs = false;
}

void yard_encode_deepseek_v3(const yard_template_rules *rules, const yard_conversation *talk,
                             yard_prompt *prompt)
{
    turn_state state = { 0 };

    put_system(prompt, talk, rules->join_system);
    for (size_t i = 0; i < talk->n_messages; i++) {
        const yard_message *m = &talk->messages[i];
        if (m->role == YARD_ROLE_USER) {
            state.in_outputs = false;
            yard_prompt_put(prompt, USER);
            yard_prompt_span(prompt, m->content);
        } else if (m->role == YARD_ROLE_TOOL) {
            state.in_outputs = true;
            yard_prompt_put(prompt, state.outputs_begun ? rules->output_separator : OUTPUTS_BEGIN);
            state.outputs_begun = true;
            put_output(prompt, m);
        } else if (m->role == YARD_ROLE_ASSISTANT) {
            if (m->n_calls && (rules->calls_beat_text || !m->content.bytes))
                put_v3_calls(rules, prompt, m, &state);
            else
                put_v3_answer(rules, prompt, m, &state);
        }
    }
    if (state.in_outputs)
        yard_prompt_put(prompt, OUTPUTS_END);
    else if (talk->generation_prompt)
        yard_prompt_put(prompt, rules->open_thoughts ? ASSISTANT "<think>\n" : ASSISTANT);
}

static void put_v3_0324_answer(const yard_template_rules *rules, yard_prompt *prompt,
                               const yard_message *m, turn_state *state)
{
    if (state->in_outputs)
        yard_prompt_put(prompt, OUTPUTS_END);
    state->in_outputs = false;
    yard_prompt_span(prompt, rules->drop_thoughts ? after_thoughts(m->content, true) : m->content);
    for (size_t i = 0; i < m->n_calls; i++) {
        yard_prompt_put(prompt, i == 0 ? CALLS_BEGIN : "\n");
        put_fenced_call(prompt, &m->calls[i]);
    }
    if (m->n_calls)
        state->outputs_begun = false;
    yard_prompt_put(prompt, m->n_calls ? CALLS_END END : END);
}

void yard_encode_deepseek_v3_0324(const yard_template_rules *rules, const yard_conversation *talk,
                                  yard_prompt *prompt)
{
    turn_state state = { 0 };
    bool after_user = false;

    put_system(prompt, talk, rules->join_system);
    for (size_t i = 0; i < talk->n_messages; i++) {
        const yard_message *m = &talk->messages[i];
        if (m->role == YARD_ROLE_SYSTEM)
            continue;
        after_user = m->role == YARD_ROLE_USER;
        if (after_user) {
            state.in_outputs = false;
            yard_prompt_put(prompt, USER);
            yard_prompt_span(prompt, m->content);
            yard_prompt_put(prompt, ASSISTANT); /* here, and not before the answer */
        } else if (m->role == YARD_ROLE_ASSISTANT) {
            put_v3_0324_answer(rules, prompt, m, &state);
        } else {
            state.in_outputs = true;
            yard_prompt_put(prompt, state.outputs_begun ? rules->output_separator : OUTPUTS_BEGIN);
            state.outputs_begun = true;
            put_output(prompt, m);
        }
    }
    if (state.in_outputs)
        yard_prompt_put(prompt, OUTPUTS_END);
    else if (talk->generation_prompt && !after_user)
        yard_prompt_put(prompt, ASSISTANT);
}

static void put_v3_1_calls(yard_prompt *prompt, const yard_message *m)
{
    yard_prompt_span(prompt, m->content);
    for (size_t i = 0; i < m->n_calls; i++) {
        yard_prompt_put(prompt, i == 0 ? CALLS_BEGIN CALL_BEGIN : CALL_BEGIN);
        yard_prompt_span(prompt, m->calls[i].name);
        yard_prompt_put(prompt, SEPARATOR);
        yard_prompt_span(prompt, m->calls[i].arguments);
        yard_prompt_put(prompt, CALL_END);
    }
    yard_prompt_put(prompt, CALLS_END END);
}

void yard_encode_deepseek_v3_1(const yard_template_rules *rules, const yard_conversation *talk,
                               yard_prompt *prompt)
{
    bool after_user = false, after_output = false;

    put_system(prompt, talk, rules->join_system);
    for (size_t i = 0; i < talk->n_messages; i++) {
        const yard_message *m = &talk->messages[i];
        if (m->role == YARD_ROLE_USER) {
            yard_prompt_put(prompt, USER);
            yard_prompt_span(prompt, m->content);
        } else if (m->role == YARD_ROLE_ASSISTANT) {
            if (after_user)
                yard_prompt_put(prompt, ASSISTANT THINK_END);
            if (m->n_calls) {
                put_v3_1_calls(prompt, m);
            } else {
                yard_prompt_span(prompt,
                                 after_output ? m->content : after_thoughts(m->content, false));
                yard_prompt_put(prompt, END);
            }
        } else if (m->role == YARD_ROLE_TOOL) {
            put_output(prompt, m);
        }
        if (m->role != YARD_ROLE_SYSTEM) {
            after_user = m->role == YARD_ROLE_USER;
            after_output = m->role == YARD_ROLE_TOOL;
        }
    }
    if (talk->generation_prompt && after_user)
        yard_prompt_put(prompt, ASSISTANT THINK_END);
}

void yard_encode_deepseek_v2(const yard_template_rules *rules, const yard_conversation *talk,
                             yard_prompt *prompt)
{
    (void)rules;
    yard_prompt_span(prompt, talk->bos);
    for (size_t i = 0; i < talk->n_messages; i++) {
        const yard_message *m = &talk->messages[i];
        if (m->role == YARD_ROLE_USER)
            yard_prompt_put(prompt, "User: ");
        else if (m->role == YARD_ROLE_ASSISTANT)
            yard_prompt_put(prompt, "Assistant: ");
        yard_prompt_span(prompt, m->content);
        if (m->role == YARD_ROLE_ASSISTANT)
            yard_prompt_span(prompt, talk->eos);
        else
            yard_prompt_put(prompt, "\n\n");
    }
    if (talk->generation_prompt)
        yard_prompt_put(prompt, "Assistant:");
}

void yard_encode_mixtral(const yard_template_rules *rules, const yard_conversation *talk,
                         yard_prompt *prompt)
{
    yard_prompt_span(prompt, talk->bos);
    for (size_t i = 0; i < talk->n_messages; i++) {
        const yard_message *m = &talk->messages[i];
        if (m->role == YARD_ROLE_SYSTEM)
            continue;
        if (rules->spaced)
            yard_prompt_put(prompt, " ");
        if (m->role == YARD_ROLE_USER)
            yard_prompt_put(prompt, "[INST] ");
        if (i == 1 && m[-1].role == YARD_ROLE_SYSTEM) {
            yard_prompt_span(prompt, m[-1].content);
            yard_prompt_put(prompt, "\n\n");
        }
        yard_prompt_span(prompt, m->content);
        if (m->role == YARD_ROLE_USER)
            yard_prompt_put(prompt, " [/INST]");
        else
            yard_prompt_span(prompt, talk->eos);
    }
}
