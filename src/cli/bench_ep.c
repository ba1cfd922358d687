/* switchyard bench ep: dispatch and combine, and what else could move the rows.
 *
 * Each transport, mode and layout is a group of ranks of its own (bench_ep_ranks.c). The inputs are
 * FP8 rows with their scales, routing is uniform and distinct within a token, results are bf16. */
#include <argp.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli/args.h"
#include "cli/bench_ep.h"

enum {
    KEY_DEVICE = 0x1000,
    KEY_RANKS,
    KEY_TRANSPORTS,
    KEY_TOKENS,
    KEY_HIDDEN,
    KEY_EXPERTS,
    KEY_TOP_K,
    KEY_MODES,
    KEY_LAYOUTS,
    KEY_LAUNCHES,
    KEY_PEER,
    KEY_ROUTING,
    KEY_REPEAT
};
enum { MAX_TOKENS = 1 << 16, MAX_HIDDEN = 1 << 20, MAX_EXPERTS = 1 << 16, MAX_REPEATS = 100000 };

enum { MEMCPY, SHM, TCP, LIBFABRIC, NODES, MPI, SOCKET, NVLINK, NVSHMEM, N_TRANSPORTS };
enum { N_CPU_TRANSPORTS = NVLINK };
static const char *const transport_names[] = { "memcpy", "shm",    "tcp",    "libfabric", "shm+tcp",
                                               "mpi",    "socket", "nvlink", "nvshmem" };
static const char *const padded_names[] = { "nccl", "nvshmem" };
static const char *const mode_names[] = { "exact", "partial" };
static const char *const layout_names[] = { "expert", "flat", "in-place" };
static const char *const launch_names[] = { "graph", "single", "cold", "split", "24sms" };
static const char *const phase_names[] = { "dispatch", "combine", "pair" };

/* Members of a set of names, in the order of the names. */
typedef struct choice {
    bool has[N_TRANSPORTS];
} choice;

typedef struct ep_bench {
    yard_bench_ep_settings settings;
    choice transports, modes, layouts, launches, padded;
    bool json, cuda, transports_given, tokens_given, launches_given, padded_given;

    bool namespaces;
    /* what memcpy took, if it was measured: [partial][layout] */
    double floor_us[2][YARD_BENCH_EP_N_LAYOUTS][YARD_BENCH_MAX_LIST][YARD_BENCH_EP_N_PHASES];
    yard_bench_ep_result limits; /* of the GPUs; no flag: not measured */
    uint32_t n_rows, n_wrong;
} ep_bench;

static yard_status parse_names(const char *option, const char *text, const char *const *names,
                               uint32_t n_names, choice *out, yard_error *err)
{
    choice c = { 0 };

    for (const char *at = text;; at++) {
        const size_t n = strcspn(at, ",");
        uint32_t i = 0;

        while (i < n_names && (strlen(names[i]) != n || strncmp(names[i], at, n) != 0))
            i++;
        if (i == n_names) {
            char list[80];
            int n_list = 0;

            for (i = 0; i < n_names; i++)
                n_list += snprintf(list + n_list, sizeof(list) - (size_t)n_list, "%s%s",
                                   i ? ", " : "", names[i]);
            return yard_fail(err, YARD_EINVAL, "%s: want some of %s, got '%s'", option, list, text);
        }
        c.has[i] = true;
        at += n;
        if (*at == '\0')
            break;
    }
    *out = c;
    return YARD_OK;
}

static yard_status parse_u32(const char *option, const char *text, uint32_t max, uint32_t *out,
                             yard_error *err)
{
    uint64_t value = 0;
    const yard_status st = yard_cli_parse_u64(option, text, 1, max, &value, err);

    if (st == YARD_OK)
        *out = (uint32_t)value;
    return st;
}

/* Rules between arguments, which the library would find only in the ranks. */
static void check_shape(const struct argp_state *state, const yard_bench_ep_settings *s)
{
    if (s->n_experts % s->n_ranks != 0)
        argp_error(state, "--experts: want a multiple of %u ranks, got %u", s->n_ranks,
                   s->n_experts);
    if (s->top_k > s->n_experts)
        argp_error(state, "--top-k: want at most %u experts, got %u", s->n_experts, s->top_k);
    if (s->grouped && (s->n_experts % YARD_BENCH_EP_GROUPS ||
                       s->top_k > s->n_experts / YARD_BENCH_EP_GROUPS * YARD_BENCH_EP_GROUPS_KEPT))
        argp_error(state, "--routing grouped: wants %d groups of experts, and top-k in %d of them",
                   YARD_BENCH_EP_GROUPS, YARD_BENCH_EP_GROUPS_KEPT);
}

