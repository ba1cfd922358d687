/* switchyard logits: the largest logits at positions of a prompt. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <jansson.h>

#include "cli/engine_options.h"
#include "engine/engine.h"

enum { KEY_EVERY = 0x1000, KEY_TOP, KEY_MTP, KEY_JSON };

typedef struct logits_args {
    const char *model;
    uint64_t every, top;
    bool mtp, json;
    yard_prompt_options prompt;
    yard_engine_config engine;
} logits_args;

typedef struct ranked {
    float logit;
    int32_t id;
} ranked;

typedef struct report {
    const logits_args *args;
    const yard_tokenizer *tok; /* NULL: ids only */
    const int32_t *ids;        /* the prompt */
    ranked *ranking;           /* [n_vocab] */
    uint32_t n_vocab, n_top;
    uint32_t n_positions; /* reported so far */
    /* drafts that can be judged: the model's own choice one position later is known */
    uint32_t n_drafts, n_accepted;
    int64_t draft_pos; /* of the last draft, -1: none */
    int32_t draft_id;
} report;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    logits_args *args = state->input;
    yard_error err = { 0 };

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &args->prompt;
        state->child_inputs[1] = &args->engine;
        return 0;
    case KEY_EVERY:
        if (yard_cli_parse_u64("--every", arg, 1, UINT32_MAX, &args->every, &err) != YARD_OK)
            argp_error(state, "%s", err.message);
        return 0;
    case KEY_TOP:
        if (yard_cli_parse_u64("--top", arg, 1, UINT32_MAX, &args->top, &err) != YARD_OK)
            argp_error(state, "%s", err.message);
        return 0;
    case KEY_MTP:
        args->mtp = true;
        return 0;
    case KEY_JSON:
        args->json = true;
        return 0;
    default:
        return yard_cli_parse_model(key, arg, state, &args->model);
    }
}

static const struct argp_option option_list[] = {
    { "every", KEY_EVERY, "N", 0, "Positions 0, N, 2N, .. and the last (default 8)", 0 },
    { "top", KEY_TOP, "K", 0, "The K largest logits of each (default 20)", 0 },
    { "mtp", KEY_MTP, NULL, 0, "The multi-token-prediction module's logits too (\"draft\")", 0 },
    { "json", KEY_JSON, NULL, 0,
      "One line {\"positions\":[{\"pos\":0,\"top\":[[id,logit],..]},..]} instead of a table", 0 },
    { 0 },
};

static const struct argp_child children[] = {
    { &yard_prompt_argp, 0, "Prompt, one of:", 1 },
    { &yard_engine_argp, 0, "Computing:", 3 },
    { 0 },
};

static const struct argp logits_argp = {
    .options = option_list,
    .parser = parse,
    .args_doc = "MODEL",
    .doc = "Runs a prompt through a model and shows the largest logits at its positions, largest "
           "first, the lower id first among equals. MODEL is a directory in Hugging Face's layout."
           "\vThe logits at a position predict the token after it; a draft predicts the one after "
           "that and is missing where the prompt does not say what came between. With --mtp "
           "--every 1 the drafts that are the model's own choice are counted (in JSON: drafts, "
           "drafts_accepted).\n\n"
           "Examples:\n"
           "  switchyard logits models/demo --prompt 'In the beginning' --every 1 --top 5\n"
           "  switchyard logits models/demo --ids-file ids.txt --exact --json\n",
    .children = children,
};

