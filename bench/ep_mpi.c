/* The MPI rows of `switchyard bench ep`, which starts this program under mpirun:
 *
 *     ep_mpi padded|counts HIDDEN EXPERTS TOP_K REPEATS TOKENS..
 *
 * Both variants do what MPI programs for expert parallelism do: a row travels once for each (token,
 * expert) in both directions, in blocks of (source rank, expert), by MPI_Alltoallv.
 *
 *   padded  Every block has room for all tokens of the source, since all of them may choose one
 *           expert and none may be dropped, and travels with that room: no counts are exchanged. A
 *           row says itself whether it is filled; what is not is neither written nor read here.
 *   counts  MPI_Alltoall tells each expert how many rows come from whom; then blocks travel with
 *           their exact sizes.
 *
 * Timed are packing, the exchange, unpacking to expert-major rows and counts, and in combine the
 * weighted sum in f32, with the library's own row conversions. Rank 0 prints for each number of
 * tokens one line: "result TOKENS VERIFIED", then p50, p99, min and bytes of each phase, the
 * largest of all ranks. */
#include <limits.h>
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/convert.h"
#include "cli/bench_ep.h"

typedef struct side {
    yard_bench_ep_data *data;
    const yard_convert *convert;
    bool padded;
    size_t row_stride, result_bytes; /* row: codes, scales, whether it is filled */
    size_t n_places;                 /* rows of each of the four buffers below */
    uint8_t *rows_out, *rows_in, *results_out, *results_in;
    MPI_Datatype row_type, result_type;
    int *n_out, *n_in;         /* [n_experts]: rows for each expert; from (source, local expert) */
    int *first_out, *first_in; /* [n_experts] places of the blocks */
    int *cursor;               /* [n_experts] */
    int *peer_n_out, *peer_n_in, *peer_first_out, *peer_first_in; /* [n_ranks] */
    int *place_out; /* [n_tokens, top_k] where a row was packed, and its result comes back */
    int *place_in;  /* [n_routed] where an expert-major row arrived */
    uint8_t *expert_x;
    float *expert_x_scale, *y;
    int32_t *count;
} side;

static size_t tokens_of(const side *s)
{
    return s->data->shape.n_tokens;
}

static void place_blocks(side *s)
{
    const yard_bench_ep_shape *shape = &s->data->shape;
    const size_t mine = s->data->rank * tokens_of(s) * shape->top_k;
    int at = 0;

    memset(s->n_out, 0, shape->n_experts * sizeof(*s->n_out));
    for (size_t i = 0; i < tokens_of(s) * shape->top_k; i++)
        s->n_out[s->data->expert[mine + i]]++;
    for (uint32_t e = 0; e < shape->n_experts; e++) {
        s->first_out[e] = s->cursor[e] = at;
        at += s->padded ? (int)tokens_of(s) : s->n_out[e];
    }
}

static uint32_t *filled_mark(const side *s, uint8_t *rows, int place)
{
    return (uint32_t *)(void *)(rows + ((size_t)place + 1) * s->row_stride - sizeof(uint32_t));
}

static void pack_rows(side *s)
{
    const yard_bench_ep_data *d = s->data;
    const size_t hidden = d->shape.hidden, scale_bytes = d->n_groups * sizeof(float);
    const int32_t *expert = d->expert + d->rank * tokens_of(s) * d->shape.top_k;

    place_blocks(s);
    for (size_t i = 0; i < tokens_of(s) * d->shape.top_k; i++) {
        const size_t t = i / d->shape.top_k;
        const int place = s->cursor[expert[i]]++;
        uint8_t *row = s->rows_out + (size_t)place * s->row_stride;

        s->place_out[i] = place;
        memcpy(row, d->x + t * hidden, hidden);
        memcpy(row + hidden, d->x_scale + t * d->n_groups, scale_bytes);
        *filled_mark(s, s->rows_out, place) = 1;
    }
    for (uint32_t e = 0; s->padded && e < d->shape.n_experts; e++)
        if (s->n_out[e] < (int)tokens_of(s)) /* ends the block */
            *filled_mark(s, s->rows_out, s->cursor[e]) = 0;
}

