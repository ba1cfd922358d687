/* Launchers' environments: which scheme is found, what is taken from it, what is refused.
 * ctest: sanitize */
#include "fabric_test.h"

typedef struct env_case {
    const char *vars;                            /* "NAME=value NAME=value" */
    const char *scheme, *rendezvous, *bind_host; /* NULL: none */
    uint32_t rank, n_ranks;
    const char *error; /* part of the message; NULL: none */
} env_case;

static const env_case cases[] = {
    { "", NULL, NULL, NULL, 0, 0, NULL },
    { "RANK=3", NULL, NULL, NULL, 0, 0, NULL }, /* a name that anything may use */
    { "WORLD_SIZE=3 MASTER_PORT=1", NULL, NULL, NULL, 0, 0, NULL },
    { "YARD_SIZE=2", NULL, NULL, NULL, 0, 0, "YARD_SIZE is set, but nothing tells the rank" },
    { "YARD_RENDEZVOUS=h:1", NULL, NULL, NULL, 0, 0, "YARD_RENDEZVOUS is set, but nothing" },
    { "RANK=1 MASTER_ADDR=h", NULL, NULL, NULL, 0, 0,
      "torchrun: WORLD_SIZE is missing beside MASTER_ADDR and RANK" },
    { "WORLD_SIZE=2 MASTER_ADDR=h", NULL, NULL, NULL, 0, 0,
      "torchrun: RANK is missing beside MASTER_ADDR and WORLD_SIZE" },

    { "YARD_RANK=2 YARD_SIZE=4 YARD_RENDEZVOUS=unix:x", "switchyard run", "unix:x", NULL, 2, 4,
      NULL },
    { "YARD_RANK=0 YARD_SIZE=1", "switchyard run", NULL, NULL, 0, 1, NULL },
    { "YARD_RANK=1 YARD_SIZE=2 YARD_RENDEZVOUS=h:1 YARD_BIND_HOST=10.0.0.7 RANK=9 WORLD_SIZE=99",
      "switchyard run", "h:1", "10.0.0.7", 1, 2, NULL },
    { "YARD_RANK=1", "switchyard run", NULL, NULL, 0, 0, "YARD_SIZE is missing" },
    { "YARD_RANK=1 YARD_SIZE=2", "switchyard run", NULL, NULL, 0, 0, "YARD_RENDEZVOUS is missing" },
    { "YARD_RANK=x YARD_SIZE=2", "switchyard run", NULL, NULL, 0, 0,
      "YARD_RANK: want a whole number, got 'x'" },
    { "YARD_RANK=-1 YARD_SIZE=2", "switchyard run", NULL, NULL, 0, 0, "got '-1'" },
    { "YARD_RANK=1 YARD_SIZE=2x", "switchyard run", NULL, NULL, 0, 0, "YARD_SIZE: want" },
    { "YARD_RANK=4294967296 YARD_SIZE=2", "switchyard run", NULL, NULL, 0, 0, "YARD_RANK: want" },
    { "YARD_RANK=2 YARD_SIZE=2", "switchyard run", NULL, NULL, 0, 0, "less than YARD_SIZE" },

    { "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
      "PMIX_NAMESPACE=prte@1 PMIX_RANK=1",
      "Open MPI", "unix:yard-$UID-mpi-prte@1", NULL, 1, 2, NULL },
    { "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=j",
      "Open MPI", NULL, NULL, 0, 0, "Open MPI: YARD_RENDEZVOUS is missing" },
    { "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 YARD_RENDEZVOUS=head:4000", "Open MPI",
      "head:4000", NULL, 1, 4, NULL },
    { "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2 SLURM_PROCID=0 "
      "SLURM_NTASKS=2 SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=2 SLURM_JOB_NODELIST=a[1-2]",
      "Open MPI", "a1:20007", NULL, 1, 4, NULL },
    { "PMIX_RANK=1 PMIX_NAMESPACE=n YARD_SIZE=3 YARD_RENDEZVOUS=h:9", "PMIx", "h:9", NULL, 1, 3,
      NULL },
    { "PMIX_RANK=1 PMIX_NAMESPACE=n", "PMIx", NULL, NULL, 0, 0, "YARD_SIZE is missing" },
    { "PMI_RANK=1 PMI_SIZE=2 YARD_RENDEZVOUS=unix:p", "PMI", "unix:p", NULL, 1, 2, NULL },

    { "SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_JOB_ID=1234 SLURM_STEP_ID=2 SLURM_STEP_NUM_NODES=2 "
      "SLURM_STEP_NODELIST=n[001-004,07],x1 SLURMD_NODENAME=n002",
      "Slurm", "n001:21236", "n002", 3, 8, NULL },
    { "SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_JOB_ID=1234 SLURM_STEP_ID=2 SLURM_STEP_NUM_NODES=2 "
      "SLURM_STEP_NODELIST=r[1-2]n[5,7]-ib SLURMD_NODENAME=z YARD_BIND_HOST=10.1.1.1",
      "Slurm", "r1n5-ib:21236", "10.1.1.1", 3, 8, NULL },
    { "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_JOB_ID=5 SLURM_JOB_NUM_NODES=1 SLURM_JOB_NODELIST=a",
      "Slurm", "unix:yard-$UID-slurm-5.0", NULL, 0, 2, NULL },
    { "SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=2 SLURM_JOB_ID=5 SLURM_JOB_NUM_NODES=1 "
      "SLURM_JOB_NODELIST=a",
      "Slurm", "unix:yard-$UID-slurm-5.0", NULL, 0, 2, NULL },
    { "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_JOB_ID=5", "Slurm", NULL, NULL, 0, 0,
      "SLURM_STEP_NODELIST is missing" },
    { "SLURM_PROCID=0 SLURM_NTASKS=2", "Slurm", NULL, NULL, 0, 0, "SLURM_JOB_ID is missing" },
    { "SLURM_PROCID=0", "Slurm", NULL, NULL, 0, 0, "SLURM_NTASKS is missing" },

    { "RANK=1 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500", "torchrun", "10.0.0.1:29500",
      NULL, 1, 2, NULL },
    { "RANK=1 WORLD_SIZE=2 MASTER_ADDR=fe80::1 MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=True",
      "torchrun", "[fe80::1]:29501", NULL, 1, 2, NULL },
    { "RANK=1 WORLD_SIZE=2 MASTER_ADDR=a", "torchrun", NULL, NULL, 0, 0, "MASTER_PORT is missing" },
    { "RANK=1 WORLD_SIZE=2 MASTER_PORT=1", "torchrun", NULL, NULL, 0, 0, "MASTER_ADDR is missing" },
    { "RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=70000", "torchrun", NULL, NULL, 0, 0,
      "MASTER_PORT: want a port, got '70000'" },

    { "JOB_COMPLETION_INDEX=2 YARD_SIZE=3 YARD_RENDEZVOUS=job-0.svc:4000 YARD_BIND_HOST=10.2.0.9",
      "Kubernetes indexed job", "job-0.svc:4000", "10.2.0.9", 2, 3, NULL },
    { "JOB_COMPLETION_INDEX=2", "Kubernetes indexed job", NULL, NULL, 0, 0,
      "YARD_SIZE is missing" },
};

