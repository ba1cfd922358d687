/* switchyard bench load: binding and checking a checkpoint, on as many ranks as it is spread over.
 *
 * Ranks are processes that start at once; a row is the time until the last one has its share. The
 * floor is the same number of processes that read as many bytes with read(2), from places of the
 * files that are spread alike. Cold rows drop the files from the page cache before every run. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/args.h"
#include "cli/bench.h"
#include "model/model.h"

enum { MAX_RANKS = 64, MAX_THREADS = 1024, MAX_FILES = 1024, READ_BYTES = 4 << 20 };
enum { KEY_RANKS = 0x1000, KEY_THREADS, KEY_REPEAT };

typedef struct load_bench {
    const char *model;
    yard_bench_list ranks;
    uint64_t n_threads, n_repeats;
    bool json;
    yard_model_config config;
    int fds[MAX_FILES]; /* of the shards, in the order of the folder */
    uint64_t file_bytes[MAX_FILES], total_bytes;
    uint32_t n_files;
} load_bench;

/* What a rank does between start and end; 0 when it went well. */
typedef int (*rank_fn)(const load_bench *b, uint32_t n_ranks, uint32_t rank);

static error_t parse(int key, char *arg, struct argp_state *state)
{
    load_bench *b = state->input;
    yard_error err = { 0 };
    yard_status st = YARD_OK;

    switch (key) {
    case KEY_RANKS:
        st = yard_bench_parse_list("--ranks", arg, MAX_RANKS, &b->ranks, &err);
        break;
    case KEY_THREADS:
        st = yard_cli_parse_u64("--threads", arg, 1, MAX_THREADS, &b->n_threads, &err);
        break;
    case KEY_REPEAT:
        st = yard_cli_parse_u64("--repeat", arg, 1, 10000, &b->n_repeats, &err);
        break;
    case 'j':
        b->json = true;
        break;
    case ARGP_KEY_ARG:
        if (state->arg_num > 0)
            argp_error(state, "want one MODEL, got '%s' too", arg);
        b->model = arg;
        break;
    default:
        return ARGP_ERR_UNKNOWN;
    }
    if (st != YARD_OK)
        argp_error(state, "%s", err.message);
    return 0;
}

static const struct argp_option option_list[] = {
    { "ranks", KEY_RANKS, "LIST", 0, "Ranks to spread the experts over (default 1,2)", 0 },
    { "threads", KEY_THREADS, "N", 0, "Threads of each rank (default 1)", 0 },
    { "repeat", KEY_REPEAT, "N", 0, "Timed runs of each case (default 5)", 0 },
    { "json", 'j', NULL, 0, "One JSON object a row", 0 },
    { 0 },
};

static const struct argp load_argp = {
    .options = option_list,
    .parser = parse,
    .args_doc = "[MODEL]",
    .doc = "Time until every rank has bound and checked its share of a checkpoint (default "
           "models/demo), beside a plain read of as many bytes; with the files in the page cache "
           "and without.\v"
           "A row is verified when every rank has read exactly the bytes that `switchyard inspect` "
           "says it holds.\n\n"
           "Examples:\n"
           "  switchyard synth --arch deepseek-v2-lite --layers 3 --out /data/lite-3\n"
           "  switchyard bench load /data/lite-3 --ranks 1,2,4\n",
};

