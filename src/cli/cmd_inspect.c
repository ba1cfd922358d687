/* switchyard inspect: what a model is and what each rank of a layout would hold. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli/args.h"
#include "engine/engine.h"
#include "model/model.h"

/* More ranks than these are shown as the first, the last and a summary, unless all are wanted. */
enum { MAX_SHOWN_RANKS = 16 };

enum { KEY_EP = 0x1000, KEY_DP, KEY_TP, KEY_JSON, KEY_ALL_RANKS };

typedef struct inspect_args {
    const char *model;
    yard_layout layout; /* 0: not given */
    bool json, all_ranks;
} inspect_args;

static uint32_t rank_count(struct argp_state *state, const char *option, const char *text)
{
    yard_error err = { 0 };
    uint64_t value = 0;

    if (yard_cli_parse_u64(option, text, 1, 1 << 20, &value, &err) != YARD_OK)
        argp_error(state, "%s", err.message);
    return (uint32_t)value;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    inspect_args *args = state->input;

    switch (key) {
    case KEY_EP:
        args->layout.ep = rank_count(state, "--ep", arg);
        return 0;
    case KEY_DP:
        args->layout.dp = rank_count(state, "--dp", arg);
        return 0;
    case KEY_TP:
        args->layout.tp = rank_count(state, "--tp", arg);
        return 0;
    case KEY_JSON:
        args->json = true;
        return 0;
    case KEY_ALL_RANKS:
        args->all_ranks = true;
        return 0;
    default:
        return yard_cli_parse_model(key, arg, state, &args->model);
    }
}

static const struct argp_option option_list[] = {
    { "ep", KEY_EP, "N", 0, "Expert-parallel ranks, all of them: EP = DP x TP", 0 },
    { "dp", KEY_DP, "N", 0, "Data-parallel groups for attention", 0 },
    { "tp", KEY_TP, "N", 0, "Tensor-parallel ranks of one group", 0 },
    { "all-ranks", KEY_ALL_RANKS, NULL, 0, "A line for every rank, however many", 0 },
    { "json", KEY_JSON, NULL, 0,
      "One line {\"params\":..,\"params_active\":..,\"params_mtp\":..,\"kv_bytes_per_token\":..,"
      "\"weight_bytes_per_rank\":..,\"ep\":..,\"dp\":..,\"tp\":..,\"ranks\":[{\"rank\":..},..]} "
      "instead; weight_bytes_per_rank is the largest rank's",
      0 },
    { 0 },
};

static const struct argp inspect_argp = {
    .options = option_list,
    .parser = parse,
    .args_doc = "MODEL",
    .doc = "Parameters, KV cache and memory per rank of a model. MODEL is a directory with a "
           "config.json in Hugging Face's form; weights are not read and need not be there."
           "\vOf EP, DP and TP those not given follow from the others; alone, EP means TP 1 and TP "
           "means DP 1; without any, the layout is one rank. Active parameters are those one token "
           "uses: its chosen experts, without the embedding, with the head. MTP modules have lines "
           "of their own and are in no other figure. GB are 10^9 bytes.\n\n"
           "Examples:\n"
           "  switchyard inspect models/demo\n"
           "  switchyard inspect DeepSeek-V3 --ep 128 --tp 4\n"
           "  switchyard inspect DeepSeek-V3 --ep 32 --json\n",
};

/* What was not given follows from the rest; a contradiction is left for the layout check. */
static yard_layout complete_layout(yard_layout l)
{
    if (!l.tp)
        l.tp = l.ep && l.dp ? l.ep / l.dp : 1;
    if (!l.dp)
        l.dp = l.ep ? l.ep / l.tp : 1;
    if (!l.ep)
        l.ep = l.dp * l.tp;
    return l;
}