/* What only one of the devices has. */
static void check_device(const struct argp_state *state, ep_bench *b)
{
    if (!b->cuda && (b->launches_given || b->padded_given))
        argp_error(state, "%s: wants --device cuda", b->padded_given ? "--peer" : "--launch");
    for (int i = 0; b->transports_given && i < N_TRANSPORTS; i++)
        if (b->transports.has[i] && (i >= N_CPU_TRANSPORTS) != b->cuda)
            argp_error(state, "--transports: %s is one of --device %s", transport_names[i],
                       b->cuda ? "cpu" : "cuda");
    for (int i = 0; !b->transports_given && i < N_TRANSPORTS; i++)
        b->transports.has[i] = b->cuda ? i == NVLINK : i < N_CPU_TRANSPORTS;
}

static const yard_bench_list gpu_tokens = { 11, { 1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096 } };

static error_t parse(int key, char *arg, struct argp_state *state)
{
    ep_bench *b = state->input;
    yard_bench_ep_settings *s = &b->settings;
    yard_error err = { 0 };
    yard_status st = YARD_OK;

    switch (key) {
    case KEY_DEVICE:
        b->cuda = !strcmp(arg, "cuda");
        if (!b->cuda && strcmp(arg, "cpu") != 0)
            argp_error(state, "--device: want cpu or cuda, got '%s'", arg);
        break;
    case KEY_RANKS:
        st = parse_u32("--ranks", arg, YARD_BENCH_EP_MAX_RANKS, &s->n_ranks, &err);
        break;
    case KEY_PEER:
        b->padded_given = true;
        st = parse_names("--peer", arg, padded_names, 2, &b->padded, &err);
        break;
    case KEY_ROUTING:
        s->grouped = !strcmp(arg, "grouped");
        if (!s->grouped && strcmp(arg, "uniform") != 0)
            argp_error(state, "--routing: want uniform or grouped, got '%s'", arg);
        break;
    case KEY_LAUNCHES:
        b->launches_given = true;
        st = parse_names("--launch", arg, launch_names, YARD_BENCH_EP_N_LAUNCHES, &b->launches,
                         &err);
        break;
    case KEY_TRANSPORTS:
        b->transports_given = true;
        st = parse_names("--transports", arg, transport_names, N_TRANSPORTS, &b->transports, &err);
        break;
    case KEY_TOKENS:
        b->tokens_given = true;
        st = yard_bench_parse_list("--tokens", arg, MAX_TOKENS, &s->tokens, &err);
        break;
    case KEY_HIDDEN:
        st = parse_u32("--hidden", arg, MAX_HIDDEN, &s->hidden, &err);
        break;
    case KEY_EXPERTS:
        st = parse_u32("--experts", arg, MAX_EXPERTS, &s->n_experts, &err);
        break;
    case KEY_TOP_K:
        st = parse_u32("--top-k", arg, YARD_BENCH_EP_MAX_TOP_K, &s->top_k, &err);
        break;
    case KEY_MODES:
        st = parse_names("--modes", arg, mode_names, 2, &b->modes, &err);
        break;
    case KEY_LAYOUTS:
        st =
            parse_names("--layouts", arg, layout_names, YARD_BENCH_EP_N_LAYOUTS, &b->layouts, &err);
        break;
    case KEY_REPEAT:
        st = yard_cli_parse_u64("--repeat", arg, 1, MAX_REPEATS, &s->n_repeats, &err);
        break;
    case 'j':
        b->json = true;
        break;
    case ARGP_KEY_END:
        check_shape(state, s);
        check_device(state, b);
        if (b->cuda && !b->tokens_given)
            s->tokens = gpu_tokens;
        break;
    default:
        return ARGP_ERR_UNKNOWN;
    }
    if (st != YARD_OK)
        argp_error(state, "%s", err.message);
    return 0;
}

