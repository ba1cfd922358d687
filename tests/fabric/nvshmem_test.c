/* fabric/cuda/nvshmem.c over an NVSHMEM that answers, fails, or does not answer: every call has a
 * deadline, and its message names the rank and the call. One rank, no GPU, no NVSHMEM. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

static void *fake_open(void);
static void *fake_symbol(void);
#define dlopen(path, flags) fake_open()
#define dlsym(so, name) fake_symbol()
#define yard_rendezvous_exchange fake_exchange
#define yard_fabric_nvshmem fake_nvshmem
#define yard_fabric_nvlink_nvshmem fake_nvlink_nvshmem
#include "../../src/fabric/cuda/nvshmem.c"

enum { HEAP_BYTES = 4096, SHORT_US = 50000, N_CALLS = RELEASE + 1 };

/* What it does in each call; waiting ends with the test. */
typedef enum answer { WELL, BADLY, NEVER } answer;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t over;
    bool ends;
    answer answers[N_CALLS];
    uint32_t n_waiting, n_calls[N_CALLS];
    uint8_t heap[HEAP_BYTES];
    bool missing, other_build;
} lib = { .lock = PTHREAD_MUTEX_INITIALIZER, .over = PTHREAD_COND_INITIALIZER };

static bool goes_well(what asked)
{
    bool well;

    pthread_mutex_lock(&lib.lock);
    lib.n_calls[asked]++;
    lib.n_waiting++;
    while (lib.answers[asked] == NEVER && !lib.ends)
        pthread_cond_wait(&lib.over, &lib.lock);
    lib.n_waiting--;
    well = lib.answers[asked] == WELL;
    pthread_cond_broadcast(&lib.over);
    pthread_mutex_unlock(&lib.lock);
    return well;
}

static int make_id(void *id)
{
    memset(id, 7, 16);
    return 0;
}

static int begin(const void *id, uint32_t rank, uint32_t n_ranks)
{
    return goes_well(START) && ((const uint8_t *)id)[15] == 7 && rank < n_ranks ? 0 : 5;
}

static void *allocate(size_t n_bytes)
{
    return goes_well(ALLOCATE) && n_bytes == HEAP_BYTES ? lib.heap : NULL;
}

static void release(void *heap)
{
    assert_ptr_equal(heap, lib.heap);
    goes_well(RELEASE);
}

static yard_nvshmem table;

static void *fake_open(void)
{
    return lib.missing ? NULL : &lib;
}

static void *fake_symbol(void)
{
    table = (yard_nvshmem){ .size = sizeof(table) + (lib.other_build ? 8 : 0),
                            .id_bytes = 16,
                            .version = "0.0.1",
                            .make_id = make_id,
                            .start = begin,
                            .allocate = allocate,
                            .release = release };
    return &table;
}

yard_status fake_exchange(yard_fabric *f, const void *mine, size_t n_bytes, void *all,
                          yard_error *err)
{
    (void)f, (void)err;
    memcpy(all, mine, n_bytes);
    return YARD_OK;
}

static yard_fabric *closed_fabric(void)
{
    yard_fabric *f = NULL;

    assert_int_equal(
        yard_fabric_create_custom(&f, &fake_nvshmem, 0, 1, NULL, HEAP_BYTES, NULL, NULL), YARD_OK);
    f->config.start_timeout_us = f->config.timeout_us = SHORT_US;
    return f;
}

static void refuse(yard_status want, const char *text)
{
    yard_fabric *f = closed_fabric();
    yard_error err = { 0 };

    assert_int_equal(nvshmem_open(f, &err), want);
    assert_non_null(strstr(err.message, text));
    yard_fabric_destroy(f);
}

/* As in a new process. */
static int forget(void **state)
{
    (void)state;
    pthread_mutex_lock(&lib.lock);
    lib.ends = true;
    pthread_cond_broadcast(&lib.over);
    while (lib.n_waiting > 0)
        pthread_cond_wait(&lib.over, &lib.lock);
    lib.ends = lib.missing = lib.other_build = false;
    memset(lib.answers, 0, sizeof(lib.answers));
    memset(lib.n_calls, 0, sizeof(lib.n_calls));
    pthread_mutex_unlock(&lib.lock);
    world.lib = NULL;
    world.started = world.broken = false;
    return 0;
}