static yard_status open_files(load_bench *b, yard_error *err)
{
    DIR *dir = opendir(b->model);
    yard_status st = YARD_OK;

    if (!dir)
        return yard_fail(err, YARD_EIO, "%s: cannot open: %s", b->model, strerror(errno));
    for (const struct dirent *e; st == YARD_OK && (e = readdir(dir));) {
        const char *const ending = strstr(e->d_name, ".safetensors");
        int fd;

        if (!ending || strcmp(ending, ".safetensors") != 0 || b->n_files == MAX_FILES)
            continue;
        fd = openat(dirfd(dir), e->d_name, O_RDONLY | O_CLOEXEC);
        if (fd < 0) {
            st = yard_fail(err, YARD_EIO, "%s/%s: cannot open: %s", b->model, e->d_name,
                           strerror(errno));
            break;
        }
        b->fds[b->n_files] = fd;
        b->file_bytes[b->n_files] = (uint64_t)lseek(fd, 0, SEEK_END);
        b->total_bytes += b->file_bytes[b->n_files++];
    }
    closedir(dir);
    if (st == YARD_OK && b->n_files == 0)
        st = yard_fail(err, YARD_EIO, "%s: no .safetensors file", b->model);
    return st;
}

static void drop_cache(const load_bench *b)
{
    for (uint32_t i = 0; i < b->n_files; i++)
        posix_fadvise(b->fds[i], 0, 0, POSIX_FADV_DONTNEED);
}

static yard_share share_of(const load_bench *b, uint32_t n_ranks, uint32_t rank)
{
    return yard_layout_share(&b->config, (yard_layout){ n_ranks, n_ranks, 1 }, rank);
}

static uint64_t bytes_of(const load_bench *b, uint32_t n_ranks, uint32_t rank)
{
    yard_rank_memory m = { 0 };

    (void)yard_model_rank_memory(&b->config, (yard_layout){ n_ranks, n_ranks, 1 }, rank, &m, NULL);
    return m.weight_bytes + m.mtp_weight_bytes;
}

static void keep_total(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    (void)what;
    *(uint64_t *)ctx = done == total ? total : 0;
}

static int load_share(const load_bench *b, uint32_t n_ranks, uint32_t rank)
{
    const yard_share share = share_of(b, n_ranks, rank);
    uint64_t n_read = 0;
    const yard_notify notify = { .progress = keep_total, .ctx = &n_read };
    yard_weights *w = NULL;
    yard_error err = { 0 };

    if (yard_weights_load(&w, b->model, &b->config, &share, (uint32_t)b->n_threads, &notify,
                          &err) != YARD_OK) {
        fprintf(stderr, "switchyard bench load: rank %u: %s\n", rank, err.message);
        return 1;
    }
    return n_read == bytes_of(b, n_ranks, rank) ? 0 : 2;
}

/* As many bytes as the share has, in a row, rank r's from r / n of all files on. */
static int read_plainly(const load_bench *b, uint32_t n_ranks, uint32_t rank)
{
    uint64_t left = bytes_of(b, n_ranks, rank), at = b->total_bytes / n_ranks * rank;
    char *buffer = malloc(READ_BYTES);
    uint32_t file = 0;

    while (buffer && left > 0) {
        const size_t want = left < READ_BYTES ? (size_t)left : READ_BYTES;
        ssize_t n;

        for (; at >= b->file_bytes[file]; file = (file + 1) % b->n_files)
            at -= b->file_bytes[file];
        n = pread(b->fds[file], buffer, want, (off_t)at);
        if (n <= 0)
            return 1;
        left -= (uint64_t)n;
        at += (uint64_t)n;
    }
    free(buffer);
    return buffer ? 0 : 1;
}

/* Starts n_ranks processes and times them from their common start to the last one's end, before
 * they give anything back. Negative when one failed. */
static double time_ranks(const load_bench *b, uint32_t n_ranks, rank_fn fn)
{
    int go[2], done[2];
    bool ok = true;
    double start;

    if (pipe(go) != 0 || pipe(done) != 0)
        return -1;
    fflush(NULL);
    for (uint32_t r = 0; r < n_ranks; r++)
        if (fork() == 0) {
            char byte;
            close(go[1]);
            if (read(go[0], &byte, 1) != 0)
                _exit(1);
            byte = (char)fn(b, n_ranks, r);
            _exit(write(done[1], &byte, 1) == 1 ? 0 : 1);
        }
    close(done[1]);
    start = yard_bench_now_us();
    close(go[1]); /* all read the end of the pipe */
    for (uint32_t r = 0; r < n_ranks; r++) {
        char byte = 1;
        ok = read(done[0], &byte, 1) == 1 && byte == 0 && ok;
    }
    start = yard_bench_now_us() - start;
    close(go[0]);
    close(done[0]);
    for (uint32_t r = 0; r < n_ranks; r++)
        wait(NULL);
    return ok ? start : -1;
}