static const struct argp_option option_list[] = {
    { "device", KEY_DEVICE, "NAME", 0, "cpu (default) or cuda", 0 },
    { "ranks", KEY_RANKS, "N", 0, "Processes that exchange rows (default 2)", 0 },
    { "transports", KEY_TRANSPORTS, "LIST", 0,
      "shm, tcp, libfabric, shm+tcp, and what they are compared with: mpi, memcpy, socket "
      "(default: all); cuda: nvlink (default), nvshmem",
      0 },
    { "tokens", KEY_TOKENS, "LIST", 0,
      "Tokens of each rank (default 1,8,32,64,128; cuda 1,2,4 .. 256,1024,4096)", 0 },
    { "hidden", KEY_HIDDEN, "N", 0, "Values of a row (default 7168)", 0 },
    { "experts", KEY_EXPERTS, "N", 0, "Experts in all (default 256)", 0 },
    { "top-k", KEY_TOP_K, "N", 0, "Experts of a token (default 8)", 0 },
    { "modes", KEY_MODES, "LIST", 0, "exact, partial (default: both)", 0 },
    { "layouts", KEY_LAYOUTS, "LIST", 0, "expert, flat, in-place (default: expert, flat)", 0 },
    { "routing", KEY_ROUTING, "KIND", 0,
      "uniform (default), or grouped: a token's experts from 4 of 8 groups, as DeepSeek-V3's", 0 },
    { "launch", KEY_LAUNCHES, "LIST", 0, "cuda: graph, single, cold, split, 24sms (default: all)",
      0 },
    { "peer", KEY_PEER, "LIST", 0,
      "cuda: nccl, nvshmem: also their padded all-to-alls, up to 256 tokens", 0 },
    { "repeat", KEY_REPEAT, "N", 0,
      "Timed repeats of a case (default 200); a case ends after 3 s if it has 5", 0 },
    { "json", 'j', NULL, 0, "One JSON object a row", 0 },
    { 0 },
};

static const struct argp ep_argp = {
    .options = option_list,
    .parser = parse,
    .doc =
        "Measures dispatch and combine of expert parallelism between processes of this machine.\v"
        "A row is the time of dispatch (send and receive), combine, or the pair of them; each "
        "figure is the largest of all ranks. \"verified\" says that every byte and sum was what "
        "the "
        "definition gives, before, at the end of and after the timed repeats, and that one row "
        "left for each token and destination rank. The ranks are pinned to CPUs of their own when "
        "there are enough.\n\n"
        "shm, tcp, libfabric: results are read where the experts wrote them, as far as memory is "
        "shared; shm \"copied\" is without that. The experts themselves are not timed.\n"
        "memcpy: each rank copies the bytes that the layout demands; the floor of the other rows.\n"
        "mpi: MPI_Alltoallv of a row for each (token, expert), \"padded\" per expert or with exact "
        "\"counts\" that are exchanged first; where Open MPI is installed.\n"
        "socket: a plain TCP connection with the bytes that tcp puts on the wire (\"stream\", "
        "\"bytes\" are those of one direction), and one row there and one result back "
        "(\"pingpong\").\n"
        "tcp, libfabric and socket run between two network namespaces when this is root and there "
        "is the ip command, else over loopback: \"link\" says which.\n"
        "shm+tcp: halves of the ranks as two nodes over loopback, shared memory inside; a row to "
        "the other node as a \"rank-copy\" for each rank that wants it, or one \"node-copy\". An "
        "even number of ranks, 4 at least.\n"
        "nvlink, nvshmem (--device cuda): rows bf16, FP8 on the wire, results bf16; ranks take the "
        "GPUs in turn. nvlink stores to peers; nvshmem puts, also to those that stores would "
        "reach. Launch \"graph\": mean pair of replays; \"single\": one pair call by call; "
        "\"cold\": other data pass through the cache before each call; \"split\": 200 us of work "
        "on the whole GPU before each call (both: the sum of the four calls, each timed between "
        "marks of its own); "
        "\"24sms\": sends fill 24 multiprocessors.\n"
        "limits (with --device cuda): a flag until the peer has seen it, stores to the peer while "
        "it stores here, a copy in own memory. The floor of a row is a flag for each phase, and "
        "the larger of its bytes on the wire and in memory at these rates.\n"
        "nccl, nvshmem \"padded\" (--peer): two all-to-alls with room for every token and expert, "
        "in a graph: NCCL's, and NVSHMEM's own collective.\n"
        "What cannot be opened here is named on stderr and left out.\n\n" YARD_BENCH_EP_FORMULA "\n"
        "Examples:\n"
        "  switchyard bench ep --device cpu\n"
        "  switchyard bench ep --transports shm,memcpy --tokens 1,128 --modes partial\n"
        "  switchyard bench ep --transports shm+tcp --ranks 8\n"
        "  switchyard bench ep --device cuda --launch graph --modes partial --json\n"
        "  switchyard bench ep --device cuda --transports nvlink,nvshmem \\\n"
        "      --peer nccl,nvshmem\n"
        "  switchyard bench ep --json >bench/results/ep-cpu.jsonl\n",
};