static void groups_share_one_start(void **state)
{
    yard_fabric *f[2] = { closed_fabric(), closed_fabric() };

    (void)state;
    for (int i = 0; i < 2; i++) {
        assert_int_equal(nvshmem_open(f[i], NULL), YARD_OK);
        assert_int_equal(lib.heap[HEAP_BYTES - 1], 0xff);
        assert_non_null(strstr(f[i]->reason, "NVSHMEM 0.0.1, network none"));
    }
    yard_fabric_destroy(f[0]);
    yard_fabric_destroy(f[1]);
    assert_int_equal(lib.n_calls[START], 1);
    assert_int_equal(lib.n_calls[ALLOCATE], 2);
    assert_int_equal(lib.n_calls[RELEASE], 2);
    assert_string_equal(getenv("NVSHMEM_DISABLE_NVLS"), "1");
    assert_string_equal(getenv("NVSHMEM_DISABLE_NCCL"), "1");
}

static void a_start_without_an_answer_ends(void **state)
{
    (void)state;
    lib.answers[START] = NEVER;
    refuse(YARD_ETIMEDOUT, "nvshmem: rank 0: start: no answer from NVSHMEM within 0.1 s");
    refuse(YARD_ENOTSUP, "lost a rank before; NVSHMEM cannot start again in a process");
    assert_int_equal(lib.n_calls[START], 1);
}

static void memory_without_an_answer_ends(void **state)
{
    (void)state;
    lib.answers[ALLOCATE] = NEVER;
    refuse(YARD_ETIMEDOUT, "nvshmem: rank 0: memory: no answer from NVSHMEM within 0.1 s");
    assert_int_equal(lib.n_calls[RELEASE], 0);
}

static void a_close_without_an_answer_ends(void **state)
{
    yard_fabric *f = closed_fabric();

    (void)state;
    lib.answers[RELEASE] = NEVER;
    assert_int_equal(nvshmem_open(f, NULL), YARD_OK);
    yard_fabric_destroy(f);
    assert_int_equal(lib.n_calls[RELEASE], 1);
    refuse(YARD_ENOTSUP, "lost a rank before");
}

static void failures_are_named(void **state)
{
    (void)state;
    lib.answers[START] = BADLY;
    refuse(YARD_EIO, "nvshmem: start: status 5");
    forget(NULL);
    lib.answers[ALLOCATE] = BADLY;
    refuse(YARD_ENOMEM, "nvshmem: memory (4096 bytes of device 0)");
    forget(NULL);
    lib.other_build = true;
    refuse(YARD_ENOTSUP, "is of another build");
    forget(NULL);
    lib.missing = true;
    refuse(YARD_ENOTSUP, "fabric: nvshmem: ");
}

static void networks_are_chosen_by_name(void **state)
{
    yard_fabric *f = closed_fabric();
    yard_error err = { 0 };

    (void)state;
    f->config.provider = "carrier pigeon";
    assert_int_equal(nvshmem_open(f, &err), YARD_EINVAL);
    assert_non_null(strstr(err.message, "want none, ibrc, ibgda or efa"));
    yard_fabric_destroy(f);
    f = closed_fabric();
    f->config.provider = "ibgda";
    assert_int_equal(nvshmem_open(f, NULL), YARD_OK);
    assert_string_equal(getenv("NVSHMEM_IB_ENABLE_IBGDA"), "1");
    yard_fabric_destroy(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(groups_share_one_start, forget),
        cmocka_unit_test_teardown(a_start_without_an_answer_ends, forget),
        cmocka_unit_test_teardown(memory_without_an_answer_ends, forget),
        cmocka_unit_test_teardown(a_close_without_an_answer_ends, forget),
        cmocka_unit_test_teardown(failures_are_named, forget),
        cmocka_unit_test_teardown(networks_are_chosen_by_name, forget),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