static int by_logit(const void *a, const void *b)
{
    const ranked *x = a, *y = b;

    if (x->logit != y->logit)
        return x->logit > y->logit ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

/* Leaves the largest in front. A NaN ranks last, where it is seen when all are asked for. */
static void rank(report *r, const float *logits)
{
    for (uint32_t i = 0; i < r->n_vocab; i++)
        r->ranking[i] =
            (ranked){ .logit = isnan(logits[i]) ? -INFINITY : logits[i], .id = (int32_t)i };
    qsort(r->ranking, r->n_vocab, sizeof(r->ranking[0]), by_logit);
}

/* Nine digits name a float exactly; JSON has no infinities. */
static void print_json_top(report *r, const char *name, const float *logits)
{
    rank(r, logits);
    printf(",\"%s\":[", name);
    for (uint32_t i = 0; i < r->n_top; i++)
        if (isfinite(r->ranking[i].logit))
            printf("%s[%d,%.9g]", i ? "," : "", r->ranking[i].id, (double)r->ranking[i].logit);
        else
            printf("%s[%d,null]", i ? "," : "", r->ranking[i].id);
    putchar(']');
}

/* After the main logits of pos are ranked: was the draft before it this choice? */
static void judge_draft(report *r, uint32_t pos)
{
    if (r->draft_pos < 0 || r->draft_pos + 1 != pos)
        return;
    r->n_drafts++;
    r->n_accepted += r->draft_id == r->ranking[0].id;
}

/* After the draft's logits are ranked. */
static void keep_draft(report *r, uint32_t pos)
{
    r->draft_pos = pos;
    r->draft_id = r->ranking[0].id;
}

static void print_json_position(void *ctx, uint32_t pos, const float *logits, const float *draft)
{
    report *r = ctx;

    printf("%s{\"pos\":%u", r->n_positions++ ? "," : "{\"positions\":[", pos);
    print_json_top(r, "top", logits);
    judge_draft(r, pos);
    if (draft) {
        print_json_top(r, "draft", draft);
        keep_draft(r, pos);
    }
    putchar('}');
}

/* The token as a quoted string: control characters must not reach a terminal. */
static void print_token(const report *r, int32_t id)
{
    char *text = NULL, *quoted = NULL;
    size_t n_bytes = 0;

    if (r->tok && yard_tokenizer_decode(r->tok, &id, 1, false, &text, &n_bytes, NULL) == YARD_OK) {
        json_t *string = json_stringn(text, n_bytes);
        quoted = json_dumps(string, JSON_ENCODE_ANY);
        json_decref(string);
    }
    printf("%6d %s", id, quoted ? quoted : "");
    free(quoted);
    free(text);
}

static void print_table_top(report *r, const char *what, const float *logits)
{
    rank(r, logits);
    for (uint32_t i = 0; i < r->n_top; i++) {
        printf("  %-5s %11.5f ", i == 0 ? what : "", (double)r->ranking[i].logit);
        print_token(r, r->ranking[i].id);
        putchar('\n');
    }
}

static void print_table_position(void *ctx, uint32_t pos, const float *logits, const float *draft)
{
    report *r = ctx;

    printf("%sposition %u, after", r->n_positions++ ? "\n" : "", pos);
    print_token(r, r->ids[pos]);
    putchar('\n');
    print_table_top(r, "next", logits);
    judge_draft(r, pos);
    if (draft) {
        print_table_top(r, "draft", draft);
        keep_draft(r, pos);
    }
}

static void print_end(const report *r)
{
    if (r->args->json && r->args->mtp)
        printf("],\"drafts\":%u,\"drafts_accepted\":%u}\n", r->n_drafts, r->n_accepted);
    else if (r->args->json)
        puts("]}");
    else if (r->n_drafts > 0)
        printf("\n%u of %u drafts (%.1f %%) are the model's own choice\n", r->n_accepted,
               r->n_drafts, 100.0 * r->n_accepted / r->n_drafts);
}

/* A tokenizer is needed for a text prompt and welcome for a table. */
static yard_status score(logits_args *args, yard_tokenizer **tok, yard_engine **engine, report *r,
                         yard_error *err)
{
    int32_t *ids = NULL;
    size_t n_ids = 0;
    yard_status st = yard_cli_check_model(args->model, err);

    if (st != YARD_OK)
        return st;
    if (!args->json || yard_prompt_is_text(&args->prompt))
        st = yard_cli_load_tokenizer(tok, args->model, yard_prompt_is_text(&args->prompt), err);
    if (st == YARD_OK)
        st = yard_prompt_read(&args->prompt, *tok, &ids, &n_ids, err);
    if (st != YARD_OK)
        return st;
    st = yard_engine_create(engine, &args->engine, err);
    if (st == YARD_OK && args->mtp && yard_engine_model_config(*engine)->n_mtp == 0)
        st = yard_fail(err, YARD_ENOTSUP, "--mtp: the model has no multi-token-prediction module");
    if (st != YARD_OK)
        goto out;

    *r = (report){ .args = args, .tok = *tok, .ids = ids, .draft_pos = -1 };
    r->n_vocab = yard_engine_model_config(*engine)->vocab;
    r->n_top = args->top < r->n_vocab ? (uint32_t)args->top : r->n_vocab;
    r->ranking = malloc(r->n_vocab * sizeof(r->ranking[0]));
    if (!r->ranking) {
        st = yard_fail(err, YARD_ENOMEM, "logits: no memory for %u", r->n_vocab);
        goto out;
    }
    st = yard_engine_score(*engine, ids, n_ids > UINT32_MAX ? UINT32_MAX : (uint32_t)n_ids,
                           (uint32_t)args->every,
                           args->json ? print_json_position : print_table_position, r);
    if (st != YARD_OK)
        yard_fail(err, st, "%s", yard_engine_error(*engine));
    else
        print_end(r);
out:
    free(r->ranking);
    free(ids);
    return st;
}

int yard_cmd_logits(int argc, char **argv)
{
    logits_args args = { .every = 8, .top = 20 };
    yard_tokenizer *tok = NULL;
    yard_engine *engine = NULL;
    report r = { 0 };
    yard_error err = { 0 };
    yard_status st;
    int rc;

    yard_cli_parse_args(&logits_argp, "switchyard logits", argc, argv, 0, &args);
    args.engine.model_dir = args.model;
    args.engine.max_seqs = 1;
    args.engine.mtp = args.mtp;

    st = score(&args, &tok, &engine, &r, &err);
    rc = yard_cli_close_stdout("logits");
    if (st != YARD_OK)
        rc = yard_cli_fail("logits", &err);
    yard_engine_destroy(engine);
    yard_tokenizer_free(tok);
    return rc;
}
