/* The sum over an instance's ranks: the same bits everywhere, in the order of ranks, however far
 * ranks drift apart. ctest: sanitize */
#include "../fabric/fabric_test.h"

#include "ep/ep.h"

enum { N_COLS = 70, MAX_ROWS = 9, N_SUMS = 200 };

typedef struct sum_case {
    uint32_t n_ranks, tp;
    const char *transport;
    yard_dtype dtype;
} sum_case;

static uint64_t mix(uint64_t z)
{
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Values whose sum depends on the order. */
static float value(uint32_t rank, uint32_t sum, uint32_t i)
{
    const uint64_t r = mix(rank * 0x9e3779b97f4a7c15u + sum * 1000003u + i + 1);

    return (float)(int32_t)(r >> 32) * (r % 3 ? 1.0f : 0x1p-20f);
}

static int32_t rows_of(uint32_t instance, uint32_t sum)
{
    return (int32_t)(mix(instance * 977u + sum + 1) % (MAX_ROWS + 1));
}

/* Burns time that differs by rank and sum, so that every rank is late now and then. */
static void dawdle(uint32_t rank, uint32_t sum)
{
    volatile uint64_t n = mix(rank * 31u + sum) % 4 == 0 ? 20000 : 0;

    while (n > 0)
        n--;
}

static yard_all_reduce_config reduce_config(uint32_t tp, yard_dtype dtype)
{
    return (yard_all_reduce_config){
        .tp = tp, .max_rows = MAX_ROWS, .n_cols = N_COLS, .dtype = dtype, .heap_at = 128
    };
}

static void put(yard_dtype dtype, void *x, uint32_t i, float value)
{
    if (dtype == YARD_BF16)
        ((uint16_t *)x)[i] = yard_bf16_from_f32(value);
    else
        ((float *)x)[i] = value;
}

static float get(yard_dtype dtype, const void *x, uint32_t i)
{
    return dtype == YARD_BF16 ? yard_f32_from_bf16(((const uint16_t *)x)[i])
                              : ((const float *)x)[i];
}

/* A rank's value as its dtype holds it. */
static float held(yard_dtype dtype, float value)
{
    return dtype == YARD_BF16 ? yard_bf16_round(value) : value;
}

static void sum_rank(const yard_fabric_config *base, void *ctx)
{
    const sum_case *c = ctx;
    const uint32_t first = base->rank / c->tp * c->tp;
    yard_fabric_config fc = *base;
    yard_all_reduce_config config = reduce_config(c->tp, c->dtype);
    float x[MAX_ROWS * N_COLS];
    yard_all_reduce *r = NULL;
    yard_error err = { 0 };

    fc.heap_bytes = 128 + yard_all_reduce_heap_bytes(&config);
    fc.transport = c->transport;
    config.fabric = test_create(&fc);
    CHECK(yard_all_reduce_create(&r, &config, &err) == YARD_OK);
    for (uint32_t n = 0; n < N_SUMS; n++) {
        const int32_t n_rows = rows_of(first, n);

        for (uint32_t i = 0; i < (uint32_t)n_rows * N_COLS; i++)
            put(c->dtype, x, i, value(base->rank, n, i));
        dawdle(base->rank, n);
        if (yard_all_reduce_sum(r, x, &n_rows, NULL) != YARD_OK) {
            fprintf(stderr, "%s\n", yard_all_reduce_error(r));
            _exit(1);
        }
        for (uint32_t i = 0; i < (uint32_t)n_rows * N_COLS; i++) {
            float want = 0.0f;
            for (uint32_t k = 0; k < c->tp; k++)
                want += held(c->dtype, value(first + k, n, i));
            CHECK(yard_bits_from_f32(get(c->dtype, x, i)) ==
                  yard_bits_from_f32(held(c->dtype, want)));
        }
    }
    yard_all_reduce_destroy(r);
    yard_fabric_destroy(config.fabric);
}

static void sums_are_in_rank_order(void **state)
{
    static const sum_case cases[] = {
        { 1, 1, NULL, YARD_F32 },  { 2, 2, "shm", YARD_F32 }, { 3, 3, "shm", YARD_BF16 },
        { 4, 2, "shm", YARD_F32 }, { 2, 2, "tcp", YARD_F32 }, { 4, 4, "tcp", YARD_BF16 },
        { 6, 2, "tcp", YARD_F32 },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        test_run(cases[i].n_ranks, sum_rank, (void *)(uintptr_t)&cases[i]);
}

/* Rank 1 leaves; rank 0 learns it, and goes on learning it. */
static void lose_rank(const yard_fabric_config *base, void *ctx)
{
    const int32_t n_rows = 1, too_many = MAX_ROWS + 1, none = 0;
    yard_fabric_config fc = *base;
    yard_all_reduce_config config = reduce_config(2, YARD_F32);
    float x[MAX_ROWS * N_COLS] = { 0 };
    yard_all_reduce *r = NULL;
    yard_error err = { 0 };

    (void)ctx;
    fc.heap_bytes = 128 + yard_all_reduce_heap_bytes(&config);
    config.fabric = test_create(&fc);
    config.heap_at = 192;
    CHECK(yard_all_reduce_create(&r, &config, &err) == YARD_EINVAL);
    config.heap_at = 128;
    config.dtype = YARD_F16;
    CHECK(yard_all_reduce_create(&r, &config, &err) == YARD_EINVAL);
    CHECK_TEXT(err.message, "dtype: want f32 or bf16");
    config.dtype = YARD_F32;
    config.tp = 3;
    CHECK(yard_all_reduce_create(&r, &config, &err) == YARD_EINVAL);
    CHECK_TEXT(err.message, "tp: want a divisor of 2 ranks");
    config.tp = 2;
    CHECK(yard_all_reduce_create(&r, &config, &err) == YARD_OK);
    CHECK(yard_all_reduce_sum(r, x, &n_rows, NULL) == YARD_OK);
    if (base->rank == 1)
        _exit(0);
    CHECK(yard_all_reduce_sum(r, x, &too_many, NULL) == YARD_EINVAL);
    CHECK(yard_all_reduce_sum(r, x, &n_rows, NULL) == YARD_EPEER);
    CHECK_TEXT(yard_all_reduce_error(r), "rank 0, all-reduce: ");
    CHECK_TEXT(yard_all_reduce_error(r), "rank 1");
    CHECK(yard_all_reduce_sum(r, x, &none, NULL) == YARD_EPEER);
    yard_all_reduce_destroy(r);
    yard_fabric_destroy(config.fabric);
}

static void a_lost_rank_is_named(void **state)
{
    (void)state;
    test_run(2, lose_rank, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_are_in_rank_order),
        cmocka_unit_test(a_lost_rank_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
