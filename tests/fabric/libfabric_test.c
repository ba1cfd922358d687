/* The libfabric transport over the providers that any machine has: the suite of all transports, and
 * what is refused by name. Skipped where the library or its headers are missing.
 * ctest: sanitize */
#include "traffic.h"

#include <dlfcn.h>

#include "fabric/libfabric.h"

#ifdef YARD_HAVE_LIBFABRIC

/* Values that the immediate has no room for arrive in parts, after their data. */
static void large_values_rank(const yard_fabric_config *config, void *ctx)
{
    enum { VALUE = 1000, N_BYTES = 3000 };
    yard_fabric *f = traffic_create(config, TRAFFIC_WORDS + 2 * N_BYTES);
    yard_lf *t = yard_fabric_impl(f);
    uint8_t *data = yard_fabric_local(f, TRAFFIC_WORDS);

    test_barrier(f, 2048, 1);
    t->value_bits = 4; /* what providers of 32 bits leave for a heap of 1 GB */
    if (config->rank == 0) {
        memset(data, 5, N_BYTES);
        CHECK_OK(f, yard_fabric_put_signal(f, TRAFFIC_WORDS + N_BYTES, data, N_BYTES, 0, VALUE, 1));
        CHECK(yard_fabric_signal(f, 8, UINT64_MAX, 1) == YARD_ENOTSUP);
        CHECK_TEXT(yard_fabric_error(f), "4 bits");
    } else {
        CHECK_OK(f, yard_fabric_wait_until(f, 0, VALUE, 0, yard_fabric_deadline(f, 0)));
        CHECK(yard_fabric_read_signal(f, 0) == VALUE);
        for (uint32_t i = 0; i < N_BYTES; i++)
            CHECK(data[N_BYTES + i] == 5);
    }
    test_barrier(f, 2048, 2);
    yard_fabric_destroy(f);
}

static void large_values_arrive_in_parts(void **state)
{
    test_run(2, large_values_rank, NULL);
}

/* Providers that this machine lacks are named by all ranks, at once. */
static void refused_rank(const yard_fabric_config *config, void *ctx)
{
    yard_fabric_config c = *config;
    yard_fabric *f = NULL;
    yard_error err = { 0 };

    c.transport = "libfabric";
    c.provider = "no-such-provider";
    c.force_network = true;
    CHECK(yard_fabric_create(&f, &c, &err) != YARD_OK);
    CHECK_TEXT(err.message, "no-such-provider");
}

static void missing_providers_are_named(void **state)
{
    test_run(2, refused_rank, NULL);
}

/* Both sides hear of ranks that chose differently. */
static void differing_rank(const yard_fabric_config *config, void *ctx)
{
    yard_fabric_config c = *config;
    yard_fabric *f = NULL;
    yard_error err = { 0 };

    c.transport = "libfabric";
    c.provider = config->rank ? "net" : "tcp";
    c.force_network = true;
    CHECK(yard_fabric_create(&f, &c, &err) == YARD_EINVAL);
    CHECK_TEXT(err.message, "net");
    CHECK_TEXT(err.message, "tcp");
}

static void different_providers_are_refused(void **state)
{
    test_run(2, differing_rank, NULL);
}

int main(void)
{
    const struct CMUnitTest suite[] = {
        TRAFFIC_SUITE,
        cmocka_unit_test(large_values_arrive_in_parts),
    };
    const struct CMUnitTest refusals[] = {
        cmocka_unit_test(missing_providers_are_named),
        cmocka_unit_test(different_providers_are_refused),
    };
    static const char *const providers[] = { "tcp", "shm", "net" };
    int n_failed = 0;

    if (!dlopen("libfabric.so.1", RTLD_NOW))
        return 77;
    alarm(2 * TEST_ALARM_S);
    traffic_transport = "libfabric";
    traffic_network = true;
    for (int i = 0; i < 3; i++) {
        traffic_provider = providers[i];
        traffic_n_again = i == 0 ? 50 : 10; /* a start takes it 0.2 s: it looks for all hardware */
        traffic_leak_check = i < 2; /* net 1.17 itself loses a few hundred bytes for each domain */
        n_failed += cmocka_run_group_tests_name(traffic_provider, suite, NULL, NULL);
    }
    return n_failed + cmocka_run_group_tests_name("refusals", refusals, NULL, NULL);
}

#else

int main(void)
{
    return 77;
}

#endif