/* 671026419200 as "671.03 B". */
static const char *count_text(uint64_t n, char text[32])
{
    if (n >= 1000000000)
        snprintf(text, 32, "%.2f B", (double)n * 1e-9);
    else
        snprintf(text, 32, "%.2f M", (double)n * 1e-6);
    return text;
}

static const char *bytes_text(uint64_t n, char text[32])
{
    if (n >= 1000000000)
        snprintf(text, 32, "%.2f GB", (double)n * 1e-9);
    else
        snprintf(text, 32, "%.2f MB", (double)n * 1e-6);
    return text;
}

/* 70272 as "70,272". */
static const char *grouped_text(uint64_t n, char text[32])
{
    char digits[24];
    const int n_digits = snprintf(digits, sizeof(digits), "%" PRIu64, n);
    int at = 0;

    for (int i = 0; i < n_digits; i++) {
        if (i > 0 && (n_digits - i) % 3 == 0)
            text[at++] = ',';
        text[at++] = digits[i];
    }
    text[at] = '\0';
    return text;
}

static void print_rotary(const yard_model_config *c)
{
    printf("  rotary       theta %g", c->rope_theta);
    if (c->has_yarn)
        printf(", YaRN x%g over %u positions", c->yarn_factor, c->yarn_original_positions);
    printf(", context %u\n", c->max_positions);
}

static void print_router(const yard_model_config *c)
{
    printf("  router       %u of %u experts a token", c->top_k, c->n_experts);
    if (c->n_groups > 1)
        printf(", from %u of %u groups", c->top_groups, c->n_groups);
    printf(", %s scores%s%s, times %g\n", c->score == YARD_SCORE_SIGMOID ? "sigmoid" : "softmax",
           c->router_bias ? " + bias" : "", c->normalise_topk ? ", normalised" : "",
           (double)c->routed_scale);
}

static void print_attention(const yard_model_config *c)
{
    char text[32] = "no q rank";

    if (c->attention == YARD_ATTENTION_GQA) {
        snprintf(text, sizeof(text), ", window %u", c->window);
        printf("  attention    GQA, %u heads, %u of keys and values, head %u%s\n", c->n_heads,
               c->n_kv_heads, c->rope_dims, c->window ? text : "");
        return;
    }
    if (c->q_rank)
        snprintf(text, sizeof(text), "q rank %u", c->q_rank);
    printf("  attention    MLA, %u heads, %s, kv rank %u, head %u + %u rotary, value %u\n",
           c->n_heads, text, c->kv_rank, c->nope_dims, c->rope_dims, c->v_dims);
}

static void print_model(const yard_model_config *c)
{
    printf("%s\n", c->family);
    printf("  layers       %u (%u dense), hidden %u, vocabulary %u%s\n", c->n_layers,
           c->n_dense_layers, c->hidden, c->vocab,
           c->tied_embedding ? ", head is the embedding" : "");
    print_attention(c);
    print_rotary(c);
    print_router(c);
    printf("  experts      %u wide, %u shared", c->expert_inter, c->n_shared_experts);
    if (c->n_dense_layers)
        printf("; dense MLP %u wide", c->dense_inter);
    printf("\n  MTP          %u module%s\n", c->n_mtp, c->n_mtp == 1 ? "" : "s");
    if (c->fp8)
        printf("  weights      FP8 e4m3 in blocks of %u x %d%s\n", c->block_rows, YARD_GROUP,
               c->ue8m0 ? ", scales are powers of two" : "");
    else
        printf("  weights      %u bits\n", 8 * c->plain_bytes);
}

static void print_counts(const yard_model_config *c, const yard_param_count *n)
{
    char text[32], copies[32];

    printf("\nparameters     %s\n", count_text(n->total, text));
    printf("  active       %s a token, without embedding, with head\n",
           count_text(n->active, text));
    if (c->n_mtp)
        printf("  MTP          %s more, of them %s copies of embedding and head\n",
               count_text(n->mtp, text), count_text(2 * c->n_mtp * n->embedding, copies));
    printf("KV cache       %s bytes a token",
           grouped_text(yard_model_kv_bytes_per_token(c, YARD_BF16), text));
    if (c->attention == YARD_ATTENTION_MLA)
        printf(", %s with --kv-dtype fp8",
               grouped_text(yard_model_kv_bytes_per_token(c, YARD_FP8_E4M3), text));
    printf("\n");
}