static void set_environment(const char *vars)
{
    char text[1024], *save = NULL;

    clearenv();
    snprintf(text, sizeof(text), "%s", vars);
    for (char *v = strtok_r(text, " ", &save); v; v = strtok_r(NULL, " ", &save)) {
        char *value = strchr(v, '=');

        *value++ = 0;
        setenv(v, value, 1);
    }
}

static void check_text(const env_case *c, const char *what, const char *got, const char *want)
{
    char expanded[256], uid[16];
    const char *mark = want ? strstr(want, "$UID") : NULL;

    if (mark) {
        snprintf(uid, sizeof(uid), "%u", (unsigned int)getuid());
        snprintf(expanded, sizeof(expanded), "%.*s%s%s", (int)(mark - want), want, uid, mark + 4);
        want = expanded;
    }
    if ((!got != !want) || (got && strcmp(got, want)))
        fail_msg("'%s': %s: want '%s', got '%s'", c->vars, what, want ? want : "(none)",
                 got ? got : "(none)");
}

static void check_case(const env_case *c)
{
    yard_fabric_config config = YARD_FABRIC_CONFIG_INIT;
    const yard_fabric_config before = config;
    yard_fabric_env storage;
    yard_error err = { 0 };
    yard_status st;

    memset(&storage, 0xa5, sizeof(storage));
    set_environment(c->vars);
    st = yard_fabric_config_from_env(&config, &storage, &err);
    check_text(c, "scheme", storage.scheme, c->scheme);
    if (c->error) {
        if (st != YARD_EINVAL || !strstr(err.message, c->error))
            fail_msg("'%s': want '%s', got status %d '%s'", c->vars, c->error, st, err.message);
        assert_memory_equal(&config, &before, sizeof(config));
        return;
    }
    if (st != YARD_OK)
        fail_msg("'%s': %s", c->vars, err.message);
    if (!c->scheme)
        assert_memory_equal(&config, &before, sizeof(config));
    check_text(c, "rendezvous", config.rendezvous, c->rendezvous);
    check_text(c, "bind_host", config.bind_host, c->bind_host);
    if (config.rank != c->rank || config.n_ranks != c->n_ranks)
        fail_msg("'%s': want rank %u of %u, got %u of %u", c->vars, c->rank, c->n_ranks,
                 config.rank, config.n_ranks);
}

static void all_schemes(void **state)
{
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        check_case(&cases[i]);
}

static void secret_and_long_values(void **state)
{
    yard_fabric_config config = YARD_FABRIC_CONFIG_INIT;
    yard_fabric_env storage;
    yard_error err = { 0 };
    char text[400];

    set_environment("YARD_RANK=0 YARD_SIZE=2 YARD_RENDEZVOUS=unix:x YARD_SECRET=swordfish");
    assert_int_equal(yard_fabric_config_from_env(&config, &storage, &err), YARD_OK);
    assert_string_equal(config.secret, "swordfish");
    memset(text, 'a', sizeof(text) - 1);
    text[sizeof(text) - 1] = 0;
    setenv("YARD_SECRET", text, 1);
    assert_int_equal(yard_fabric_config_from_env(&config, &storage, &err), YARD_EINVAL);
    assert_non_null(strstr(err.message, "YARD_SECRET: want at most 127 characters, got 399"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_schemes),
        cmocka_unit_test(secret_and_long_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