/* Sums of n_local experts each, and where they start. */
static void by_peer(const side *s, const int *n, int *peer_n, int *peer_first)
{
    const uint32_t n_local = s->data->n_local;
    int at = 0;

    for (uint32_t r = 0; r < s->data->shape.n_ranks; r++) {
        peer_first[r] = at;
        peer_n[r] = s->padded ? (int)(n_local * tokens_of(s)) : 0;
        for (uint32_t e = 0; !s->padded && e < n_local; e++)
            peer_n[r] += n[r * n_local + e];
        at += peer_n[r];
    }
}

static void exchange_rows(side *s)
{
    const yard_bench_ep_data *d = s->data;

    if (!s->padded)
        MPI_Alltoall(s->n_out, (int)d->n_local, MPI_INT, s->n_in, (int)d->n_local, MPI_INT,
                     MPI_COMM_WORLD);
    by_peer(s, s->n_out, s->peer_n_out, s->peer_first_out);
    by_peer(s, s->n_in, s->peer_n_in, s->peer_first_in);
    MPI_Alltoallv(s->rows_out, s->peer_n_out, s->peer_first_out, s->row_type, s->rows_in,
                  s->peer_n_in, s->peer_first_in, s->row_type, MPI_COMM_WORLD);
}

/* Where the block of each (source, local expert) lies, and its size. */
static void find_blocks(side *s)
{
    const int max = (int)tokens_of(s);
    int at = 0;

    for (uint32_t i = 0; i < s->data->shape.n_experts; i++) {
        s->first_in[i] = at;
        if (s->padded)
            for (s->n_in[i] = 0; s->n_in[i] < max; s->n_in[i]++)
                if (!*filled_mark(s, s->rows_in, at + s->n_in[i]))
                    break;
        at += s->padded ? max : s->n_in[i];
    }
}

static void unpack_rows(side *s)
{
    const yard_bench_ep_data *d = s->data;
    const size_t hidden = d->shape.hidden, scale_bytes = d->n_groups * sizeof(float);
    size_t row = 0;

    find_blocks(s);
    for (uint32_t e = 0; e < d->n_local; e++) {
        const size_t first_row = row;

        for (uint32_t source = 0; source < d->shape.n_ranks; source++)
            for (int j = 0; j < s->n_in[source * d->n_local + e]; j++, row++) {
                const int place = s->first_in[source * d->n_local + e] + j;
                const uint8_t *from = s->rows_in + (size_t)place * s->row_stride;

                s->place_in[row] = place;
                memcpy(s->expert_x + row * hidden, from, hidden);
                memcpy(s->expert_x_scale + row * d->n_groups, from + hidden, scale_bytes);
            }
        s->count[e] = (int32_t)(row - first_row);
    }
}

static void combine(side *s)
{
    const yard_bench_ep_data *d = s->data;
    const uint32_t top_k = d->shape.top_k, hidden = d->shape.hidden;
    const float *weight = d->weight + d->rank * tokens_of(s) * top_k;

    for (uint32_t row = 0; row < d->n_routed; row++)
        memcpy(s->results_out + (size_t)s->place_in[row] * s->result_bytes,
               d->expert_y + (size_t)row * hidden, s->result_bytes);
    MPI_Alltoallv(s->results_out, s->peer_n_in, s->peer_first_in, s->result_type, s->results_in,
                  s->peer_n_out, s->peer_first_out, s->result_type, MPI_COMM_WORLD);
    for (size_t t = 0; t < tokens_of(s); t++) {
        const void *rows[YARD_BENCH_EP_MAX_TOP_K];

        for (uint32_t k = 0; k < top_k; k++)
            rows[k] = s->results_in + (size_t)s->place_out[t * top_k + k] * s->result_bytes;
        s->convert->weighted_sum(YARD_BF16, rows, weight + t * top_k, top_k, hidden, YARD_F32,
                                 s->y + t * hidden);
    }
}

static void exchange(side *s, double *us)
{
    const double begin_us = MPI_Wtime() * 1e6;
    double middle_us, end_us;

    pack_rows(s);
    exchange_rows(s);
    unpack_rows(s);
    middle_us = MPI_Wtime() * 1e6;
    combine(s);
    end_us = MPI_Wtime() * 1e6;
    us[YARD_BENCH_EP_DISPATCH] = middle_us - begin_us;
    us[YARD_BENCH_EP_COMBINE] = end_us - middle_us;
    us[YARD_BENCH_EP_PAIR] = end_us - begin_us;
}

static void fail(const char *message)
{
    fprintf(stderr, "ep_mpi: %s\n", message);
    MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
}

static void *take(size_t n_bytes)
{
    void *p = yard_alloc(n_bytes);

    if (!p)
        fail("no memory");
    return p;
}