static void print_rank(uint32_t rank, const yard_rank_memory *m, bool has_mtp)
{
    char experts[32], weights[32], mtp[32];

    snprintf(experts, sizeof(experts), "%u-%u", m->first_expert,
             m->first_expert + m->n_experts - 1);
    printf("  %5u  %8u  %8u  %11s  %10s", rank, m->dp_group, m->tp_slice, experts,
           bytes_text(m->weight_bytes, weights));
    if (has_mtp)
        printf("  %10s", bytes_text(m->mtp_weight_bytes, mtp));
    printf("\n");
}

static void print_ranks(const yard_rank_memory *ranks, uint32_t n_ranks, bool all, bool has_mtp)
{
    printf("  %5s  %8s  %8s  %11s  %10s%s\n", "rank", "DP group", "TP slice", "experts", "weights",
           has_mtp ? "   MTP extra" : "");
    if (all || n_ranks <= MAX_SHOWN_RANKS) {
        for (uint32_t i = 0; i < n_ranks; i++)
            print_rank(i, &ranks[i], has_mtp);
        return;
    }
    print_rank(0, &ranks[0], has_mtp);
    printf("    ...  %u more, --all-ranks shows them\n", n_ranks - 2);
    print_rank(n_ranks - 1, &ranks[n_ranks - 1], has_mtp);
}

typedef struct rank_summary {
    uint64_t min_bytes, max_bytes;
} rank_summary;

/* What a step of the engine's default size takes beside weights and cache. */
static yard_model_options default_step(yard_layout l, bool exact)
{
    const yard_engine_config defaults = YARD_ENGINE_CONFIG_INIT;

    return (yard_model_options){ .exact = exact,
                                 .max_tokens = defaults.max_tokens,
                                 .max_seqs = defaults.max_seqs,
                                 .max_logits = defaults.max_seqs,
                                 .layout = l };
}

/* Layouts that only exact mode can have are shown as such. */
static void print_buffers(yard_layout l, const yard_model_config *c)
{
    char heap[32], scratch[32], cache[32];
    yard_model_options options = default_step(l, false);
    yard_model_budget budget;
    yard_error err = { 0 };

    if (yard_layout_check(c, l, false, &err) != YARD_OK) {
        options.exact = true;
        printf("  exact only   %s\n", err.message);
    }
    if (yard_model_budget_of(c, &options, &budget, &err) != YARD_OK) {
        printf("  not run      %s\n", err.message);
        return;
    }
    printf("  a rank has   %s bytes of KV cache a token of its DP group; for steps of %u tokens\n"
           "               %s of rows between ranks, at most %s of buffers\n",
           grouped_text((uint64_t)c->n_layers *
                            yard_model_kv_row_bytes(c, l.tp, options.exact ? YARD_F32 : YARD_BF16),
                        cache),
           options.max_tokens, bytes_text(budget.heap_bytes, heap),
           bytes_text(budget.scratch_bytes, scratch));
}

static void print_layout(yard_layout l, const yard_rank_memory *ranks, rank_summary s,
                         const inspect_args *args, const yard_model_config *c)
{
    const bool gqa = c->attention == YARD_ATTENTION_GQA, has_mtp = c->n_mtp > 0;
    char max[32], min[32];

    printf("\nlayout         EP %u = DP %u x TP %u\n", l.ep, l.dp, l.tp);
    if (s.min_bytes == s.max_bytes)
        printf("  weights      %s on every rank\n", bytes_text(s.max_bytes, max));
    else
        printf("  weights      %s to %s a rank\n", bytes_text(s.min_bytes, min),
               bytes_text(s.max_bytes, max));
    if (l.tp > 1 && gqa)
        printf("  of TP        q, k, v and o are cut\n");
    else if (l.tp > 1)
        printf(
            "  of TP        q_b, kv_b, o and dense MLPs are cut; q_a, kv_a and shared experts are "
            "whole on every rank\n");
    print_buffers(l, c);
    print_ranks(ranks, l.ep, args->all_ranks, has_mtp);
}

