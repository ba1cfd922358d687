/* switchyard tokenize: text to token ids and back. */
#include <stdio.h>
#include <stdlib.h>

#include "cli/engine_options.h"
#include "cli/print_text.h"

typedef struct arguments {
    const char *model;
    bool plain, decode, json;
} arguments;

static const char doc[] =
    "Turns the text on standard input into token ids, or ids into text.\v"
    "The bytes are taken exactly as they come: no line end is cut off and no token is added, also "
    "no beginning-of-sentence.\n\n"
    "Examples:\n"
    "  printf 'Hello, world!' | switchyard tokenize models/demo\n"
    "  echo 1708,14,1203,3 | switchyard tokenize models/demo --decode\n";

static const struct argp_option options[] = {
    { "plain", 'p', NULL, 0, "Take added tokens in the text as ordinary text", 0 },
    { "decode", 'd', NULL, 0, "Read ids, separated by commas or white space, and write text", 0 },
    { "json", 'j', NULL, 0, "Write {\"ids\":[..]}, with --decode {\"text\":..}", 0 },
    { 0 },
};

static error_t parse_option(int key, char *arg, struct argp_state *state)
{
    arguments *args = state->input;

    switch (key) {
    case 'p':
        args->plain = true;
        return 0;
    case 'd':
        args->decode = true;
        return 0;
    case 'j':
        args->json = true;
        return 0;
    default:
        return yard_cli_parse_model(key, arg, state, &args->model);
    }
}

static void print_ids(const int32_t *ids, size_t n_ids, bool json)
{
    if (json)
        fputs("{\"ids\":[", stdout);
    for (size_t i = 0; i < n_ids; i++)
        printf("%s%d", i == 0 ? "" : json ? "," : " ", ids[i]);
    puts(json ? "]}" : "");
}

static yard_status encode(const yard_tokenizer *tok, const arguments *args, const char *input,
                          size_t n_input, yard_error *err)
{
    int32_t *ids = NULL;
    size_t n_ids = 0;
    yard_status st = yard_tokenizer_encode(tok, input, n_input, !args->plain, &ids, &n_ids, err);

    if (st == YARD_OK)
        print_ids(ids, n_ids, args->json);
    free(ids);
    return st;
}

static yard_status decode(const yard_tokenizer *tok, const arguments *args, const char *input,
                          size_t n_input, yard_error *err)
{
    int32_t *ids = NULL;
    char *text = NULL;
    size_t n_ids = 0, n_text = 0;
    yard_status st = yard_cli_parse_ids(input, n_input, &ids, &n_ids, err);

    if (st == YARD_OK)
        st = yard_tokenizer_decode(tok, ids, n_ids, false, &text, &n_text, err);
    if (st == YARD_OK)
        st = yard_cli_print_text(text, n_text, args->json, err);
    free(ids);
    free(text);
    return st;
}

int yard_cmd_tokenize(int argc, char **argv)
{
    const struct argp argp = { options, parse_option, "MODEL", doc, NULL, NULL, NULL };
    arguments args = { 0 };
    yard_error err = { 0 };
    yard_tokenizer *tok = NULL;
    char *input = NULL;
    size_t n_input = 0;
    yard_status st;

    yard_cli_parse_args(&argp, "switchyard tokenize", argc, argv, 0, &args);
    if (args.plain && args.decode)
        return yard_cli_usage("tokenize", "--plain is about text, --decode reads ids");
    st = yard_cli_check_model(args.model, &err);
    if (st == YARD_OK)
        st = yard_tokenizer_load(&tok, args.model, yard_cli_notify(), &err);
    if (st == YARD_OK)
        st = yard_cli_read_all("-", &input, &n_input, &err);
    if (st == YARD_OK)
        st = args.decode ? decode(tok, &args, input, n_input, &err)
                         : encode(tok, &args, input, n_input, &err);
    free(input);
    yard_tokenizer_free(tok);
    if (st != YARD_OK)
        return yard_cli_fail("tokenize", &err);
    return yard_cli_close_stdout("tokenize");
}