/* Padding grows with tokens times experts: better no row than a machine that swaps. */
static void check_memory(const side *s)
{
    const double have = (double)sysconf(_SC_AVPHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    const double want = 2.0 * (double)s->n_places * (double)(s->row_stride + s->result_bytes) *
                        s->data->shape.n_ranks;

    if (want > 0.8 * have || s->n_places > INT_MAX)
        fail("the padded blocks do not fit into memory");
}

static void take_buffers(side *s)
{
    const yard_bench_ep_data *d = s->data;
    const size_t n_experts = d->shape.n_experts, n_ranks = d->shape.n_ranks;
    int **by_expert[] = { &s->n_out, &s->n_in, &s->first_out, &s->first_in, &s->cursor };
    int **of_peer[] = { &s->peer_n_out, &s->peer_n_in, &s->peer_first_out, &s->peer_first_in };

    s->rows_out = take(s->n_places * s->row_stride);
    s->rows_in = take(s->n_places * s->row_stride);
    s->results_out = take(s->n_places * s->result_bytes);
    s->results_in = take(s->n_places * s->result_bytes);
    for (size_t i = 0; i < sizeof(by_expert) / sizeof(by_expert[0]); i++)
        *by_expert[i] = take(n_experts * sizeof(int));
    for (size_t i = 0; i < sizeof(of_peer) / sizeof(of_peer[0]); i++)
        *of_peer[i] = take(n_ranks * sizeof(int));
    s->place_out = take(tokens_of(s) * d->shape.top_k * sizeof(int));
    s->place_in = take(d->n_routed * sizeof(int));
    s->expert_x = take((size_t)d->n_routed * d->shape.hidden);
    s->expert_x_scale = take((size_t)d->n_routed * d->n_groups * sizeof(float));
    s->count = take(d->n_local * sizeof(int32_t));
    s->y = take(tokens_of(s) * d->shape.hidden * sizeof(float));
}

static void open_side(side *s, const yard_bench_ep_shape *shape, int rank, bool padded)
{
    const size_t n_most = (size_t)shape->n_ranks * shape->n_tokens * shape->top_k;
    yard_error err = { 0 };

    *s = (side){ .padded = padded, .convert = yard_convert_best() };
    if (yard_bench_ep_data_create(&s->data, shape, (uint32_t)rank, &err) != YARD_OK)
        fail(err.message);
    s->row_stride = yard_align_up(yard_bench_ep_row_bytes(s->data) + sizeof(uint32_t), 64);
    s->result_bytes = yard_bench_ep_result_bytes(s->data);
    s->n_places = padded ? (size_t)shape->n_experts * shape->n_tokens : n_most;
    check_memory(s);
    take_buffers(s);
    MPI_Type_contiguous((int)s->row_stride, MPI_BYTE, &s->row_type);
    MPI_Type_contiguous((int)s->result_bytes, MPI_BYTE, &s->result_type);
    MPI_Type_commit(&s->row_type);
    MPI_Type_commit(&s->result_type);
}

static void close_side(side *s)
{
    void *blocks[] = {
        s->rows_out,  s->rows_in,        s->results_out,   s->results_in, s->n_out,
        s->n_in,      s->first_out,      s->first_in,      s->cursor,     s->peer_n_out,
        s->peer_n_in, s->peer_first_out, s->peer_first_in, s->place_out,  s->place_in,
        s->expert_x,  s->expert_x_scale, s->count,         s->y
    };

    for (size_t i = 0; i < sizeof(blocks) / sizeof(blocks[0]); i++)
        free(blocks[i]);
    MPI_Type_free(&s->row_type);
    MPI_Type_free(&s->result_type);
    yard_bench_ep_data_destroy(s->data);
}

static bool is_right(side *s)
{
    yard_error err = { 0 };
    const bool right = yard_bench_ep_check_dispatch(s->data, s->expert_x, s->expert_x_scale,
                                                    s->count, NULL, 0, &err) &&
                       yard_bench_ep_check_combine(s->data, s->y, &err);

    if (!right)
        fprintf(stderr, "ep_mpi: rank %u: %s\n", s->data->rank, err.message);
    return right;
}

static bool exchange_checked(side *s, uint64_t seed)
{
    double us[YARD_BENCH_EP_N_PHASES];

    yard_bench_ep_fill(s->data, seed);
    memset(s->expert_x, 0x55, (size_t)s->data->n_routed * s->data->shape.hidden);
    memset(s->y, 0x55, tokens_of(s) * s->data->shape.hidden * sizeof(*s->y));
    exchange(s, us);
    return is_right(s);
}

/* samples_us  [phases, n_repeats]. Returns how many were taken. */
static int repeat(side *s, int n_repeats, double *samples_us)
{
    const int n_warmup = 1 + n_repeats / 10;
    const double begun_us = MPI_Wtime() * 1e6;
    int n = 0;

    for (int i = 0; i < n_warmup + n_repeats; i++) {
        double us[YARD_BENCH_EP_N_PHASES];
        int ends = i >= n_warmup + YARD_BENCH_EP_MIN_REPEATS &&
                   MPI_Wtime() * 1e6 - begun_us > YARD_BENCH_EP_CASE_US;

        MPI_Bcast(&ends, 1, MPI_INT, 0, MPI_COMM_WORLD);
        if (ends)
            break;
        MPI_Barrier(MPI_COMM_WORLD);
        exchange(s, us);
        if (i < n_warmup)
            continue;
        for (int phase = 0; phase < YARD_BENCH_EP_N_PHASES; phase++)
            samples_us[phase * n_repeats + n] = us[phase];
        n++;
    }
    return n;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static void print_result(side *s, bool verified, double *samples_us, int n, int n_repeats)
{
    double figures[YARD_BENCH_EP_N_PHASES][4], most[YARD_BENCH_EP_N_PHASES][4];
    int right = verified, all_right = 0;

    for (int phase = 0; phase < YARD_BENCH_EP_N_PHASES; phase++) {
        double *us = samples_us + phase * n_repeats, *f = figures[phase];

        qsort(us, (size_t)n, sizeof(*us), by_value);
        f[0] = n % 2 ? us[n / 2] : (us[n / 2 - 1] + us[n / 2]) / 2;
        f[1] = us[(int)ceil(0.99 * n) - 1];
        f[2] = us[0];
        f[3] = phase == YARD_BENCH_EP_DISPATCH  ? yard_bench_ep_dispatch_bytes(s->data)
               : phase == YARD_BENCH_EP_COMBINE ? yard_bench_ep_combine_bytes(s->data)
                                                : figures[0][3] + figures[1][3];
    }
    MPI_Reduce(figures, most, YARD_BENCH_EP_N_PHASES * 4, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    MPI_Reduce(&right, &all_right, 1, MPI_INT, MPI_MIN, 0, MPI_COMM_WORLD);
    if (s->data->rank != 0)
        return;
    printf("result %u %d", s->data->shape.n_tokens, all_right);
    for (int phase = 0; phase < YARD_BENCH_EP_N_PHASES; phase++)
        for (int i = 0; i < 4; i++)
            printf(" %.3f", most[phase][i]);
    putchar('\n');
    fflush(stdout);
}

static void run_case(const yard_bench_ep_shape *shape, int rank, bool padded, int n_repeats)
{
    double *samples_us = take((size_t)(YARD_BENCH_EP_N_PHASES * n_repeats) * sizeof(double));
    side s;
    bool verified;
    int n;

    open_side(&s, shape, rank, padded);
    verified = exchange_checked(&s, 1);
    yard_bench_ep_fill(s.data, 2);
    n = repeat(&s, n_repeats, samples_us);
    verified = is_right(&s) && verified;
    verified = exchange_checked(&s, 3) && verified;
    print_result(&s, verified, samples_us, n, n_repeats);
    close_side(&s);
    free(samples_us);
}

int main(int argc, char **argv)
{
    yard_bench_ep_shape shape = { 0 };
    int rank = 0, n_ranks = 0;

    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &n_ranks);
    if (argc < 7)
        fail("want padded|counts HIDDEN EXPERTS TOP_K REPEATS TOKENS.. from switchyard bench ep");
    shape.n_ranks = (uint32_t)n_ranks;
    shape.hidden = (uint32_t)atoi(argv[2]);
    shape.n_experts = (uint32_t)atoi(argv[3]);
    shape.top_k = (uint32_t)atoi(argv[4]);
    for (int i = 6; i < argc; i++) {
        shape.n_tokens = (uint32_t)atoi(argv[i]);
        run_case(&shape, rank, !strcmp(argv[1], "padded"), atoi(argv[5]));
    }
    MPI_Finalize();
    return 0;
}
