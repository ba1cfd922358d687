/* switchyard generate: plain completion of a prompt. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "cli/answer.h"
#include "cli/engine_options.h"

enum { DEFAULT_MAX_TOKENS = 128, KEY_JSON = 0x1000 };

typedef struct generate_args {
    const char *model;
    bool json;
    yard_prompt_options prompt;
    yard_sampling_options sampling;
    yard_engine_config engine;
} generate_args;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    generate_args *args = state->input;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &args->prompt;
        state->child_inputs[1] = &args->sampling;
        state->child_inputs[2] = &args->engine;
        return 0;
    case KEY_JSON:
        args->json = true;
        return 0;
    default:
        return yard_cli_parse_model(key, arg, state, &args->model);
    }
}

static const struct argp_option option_list[] = {
    { "json", KEY_JSON, NULL, 0,
      "One line {\"text\":..,\"ids\":[..],\"finish_reason\":..} instead of text", 0 },
    { 0 },
};

static const struct argp_child children[] = {
    { &yard_prompt_argp, 0, "Prompt, one of:", 1 },
    { &yard_sampling_argp, 0, "Choosing tokens:", 2 },
    { &yard_engine_argp, 0, "Computing:", 3 },
    { 0 },
};

static const struct argp generate_argp = {
    .options = option_list,
    .parser = parse,
    .args_doc = "MODEL",
    .doc = "Completes a prompt: no chat template, nothing added, generation_config.json not read. "
           "Defaults: --temperature 0, --max-tokens 128, --seed 0. MODEL is a directory in Hugging "
           "Face's layout."
           "\vText is shown as it comes; special tokens (such as the one that ends a sequence) are "
           "left out of it but are among the ids of --json. finish_reason is \"stop\" (the model "
           "ended, or a --stop text came), \"length\", or \"abort\" after Ctrl-C, which exits with "
           "130. A MODEL without tokenizer.json takes --ids and prints ids.\n\n"
           "Examples:\n"
           "  switchyard generate models/demo --prompt 'In the beginning' --max-tokens 32\n"
           "  switchyard generate models/demo --prompt-file book.txt --temperature 0.7\n"
           "  switchyard generate models/demo --ids 0,3572,496 --json\n",
    .children = children,
};

/* The tokenizer and the prompt first: a mistake there is told before weights are read. */
static yard_status prepare(const generate_args *args, yard_tokenizer **tok, yard_engine **engine,
                           int32_t **ids, size_t *n_ids, yard_error *err)
{
    yard_status st = yard_cli_check_model(args->model, err);

    if (st == YARD_OK)
        st = yard_cli_load_tokenizer(tok, args->model, yard_prompt_is_text(&args->prompt), err);
    if (st == YARD_OK)
        st = yard_prompt_read(&args->prompt, *tok, ids, n_ids, err);
    if (st == YARD_OK)
        st = yard_engine_create(engine, &args->engine, err);
    return st;
}

static yard_status complete(const generate_args *args, const yard_tokenizer *tok,
                            yard_engine *engine, const int32_t *ids, size_t n_ids,
                            yard_answer *answer, yard_error *err)
{
    const yard_answer_config config = {
        .engine = engine,
        .tok = tok,
        .stop = args->sampling.stop,
        .n_stop = args->sampling.n_stop,
        .show = !args->json,
    };
    const yard_request request = yard_sampling_options_request(&args->sampling, ids, n_ids);
    yard_status st;

    yard_interrupt_catch();
    st = yard_answer_run(answer, &config, &request, err);
    if (args->json)
        return st == YARD_OK ? yard_answer_print_json(answer, err) : st;
    /* text is exact in a file or pipe; a list of ids is a line */
    if (answer->n_ids > 0 && (!tok || isatty(STDOUT_FILENO)))
        putchar('\n');
    if (st == YARD_OK)
        yard_answer_print_timing(answer, request.n_prompt);
    return st;
}

int yard_cmd_generate(int argc, char **argv)
{
    generate_args args = { 0 };
    yard_tokenizer *tok = NULL;
    yard_engine *engine = NULL;
    int32_t *ids = NULL;
    size_t n_ids = 0;
    yard_answer answer = { 0 };
    yard_error err = { 0 };
    yard_status st;
    int rc;

    yard_cli_parse_args(&generate_argp, "switchyard generate", argc, argv, &args);
    args.engine.model_dir = args.model;
    args.engine.max_seqs = 1;
    if (!args.sampling.max_tokens_given)
        args.sampling.max_tokens = DEFAULT_MAX_TOKENS;

    st = prepare(&args, &tok, &engine, &ids, &n_ids, &err);
    if (st == YARD_OK)
        st = complete(&args, tok, engine, ids, n_ids, &answer, &err);
    rc = yard_cli_close_stdout("generate");
    if (st != YARD_OK)
        rc = yard_cli_fail("generate", &err);
    else if (rc == EXIT_SUCCESS && answer.finish == YARD_FINISH_ABORTED)
        rc = YARD_EXIT_INTERRUPTED;

    yard_answer_release(&answer);
    yard_engine_destroy(engine);
    yard_tokenizer_free(tok);
    free(ids);
    yard_sampling_options_release(&args.sampling);
    return rc;
}