static json_t *shape_of(const ep_bench *b, const yard_bench_ep_group *g, const char *transport,
                        const char *variant, int phase, uint32_t tokens)
{
    json_t *shape =
        json_pack("{s:s, s:s, s:s, s:s, s:i, s:i, s:i, s:i}", "transport", transport, "phase",
                  phase_names[phase], "mode", mode_names[g->partial], "layout",
                  layout_names[g->layout], "tokens", (int)tokens, "hidden", (int)b->settings.hidden,
                  "experts", (int)b->settings.n_experts, "top_k", (int)b->settings.top_k);

    if (shape && b->settings.grouped)
        json_object_set_new(shape, "routing", json_string("grouped"));
    if (shape && variant)
        json_object_set_new(shape, "variant", json_string(variant));
    if (shape && g->peer && g->peer->launch) {
        json_object_set_new(shape, "launch", json_string(g->peer->launch));
        json_object_set_new(shape, "payload", json_string("bf16"));
    }
    if (shape && g->peer && g->peer->network)
        json_object_set_new(shape, "link", json_string(g->namespaces ? "namespaces" : "loopback"));
    return shape;
}

static double floor_of(const ep_bench *b, const yard_bench_ep_group *g,
                       const yard_bench_ep_result *r, int phase, uint32_t tokens_idx)
{
    if (!g->peer)
        return b->floor_us[g->partial][g->layout][tokens_idx][phase];
    if (g->peer == &yard_bench_ep_memcpy || g->peer->bytes)
        return -1;
    return g->peer->launch ? yard_bench_ep_floor_us(&b->limits, r, phase)
                           : b->floor_us[g->partial][g->layout][tokens_idx][phase];
}

static yard_status print_row(ep_bench *b, const yard_bench_ep_group *g, const char *transport,
                             const char *variant, int phase, uint32_t tokens_idx,
                             const yard_bench_ep_result *result, yard_error *err)
{
    const yard_bench_ep_times *t = &result->phase[phase];
    yard_bench_row row = {
        .bench = "ep",
        .p50_us = t->p50_us,
        .p99_us = t->p99_us,
        .min_us = t->min_us,
        .floor_us = floor_of(b, g, result, phase, tokens_idx),
        .bytes = t->bytes,
        .flops = -1,
        .verified = result->verified,
        .device = result->device[0] ? result->device : yard_bench_cpu_name(),
        .ranks = g->settings->n_ranks,
    };
    yard_status st;

    row.shape = shape_of(b, g, transport, variant, phase, g->settings->tokens.value[tokens_idx]);
    if (!row.shape)
        return yard_fail(err, YARD_ENOMEM, "bench: no memory for a row");
    st = yard_bench_print_row(&row, b->json, err);
    json_decref(row.shape);
    b->n_rows++;
    b->n_wrong += !row.verified;
    return st;
}

static yard_status print_rows(ep_bench *b, const yard_bench_ep_group *g, const char *transport,
                              const char *variant, const yard_bench_ep_result *results, uint32_t n,
                              yard_error *err)
{
    const bool pair_only = g->peer && g->peer->pair_only;
    yard_status st = YARD_OK;

    for (uint32_t i = 0; i < n; i++)
        for (int phase = pair_only ? YARD_BENCH_EP_PAIR : 0;
             st == YARD_OK && phase < YARD_BENCH_EP_N_PHASES; phase++) {
            st = print_row(b, g, transport, variant, phase, i, &results[i], err);
            if (g->peer == &yard_bench_ep_memcpy)
                b->floor_us[g->partial][g->layout][i][phase] = results[i].phase[phase].p50_us;
        }
    return st;
}

