/* The libfabric transport over the providers that any machine has: the suite of all transports.
 * ctest: sanitize */
#include "traffic.h"

int main(void)
{
    const struct CMUnitTest tests[] = {
        TRAFFIC_SUITE,
    };
    static const char *const providers[] = { "tcp", "shm", "net" };
    int n_failed = 0;

    alarm(2 * TEST_ALARM_S);
    traffic_transport = "libfabric";
    traffic_network = true;
    for (int i = 0; i < 3; i++) {
        traffic_provider = providers[i];
        traffic_n_again = i == 0 ? 50 : 10; /* to look through the machine takes it 0.2 s */
        printf("provider %s\n", traffic_provider);
        n_failed += cmocka_run_group_tests_name(traffic_provider, tests, NULL, NULL);
    }
    return n_failed;
}
