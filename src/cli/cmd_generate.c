/* switchyard generate: plain completion of a prompt. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "cli/answer.h"
#include "cli/engine_options.h"
#include "cli/pod_answers.h"
#include "cli/pod_options.h"

enum { DEFAULT_MAX_TOKENS = 128, KEY_JSON = 0x1000, KEY_PROMPTS };

typedef struct generate_args {
    const char *model, *prompts_path;
    bool json;
    yard_prompt_options prompt;
    yard_sampling_options sampling;
    yard_engine_config engine;
    yard_pod_options pod;
} generate_args;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    generate_args *args = state->input;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &args->prompt;
        state->child_inputs[1] = &args->sampling;
        state->child_inputs[2] = &args->engine;
        state->child_inputs[3] = &args->pod;
        return 0;
    case KEY_JSON:
        args->json = true;
        return 0;
    case KEY_PROMPTS:
        args->prompts_path = arg;
        args->prompt.elsewhere = true;
        return 0;
    default:
        return yard_cli_parse_model(key, arg, state, &args->model);
    }
}

static const struct argp_option option_list[] = {
    { "json", KEY_JSON, NULL, 0,
      "One line {\"text\":..,\"ids\":[..],\"finish_reason\":..} instead of text", 0 },
    { "prompts", KEY_PROMPTS, "FILE", 0,
      "Many prompts, one a line (a JSON string when it begins with '\"'; -: standard input)", 0 },
    { 0 },
};

static const struct argp_child children[] = {
    { &yard_prompt_argp, 0, "Prompt, one of:", 1 },
    { &yard_sampling_argp, 0, "Choosing tokens:", 2 },
    { &yard_engine_argp, 0, "Computing:", 3 },
    { &yard_pod_argp, 0, "On several ranks:", 4 },
    { 0 },
};

static const struct argp generate_argp = {
    .options = option_list,
    .parser = parse,
    .args_doc = "MODEL",
    .doc =
        "Completes a prompt: no chat template, nothing added, generation_config.json not read. "
        "Defaults: --temperature 0, --max-tokens 128, --seed 0. MODEL is a directory in Hugging "
        "Face's layout."
        "\vText is shown as it comes; special tokens (such as the one that ends a sequence) are "
        "left out of it but are among the ids of --json. finish_reason is \"stop\" (the model "
        "ended, or a --stop text came), \"length\", or \"abort\" after Ctrl-C, which exits with "
        "130. A MODEL without tokenizer.json takes --ids and prints ids.\n\n"
        "--prompts takes many prompts at once, spread over the instances (ranks / tp of them), and "
        "answers in their order; --json lines then have \"prompt\", counted from 0, and the "
        "finish_reason \"error\" with \"error\" where a rank was lost in the middle of an answer. "
        "Under mpirun, Slurm or the like every process prints the answers of its own instances.\n\n"
        "Examples:\n"
        "  switchyard generate models/demo --prompt 'In the beginning' --max-tokens 32\n"
        "  switchyard generate models/demo --prompt-file book.txt --temperature 0.7\n"
        "  switchyard generate models/demo --ids 0,3572,496 --json\n"
        "  switchyard generate models/demo --prompts questions.txt --ranks 4 --tp 2\n",
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

static yard_status read_prompts(const generate_args *args, const yard_tokenizer *tok,
                                yard_prompt **prompts, size_t *n, yard_error *err)
{
    if (args->prompts_path)
        return yard_prompts_read(args->prompts_path, tok, prompts, n, err);
    *prompts = calloc(1, sizeof(**prompts));
    if (!*prompts)
        return yard_fail(err, YARD_ENOMEM, "prompt: no memory");
    *n = 1;
    return yard_prompt_read(&args->prompt, tok, &(*prompts)->ids, &(*prompts)->n_ids, err);
}

/* Returns the exit code. */
static int generate_on_ranks(const generate_args *args, yard_pod_config *config)
{
    yard_tokenizer *tok = NULL;
    yard_prompt *prompts = NULL;
    yard_pod *pod = NULL;
    yard_error err = { 0 };
    yard_pod_answers_result result = { 0 };
    size_t n = 0;
    int rc;
    yard_status st = yard_cli_check_model(args->model, &err);

    if (st == YARD_OK)
        st = yard_cli_load_tokenizer(
            &tok, args->model, args->prompts_path || yard_prompt_is_text(&args->prompt), &err);
    if (st == YARD_OK)
        st = read_prompts(args, tok, &prompts, &n, &err);
    if (st == YARD_OK)
        st = yard_pod_print_budget(config, &err);
    yard_interrupt_catch();
    if (st == YARD_OK)
        st = yard_pod_create(&pod, config, &err);
    if (st == YARD_OK) {
        const yard_pod_answers_config answers = {
            .pod = pod, .tok = tok, .sampling = &args->sampling, .json = args->json
        };
        const uint32_t n_pods = config->n_pods ? config->n_pods : 1;
        st = yard_pod_answer_all(&answers, prompts, n, n_pods * yard_pod_instance_count(pod),
                                 &result, &err);
        if (st == YARD_OK && n_pods > 1)
            st = yard_pod_finish(pod, &err);
    }
    rc = yard_cli_close_stdout("generate");
    if (st != YARD_OK)
        rc = yard_cli_fail("generate", &err);
    else if (rc == EXIT_SUCCESS && result.n_failed > 0)
        rc = EXIT_FAILURE;
    else if (rc == EXIT_SUCCESS && result.interrupted)
        rc = YARD_EXIT_INTERRUPTED;
    yard_pod_destroy(pod);
    yard_prompts_release(prompts, n);
    yard_tokenizer_free(tok);
    return rc;
}

static int generate_here(generate_args *args)
{
    yard_tokenizer *tok = NULL;
    yard_engine *engine = NULL;
    int32_t *ids = NULL;
    size_t n_ids = 0;
    yard_answer answer = { 0 };
    yard_error err = { 0 };
    yard_status st;
    int rc;

    args->engine.max_seqs = 1;
    st = prepare(args, &tok, &engine, &ids, &n_ids, &err);
    if (st == YARD_OK)
        st = complete(args, tok, engine, ids, n_ids, &answer, &err);
    rc = yard_cli_close_stdout("generate");
    if (st != YARD_OK)
        rc = yard_cli_fail("generate", &err);
    else if (rc == EXIT_SUCCESS && answer.finish == YARD_FINISH_ABORTED)
        rc = YARD_EXIT_INTERRUPTED;

    yard_answer_release(&answer);
    yard_engine_destroy(engine);
    yard_tokenizer_free(tok);
    free(ids);
    return rc;
}

int yard_cmd_generate(int argc, char **argv)
{
    generate_args args = { 0 };
    yard_fabric_env storage;
    yard_pod_config pod;
    yard_error err = { 0 };
    int rc;

    yard_cli_parse_args(&generate_argp, "switchyard generate", argc, argv, 0, &args);
    args.engine.model_dir = args.model;
    if (!args.sampling.max_tokens_given)
        args.sampling.max_tokens = DEFAULT_MAX_TOKENS;
    if (yard_pod_options_config(&args.pod, &args.engine, &storage, &pod, &err) != YARD_OK)
        rc = yard_cli_fail("generate", &err);
    else if (args.pod.given || args.prompts_path || pod.n_pods > 1)
        rc = generate_on_ranks(&args, &pod);
    else
        rc = generate_here(&args);
    yard_sampling_options_release(&args.sampling);
    return rc;
}
