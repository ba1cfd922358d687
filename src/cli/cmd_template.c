/* switchyard template: chat messages to prompt text. */
#include <stdio.h>
#include <stdlib.h>

#include "cli/engine_options.h"
#include "cli/print_text.h"

typedef struct arguments {
    const char *model, *messages;
    const yard_chat_template *chat_template; /* NULL: the model's */
    bool no_generation_prompt, json;
} arguments;

static const char doc[] =
    "Writes chat messages as the prompt text that a model reads.\v"
    "FILE holds a JSON array of messages {\"role\", \"content\", \"tool_calls\"}; - is standard "
    "input. The text is written exactly, without a line end of its own. Members that no template "
    "reads, such as \"name\", are ignored with a warning; null and what servers put beside their "
    "answers (\"refusal\", \"annotations\", \"audio\", \"reasoning_content\", \"tool_call_id\") "
    "without "
    "one.\n\n"
    "Examples:\n"
    "  switchyard template models/demo --messages chat.json\n"
    "  echo '[{\"role\":\"user\",\"content\":\"Hello\"}]' |\n"
    "    switchyard template models/demo --messages - --json\n";

enum { OPTION_NO_GENERATION_PROMPT = 0x100, OPTION_CHAT_TEMPLATE };

static const struct argp_option options[] = {
    { "messages", 'm', "FILE", 0, "The messages (required)", 0 },
    { "no-generation-prompt", OPTION_NO_GENERATION_PROMPT, NULL, 0,
      "Do not open the assistant's turn at the end", 0 },
    { "chat-template", OPTION_CHAT_TEMPLATE, "NAME", 0,
      "Use this built-in template, whatever the model names", 0 },
    { "json", 'j', NULL, 0, "Write {\"text\":..}", 0 },
    { 0 },
};

static error_t parse_option(int key, char *arg, struct argp_state *state)
{
    arguments *args = state->input;
    yard_error err = { 0 };

    switch (key) {
    case 'm':
        args->messages = arg;
        return 0;
    case OPTION_NO_GENERATION_PROMPT:
        args->no_generation_prompt = true;
        return 0;
    case OPTION_CHAT_TEMPLATE:
        if (yard_chat_template_find(&args->chat_template, NULL, arg, &err) != YARD_OK)
            argp_error(state, "%s", err.message);
        return 0;
    case 'j':
        args->json = true;
        return 0;
    default:
        return yard_cli_parse_model(key, arg, state, &args->model);
    }
}

static yard_status run(const arguments *args, yard_error *err)
{
    const yard_chat_template *tpl = args->chat_template;
    yard_tokenizer *tok = NULL;
    char *messages = NULL, *text = NULL;
    size_t n_messages = 0, n_text = 0;
    yard_status st = yard_cli_check_model(args->model, err);

    if (st == YARD_OK)
        st = yard_tokenizer_load(&tok, args->model, yard_cli_notify(), err);
    if (st == YARD_OK && !tpl)
        st = yard_chat_template_find(&tpl, tok, NULL, err);
    if (st == YARD_OK)
        st = yard_cli_read_all(args->messages, &messages, &n_messages, err);
    if (st == YARD_OK)
        st = yard_chat_template_render(tpl, tok, messages, n_messages, !args->no_generation_prompt,
                                       &text, &n_text, err);
    if (st == YARD_OK)
        yard_chat_messages_warn_unread(messages, n_messages, yard_cli_notify());
    if (st == YARD_OK)
        st = yard_cli_print_text(text, n_text, args->json, err);
    free(text);
    free(messages);
    yard_tokenizer_free(tok);
    return st;
}

int yard_cmd_template(int argc, char **argv)
{
    const struct argp argp = { options, parse_option, "MODEL", doc, NULL, NULL, NULL };
    arguments args = { 0 };
    yard_error err = { 0 };

    yard_cli_parse_args(&argp, "switchyard template", argc, argv, 0, &args);
    if (!args.messages)
        return yard_cli_usage("template", "want --messages FILE");
    if (run(&args, &err) != YARD_OK)
        return yard_cli_fail("template", &err);
    return yard_cli_close_stdout("template");
}