static double measure(const load_bench *b, uint32_t n_ranks, bool cold, rank_fn fn,
                      yard_bench_row *row, double *samples)
{
    row->verified = true;
    for (uint64_t i = 0; i < b->n_repeats + 1; i++) { /* the first warms up */
        double us;

        if (cold)
            drop_cache(b);
        us = time_ranks(b, n_ranks, fn);
        row->verified = row->verified && us >= 0;
        if (i > 0)
            samples[i - 1] = us;
    }
    yard_bench_fill(row, samples, b->n_repeats);
    return row->p50_us;
}

static yard_status run_case(const load_bench *b, uint32_t n_ranks, bool cold, double *samples,
                            bool *verified, yard_error *err)
{
    yard_bench_row row = {
        .bench = "load", .flops = -1, .device = yard_bench_cpu_name(), .ranks = n_ranks
    };
    yard_status st;

    row.shape =
        json_pack("{s:s, s:s, s:i, s:i}", "model", b->model, "cache", cold ? "cold" : "warm",
                  "ranks", (int)n_ranks, "threads", (int)b->n_threads);
    if (!row.shape)
        return yard_fail(err, YARD_ENOMEM, "bench: no memory for a row");
    for (uint32_t r = 0; r < n_ranks; r++)
        row.bytes += (double)bytes_of(b, n_ranks, r);
    row.floor_us = measure(b, n_ranks, cold, read_plainly, &row, samples);
    measure(b, n_ranks, cold, load_share, &row, samples);
    *verified = *verified && row.verified;
    st = yard_bench_print_row(&row, b->json, err);
    json_decref(row.shape);
    return st;
}

static yard_status run_all(load_bench *b, bool *verified, yard_error *err)
{
    double *samples;
    yard_status st = yard_model_config_load(&b->config, b->model, yard_cli_notify(), err);

    for (uint32_t i = 0; i < b->ranks.n && st == YARD_OK; i++)
        st = yard_layout_check(&b->config, (yard_layout){ b->ranks.value[i], b->ranks.value[i], 1 },
                               true, err);
    if (st == YARD_OK)
        st = open_files(b, err);
    if (st != YARD_OK)
        return st;
    samples = calloc(b->n_repeats, sizeof(*samples));
    if (!samples)
        return yard_fail(err, YARD_ENOMEM, "bench: no memory for samples");
    yard_bench_print_head(b->json);
    for (uint32_t i = 0; i < b->ranks.n; i++)
        for (int cold = 0; cold < 2 && st == YARD_OK; cold++)
            st = run_case(b, b->ranks.value[i], cold, samples, verified, err);
    free(samples);
    return st;
}

int yard_bench_load(int argc, char **argv)
{
    load_bench b = {
        .model = "models/demo", .ranks = { 2, { 1, 2 } }, .n_threads = 1, .n_repeats = 5
    };
    bool verified = true;
    yard_error err = { 0 };
    yard_status st;

    yard_cli_parse_args(&load_argp, "switchyard bench load", argc, argv, 0, &b);
    st = run_all(&b, &verified, &err);
    for (uint32_t i = 0; i < b.n_files; i++)
        close(b.fds[i]);
    if (st == YARD_OK && !verified)
        st = yard_fail(&err, YARD_EFORMAT, "a rank did not read what it holds: see the rows");
    return st == YARD_OK ? yard_cli_close_stdout("bench load") : yard_cli_fail("bench load", &err);
}
