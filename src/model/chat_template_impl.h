/* Chat messages as the encoders get them, and the text they write. */
#ifndef YARD_MODEL_CHAT_TEMPLATE_IMPL_H
#define YARD_MODEL_CHAT_TEMPLATE_IMPL_H

#include "model/chat_template.h"

typedef struct yard_span {
    const char *bytes; /* NULL: absent */
    size_t n_bytes;
} yard_span;

typedef struct yard_tool_call {
    yard_span type, name, arguments;
} yard_tool_call;

typedef enum yard_role {
    YARD_ROLE_SYSTEM,
    YARD_ROLE_USER,
    YARD_ROLE_ASSISTANT,
    YARD_ROLE_TOOL,
} yard_role;

typedef struct yard_message {
    yard_role role;
    yard_span content; /* absent only beside tool calls */
    yard_tool_call *calls;
    size_t n_calls;
} yard_message;

typedef struct yard_conversation {
    const yard_message *messages;
    size_t n_messages;
    yard_span bos, eos; /* eos: where rules.needs_eos */
    bool generation_prompt;
} yard_conversation;

/* Grows; a failed allocation is remembered and asked for once, at the end. */
typedef struct yard_prompt {
    char *text;
    size_t n_text, max_text;
    bool no_memory;
} yard_prompt;

void yard_prompt_span(yard_prompt *prompt, yard_span span);
void yard_prompt_put(yard_prompt *prompt, const char *text);

/* What one published template does differently from its relatives. */
typedef struct yard_template_rules {
    bool join_system;             /* all system messages, not the last one only */
    bool calls_beat_text;         /* calls beside text are written, not dropped */
    bool drop_thoughts;           /* earlier answers lose everything up to </think> */
    bool open_thoughts;           /* the generation prompt ends in "<think>\n" */
    const char *output_separator; /* between two tool outputs */
    bool needs_eos;               /* writes eos_token of tokenizer_config.json */
    bool no_tools;                /* has no place for tool calls and outputs */
    bool alternates;              /* user and assistant in turn, no system message .. */
    bool system_first;            /* .. but one before them, joined to the first turn */
    bool spaced;                  /* a space before each turn */
} yard_template_rules;

typedef void (*yard_template_encoder)(const yard_template_rules *rules,
                                      const yard_conversation *talk, yard_prompt *prompt);

void yard_encode_demo(const yard_template_rules *rules, const yard_conversation *talk,
                      yard_prompt *prompt);
/* DeepSeek-V3 of December 2024, R1 of January 2025 and the distilled models. */
void yard_encode_deepseek_v3(const yard_template_rules *rules, const yard_conversation *talk,
                             yard_prompt *prompt);
/* DeepSeek-V3-0324 and R1-0528. */
void yard_encode_deepseek_v3_0324(const yard_template_rules *rules, const yard_conversation *talk,
                                  yard_prompt *prompt);
/* DeepSeek-V3.1, not thinking. */
void yard_encode_deepseek_v3_1(const yard_template_rules *rules, const yard_conversation *talk,
                               yard_prompt *prompt);
/* DeepSeek-V2 and V2-Lite, chat. */
void yard_encode_deepseek_v2(const yard_template_rules *rules, const yard_conversation *talk,
                             yard_prompt *prompt);
/* Mixtral-8x7B-Instruct-v0.1, of December 2023 and of 2024. */
void yard_encode_mixtral(const yard_template_rules *rules, const yard_conversation *talk,
                         yard_prompt *prompt);

#endif