/* What this machine lacks leaves rows out; anything else ends the bench. */
static yard_status left_out(const char *transport, const char *variant, yard_status st,
                            yard_error *err)
{
    if (st != YARD_ENOTSUP)
        return st;
    fprintf(stderr, "bench ep: %s%s%s left out: %s\n", transport, variant ? " " : "",
            variant ? variant : "", err->message);
    *err = (yard_error){ 0 };
    return YARD_OK;
}

static yard_status run_group(ep_bench *b, const yard_bench_ep_peer *peer, bool partial,
                             yard_bench_ep_layout layout, yard_error *err)
{
    yard_bench_ep_settings settings = b->settings;
    yard_bench_ep_result results[YARD_BENCH_MAX_LIST];
    const yard_bench_ep_group g = { .settings = &settings,
                                    .peer = peer,
                                    .partial = partial,
                                    .layout = layout,
                                    .namespaces = peer->network && b->namespaces };
    uint32_t n_done;
    yard_status st, printed;

    if (peer->one_token)
        settings.tokens = (yard_bench_list){ 1, { 1 } };
    st = yard_bench_ep_run_group(&g, results, &n_done, err);
    printed =
        print_rows(b, &g, peer->name, peer->variant, results, n_done, st == YARD_OK ? err : NULL);
    return st == YARD_OK ? printed : st;
}

/* Every mode and layout that was asked for; flat is the same on the wire, so it says nothing new of
 * a peer that only knows the wire. Rows in place go without node copies. */
static yard_status run_peer(ep_bench *b, const yard_bench_ep_peer *peer, yard_error *err)
{
    yard_status st = YARD_OK;

    if (peer->two_ranks && b->settings.n_ranks != 2) {
        fprintf(stderr, "bench ep: %s %s left out: it wants 2 ranks\n", peer->name, peer->variant);
        return YARD_OK;
    }
    if (peer->two_nodes && (b->settings.n_ranks < 4 || b->settings.n_ranks % 2)) {
        fprintf(stderr, "bench ep: %s %s left out: it wants an even number of ranks, 4 at least\n",
                peer->name, peer->variant);
        return YARD_OK;
    }
    for (int partial = 0; partial < 2; partial++)
        for (int layout = 0; layout < YARD_BENCH_EP_N_LAYOUTS; layout++)
            if (st == YARD_OK && b->modes.has[partial] && b->layouts.has[layout] &&
                !(layout > 0 && peer->bytes && b->layouts.has[0]) &&
                !(layout == YARD_BENCH_EP_IN_PLACE && peer == &yard_bench_ep_node_copies))
                st = run_group(b, peer, partial, (yard_bench_ep_layout)layout, err);
    return left_out(peer->name, peer->variant, st, err);
}

/* MPI programs know no partial sums and no flat layout: these rows stand against all others. */
static yard_status run_mpi(ep_bench *b, yard_error *err)
{
    const yard_bench_ep_group g = { .settings = &b->settings };
    yard_bench_ep_result results[YARD_BENCH_MAX_LIST];
    yard_status st = YARD_OK;

    if (b->settings.grouped) {
        fprintf(stderr, "bench ep: mpi left out: it knows uniform routing only\n");
        return YARD_OK;
    }
    for (int padded = 1; padded >= 0 && st == YARD_OK; padded--) {
        const char *variant = padded ? "padded" : "counts";

        st = yard_bench_ep_run_mpi(&b->settings, padded, results, err);
        if (st != YARD_OK)
            st = left_out("mpi", variant, st, err);
        else
            st = print_rows(b, &g, "mpi", variant, results, g.settings->tokens.n, err);
    }
    return st;
}

/* Its bytes grow with experts times tokens: beyond some there is no sense in it. */
static yard_status run_padded(ep_bench *b, const yard_bench_ep_peer *peer, yard_error *err)
{
    enum { MOST = 256 };
    const yard_bench_list all = b->settings.tokens;
    yard_status st;

    b->settings.tokens.n = 0;
    for (uint32_t i = 0; i < all.n; i++)
        if (all.value[i] <= MOST)
            b->settings.tokens.value[b->settings.tokens.n++] = all.value[i];
    st = run_group(b, peer, false, false, err);
    b->settings.tokens = all;
    return left_out(peer->name, peer->variant, st, err);
}