static void print_json(const yard_model_config *c, const yard_param_count *n, rank_summary s,
                       yard_layout l, const yard_rank_memory *ranks)
{
    printf("{\"params\":%" PRIu64 ",\"params_active\":%" PRIu64 ",\"params_mtp\":%" PRIu64
           ",\"kv_bytes_per_token\":%" PRIu64 ",\"weight_bytes_per_rank\":%" PRIu64
           ",\"ep\":%u,\"dp\":%u,\"tp\":%u,\"ranks\":[",
           n->total, n->active, n->mtp, yard_model_kv_bytes_per_token(c, YARD_BF16), s.max_bytes,
           l.ep, l.dp, l.tp);
    for (uint32_t i = 0; i < l.ep; i++)
        printf("%s{\"rank\":%u,\"dp_group\":%u,\"tp_slice\":%u,\"first_expert\":%u,"
               "\"n_experts\":%u,\"weight_bytes\":%" PRIu64 ",\"mtp_weight_bytes\":%" PRIu64 "}",
               i ? "," : "", i, ranks[i].dp_group, ranks[i].tp_slice, ranks[i].first_expert,
               ranks[i].n_experts, ranks[i].weight_bytes, ranks[i].mtp_weight_bytes);
    printf("]}\n");
}

/* *ranks is malloc'd, layout.ep of them. */
static yard_status list_ranks(const yard_model_config *c, yard_layout layout,
                              yard_rank_memory **ranks, rank_summary *s, yard_error *err)
{
    yard_rank_memory first;
    yard_rank_memory *list;
    yard_status st = yard_model_rank_memory(c, layout, 0, &first, err); /* checks the layout */

    if (st)
        return st;
    list = calloc(layout.ep, sizeof(*list));
    if (!list)
        return yard_fail(err, YARD_ENOMEM, "no memory for %u ranks", layout.ep);
    *s = (rank_summary){ first.weight_bytes, first.weight_bytes };
    for (uint32_t i = 0; i < layout.ep && !st; i++) {
        st = yard_model_rank_memory(c, layout, i, &list[i], err);
        if (list[i].weight_bytes < s->min_bytes)
            s->min_bytes = list[i].weight_bytes;
        if (list[i].weight_bytes > s->max_bytes)
            s->max_bytes = list[i].weight_bytes;
    }
    *ranks = list;
    return st;
}

int yard_cmd_inspect(int argc, char **argv)
{
    inspect_args args = { 0 };
    yard_model_config c;
    yard_param_count n;
    yard_rank_memory *ranks = NULL;
    rank_summary summary = { 0 };
    yard_error err = { 0 };
    yard_status st;

    yard_cli_parse_args(&inspect_argp, "switchyard inspect", argc, argv, 0, &args);
    args.layout = complete_layout(args.layout);
    st = yard_model_config_load(&c, args.model, yard_cli_notify(), &err);
    if (!st)
        st = list_ranks(&c, args.layout, &ranks, &summary, &err);
    if (st) {
        free(ranks);
        return yard_cli_fail("inspect", &err);
    }
    yard_model_count_params(&c, &n);
    if (args.json) {
        print_json(&c, &n, summary, args.layout, ranks);
    } else {
        print_model(&c);
        print_counts(&c, &n);
        print_layout(args.layout, ranks, summary, &args, &c);
    }
    free(ranks);
    return yard_cli_close_stdout("inspect");
}