static yard_status run_limits(ep_bench *b, yard_error *err)
{
    return left_out("limits", NULL,
                    yard_bench_ep_run_limits(&b->settings, b->json, &b->limits, err), err);
}

static yard_status run_cuda(ep_bench *b, yard_error *err)
{
    const yard_bench_ep_peer *padded[] = { &yard_bench_ep_padded_nccl,
                                           &yard_bench_ep_padded_nvshmem };
    yard_status st = run_limits(b, err);

    for (int t = NVLINK; t <= NVSHMEM && st == YARD_OK; t++)
        for (int i = 0; i < YARD_BENCH_EP_N_LAUNCHES && st == YARD_OK; i++)
            if (b->transports.has[t] && b->launches.has[i])
                st = run_peer(b, t == NVLINK ? &yard_bench_ep_nvlink[i] : &yard_bench_ep_nvshmem[i],
                              err);
    for (int i = 0; i < 2 && st == YARD_OK; i++)
        if (b->padded.has[i])
            st = run_padded(b, padded[i], err);
    return st;
}

static yard_status run_all(ep_bench *b, yard_error *err)
{
    const yard_bench_ep_peer *peers[] = {
        [MEMCPY] = &yard_bench_ep_memcpy,     [SHM] = &yard_bench_ep_shm,
        [TCP] = &yard_bench_ep_tcp,           [LIBFABRIC] = &yard_bench_ep_libfabric,
        [NODES] = &yard_bench_ep_rank_copies, [SOCKET] = &yard_bench_ep_socket
    };
    yard_status st = YARD_OK;

    for (int i = 0; i < N_CPU_TRANSPORTS && st == YARD_OK; i++) {
        if (!b->transports.has[i])
            continue;
        st = i == MPI ? run_mpi(b, err) : run_peer(b, peers[i], err);
        if (i == SHM && st == YARD_OK)
            st = run_peer(b, &yard_bench_ep_shm_copied, err);
        if (i == NODES && st == YARD_OK)
            st = run_peer(b, &yard_bench_ep_node_copies, err);
        if (i == SOCKET && st == YARD_OK)
            st = run_peer(b, &yard_bench_ep_pingpong, err);
    }
    return st;
}

static void forget_floors(ep_bench *b)
{
    double *floor_us = &b->floor_us[0][0][0][0];

    for (size_t i = 0; i < sizeof(b->floor_us) / sizeof(*floor_us); i++)
        floor_us[i] = -1;
}

int yard_bench_ep(int argc, char **argv)
{
    ep_bench b = { .settings = { .n_ranks = 2,
                                 .hidden = 7168,
                                 .n_experts = 256,
                                 .top_k = 8,
                                 .n_repeats = 200,
                                 .tokens = { 5, { 1, 8, 32, 64, 128 } } },
                   .modes = { { true, true } },
                   .layouts = { { true, true } },
                   .launches = { { true, true, true, true, true } } };
    yard_error err = { 0 };
    yard_status st;
    int rc;

    yard_cli_parse_args(&ep_argp, "switchyard bench ep", argc, argv, 0, &b);
    forget_floors(&b);
    b.namespaces = b.settings.n_ranks == 2 && yard_bench_ep_link_possible();
    yard_bench_print_head(b.json);
    st = b.cuda ? run_cuda(&b, &err) : run_all(&b, &err);
    if (st == YARD_OK && b.n_wrong > 0)
        st = yard_fail(&err, YARD_EDEVICE, "%u of %u rows are not what the definition gives",
                       b.n_wrong, b.n_rows);
    if (st == YARD_OK && b.n_rows == 0)
        st = yard_fail(&err, YARD_ENOTSUP, "nothing could be measured");
    if (!b.json)
        printf("\n%s", YARD_BENCH_EP_FORMULA);
    if (!b.json)
        yard_bench_ep_print_verdict(&b.limits);
    rc = yard_cli_close_stdout("bench ep");
    return st == YARD_OK ? rc : yard_cli_fail("bench ep", &err);
}
