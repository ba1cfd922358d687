/* Rank, size and rendezvous from what launchers leave in the environment. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "fabric/fabric.h"

/* Values so far; strings of storage are filled. */
typedef struct found {
    uint32_t rank, n_ranks;
    yard_fabric_env *storage;
    yard_error *err;
} found;

typedef struct scheme {
    const char *name;
    const char *rank;     /* variable; the scheme is there when it and also are set */
    const char *also;     /* NULL: nothing more */
    const char *sizes[3]; /* the first that is set; the last one is named when none is */
    yard_status (*rendezvous)(found *v);
} scheme;

enum { PORT_BASE = 20000, N_PORTS = 12000 /* below the ports the kernel gives out by itself */ };

static const char *get(const char *name)
{
    const char *text = getenv(name);

    return text && text[0] ? text : NULL;
}

static bool parse_u32(const char *text, uint32_t *out)
{
    char *end = NULL;
    unsigned long long value;

    if (text[0] < '0' || text[0] > '9')
        return false;
    value = strtoull(text, &end, 10);
    *out = (uint32_t)value;
    return !*end && value < UINT32_MAX;
}

static yard_status read_number(const scheme *s, const char *name, uint32_t *out, yard_error *err)
{
    const char *text = get(name);

    if (!text)
        return yard_fail(err, YARD_EINVAL, "environment: %s: %s is missing", s->name, name);
    if (!parse_u32(text, out))
        return yard_fail(err, YARD_EINVAL, "environment: %s: %s: want a whole number, got '%s'",
                         s->name, name, text);
    return YARD_OK;
}

static yard_status missing_rendezvous(found *v, const char *name)
{
    return yard_fail(v->err, YARD_EINVAL,
                     "environment: %s: %s is missing: host:port where rank 0 listens, or unix:NAME "
                     "on one node",
                     v->storage->scheme, name);
}

static yard_status from_nothing(found *v)
{
    return missing_rendezvous(v, "YARD_RENDEZVOUS");
}

/* A name on this node for a job of the site's; users do not meet. */
static yard_status unix_name(found *v, const char *kind, const char *job)
{
    snprintf(v->storage->rendezvous, sizeof(v->storage->rendezvous), "unix:yard-%u-%s-%.60s",
             (unsigned int)getuid(), kind, job);
    return YARD_OK;
}

/* First name of a Slurm list: "n[01-04,07]-x,m1" is n01-x. */
static void first_host(const char *list, char *host, size_t n_host)
{
    bool inside = false, skip = false; /* brackets; the rest of what is in them */
    size_t n = 0;

    for (const char *c = list; *c && n + 1 < n_host; c++) {
        if (*c == '[') {
            inside = true;
        } else if (*c == ']') {
            inside = skip = false;
        } else if (inside) {
            skip = skip || *c == '-' || *c == ',';
            if (!skip)
                host[n++] = *c;
        } else if (*c == ',') {
            break;
        } else {
            host[n++] = *c;
        }
    }
    host[n] = 0;
}

static const char *first_of(const char *a, const char *b)
{
    return get(a) ? get(a) : get(b);
}

/* On one node a unix name. Else the first node of the list, and a port that follows from the job:
 * all ranks compute the same. */
static yard_status from_slurm(found *v)
{
    const char *n_nodes = first_of("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES");
    const char *nodes = first_of("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST");
    const char *job = get("SLURM_JOB_ID"), *step = get("SLURM_STEP_ID");
    uint32_t job_number = 0, step_number = 0;
    char host[128], name[64];

    if (!job || !nodes)
        return missing_rendezvous(v, job ? "SLURM_STEP_NODELIST" : "SLURM_JOB_ID");
    if (!parse_u32(job, &job_number))
        return yard_fail(v->err, YARD_EINVAL,
                         "environment: %s: SLURM_JOB_ID: want a whole number, got '%s'",
                         v->storage->scheme, job);
    snprintf(name, sizeof(name), "%.20s.%.20s", job, step ? step : "0");
    if (n_nodes && !strcmp(n_nodes, "1"))
        return unix_name(v, "slurm", name);
    if (step && !parse_u32(step, &step_number))
        step_number = 0;
    first_host(nodes, host, sizeof(host));
    snprintf(v->storage->rendezvous, sizeof(v->storage->rendezvous), "%s:%u", host,
             PORT_BASE + (job_number % N_PORTS + step_number % N_PORTS) % N_PORTS);
    if (!v->storage->bind_host[0] && get("SLURMD_NODENAME"))
        snprintf(v->storage->bind_host, sizeof(v->storage->bind_host), "%s",
                 get("SLURMD_NODENAME"));
    return YARD_OK;
}

/* mpirun tells how many ranks are on this node and a name of the job, but not where rank 0 is. */
static yard_status from_open_mpi(found *v)
{
    const char *local = get("OMPI_COMM_WORLD_LOCAL_SIZE");
    const char *job = first_of("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid");
    uint32_t n_local = 0;

    if (local && job && parse_u32(local, &n_local) && n_local == v->n_ranks)
        return unix_name(v, "mpi", job);
    return get("SLURM_JOB_ID") ? from_slurm(v) : from_nothing(v);
}

static yard_status from_pmi(found *v)
{
    return get("SLURM_JOB_ID") ? from_slurm(v) : from_nothing(v);
}

/* torchrun's agent may hold MASTER_PORT itself; the next one is as good, and the same everywhere.
 */
static yard_status from_torchrun(found *v)
{
    const char *addr = get("MASTER_ADDR"), *port = get("MASTER_PORT");
    const char *agent = get("TORCHELASTIC_USE_AGENT_STORE");
    uint32_t number;

    if (!addr || !port)
        return missing_rendezvous(v, addr ? "MASTER_PORT" : "MASTER_ADDR");
    if (!parse_u32(port, &number) || number == 0 || number >= UINT16_MAX)
        return yard_fail(v->err, YARD_EINVAL, "environment: %s: MASTER_PORT: want a port, got '%s'",
                         v->storage->scheme, port);
    if (agent && !strcmp(agent, "True"))
        number++;
    snprintf(v->storage->rendezvous, sizeof(v->storage->rendezvous),
             strchr(addr, ':') ? "[%.200s]:%u" : "%.200s:%u", addr, number);
    return YARD_OK;
}

/* First match. What has a rank of its own inside an allocation goes before the allocation: mpirun
 * under Slurm starts its daemons, not its ranks, as Slurm tasks. */
static const scheme schemes[] = {
    { "switchyard run", "YARD_RANK", NULL, { "YARD_SIZE" }, from_nothing },
    { "Open MPI", "OMPI_COMM_WORLD_RANK", NULL, { "OMPI_COMM_WORLD_SIZE" }, from_open_mpi },
    { "PMIx",
      "PMIX_RANK",
      NULL,
      { "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "YARD_SIZE" },
      from_pmi },
    { "PMI", "PMI_RANK", "PMI_SIZE", { "PMI_SIZE" }, from_pmi },
    { "Slurm", "SLURM_PROCID", NULL, { "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS" }, from_slurm },
    { "torchrun", "RANK", "WORLD_SIZE", { "WORLD_SIZE" }, from_torchrun },
    { "Kubernetes indexed job", "JOB_COMPLETION_INDEX", NULL, { "YARD_SIZE" }, from_nothing },
};

static const scheme *find_scheme(void)
{
    for (size_t i = 0; i < sizeof(schemes) / sizeof(schemes[0]); i++)
        if (get(schemes[i].rank) && (!schemes[i].also || get(schemes[i].also)))
            return &schemes[i];
    return NULL;
}

static yard_status read_ranks(const scheme *s, found *v)
{
    const char *size = s->sizes[0];
    yard_status st = read_number(s, s->rank, &v->rank, v->err);

    for (int i = 1; i < 3 && !get(size) && s->sizes[i]; i++)
        size = s->sizes[i];
    if (st == YARD_OK)
        st = read_number(s, size, &v->n_ranks, v->err);
    if (st == YARD_OK && v->rank >= v->n_ranks)
        st = yard_fail(v->err, YARD_EINVAL, "environment: %s: want %s less than %s, got %u and %u",
                       s->name, s->rank, size, v->rank, v->n_ranks);
    return st;
}

/* A variable that goes with every scheme. */
static yard_status read_text(const scheme *s, const char *name, char *text, size_t n_text,
                             yard_error *err)
{
    const char *value = get(name);

    text[0] = 0;
    if (value && strlen(value) >= n_text)
        return yard_fail(err, YARD_EINVAL,
                         "environment: %s: %s: want at most %zu characters, got %zu", s->name, name,
                         n_text - 1, strlen(value));
    if (value)
        memcpy(text, value, strlen(value) + 1);
    return YARD_OK;
}

/* Variables that make no scheme but show that one was meant: ranks that each went their own way, as
 * groups of one, would all give plausible results. */
static yard_status refuse_half_schemes(yard_error *err)
{
    static const char *const ours[] = { "YARD_SIZE", "YARD_RENDEZVOUS" };

    for (size_t i = 0; i < sizeof(ours) / sizeof(ours[0]); i++)
        if (get(ours[i]))
            return yard_fail(err, YARD_EINVAL,
                             "environment: %s is set, but nothing tells the rank: want YARD_RANK, "
                             "or a launcher's (Open MPI, PMIx, Slurm, torchrun, Kubernetes indexed "
                             "job)",
                             ours[i]);
    if (get("MASTER_ADDR") && (get("RANK") || get("WORLD_SIZE")))
        return yard_fail(err, YARD_EINVAL,
                         "environment: torchrun: %s is missing beside MASTER_ADDR and %s",
                         get("RANK") ? "WORLD_SIZE" : "RANK", get("RANK") ? "RANK" : "WORLD_SIZE");
    return YARD_OK;
}

yard_status yard_fabric_config_from_env(yard_fabric_config *config, yard_fabric_env *storage,
                                        yard_error *err)
{
    const scheme *s = find_scheme();
    found v = { .storage = storage, .err = err };
    yard_status st;

    storage->scheme = s ? s->name : NULL;
    if (!s)
        return refuse_half_schemes(err);
    st = read_ranks(s, &v);
    if (st == YARD_OK)
        st = read_text(s, "YARD_RENDEZVOUS", storage->rendezvous, sizeof(storage->rendezvous), err);
    if (st == YARD_OK)
        st = read_text(s, "YARD_SECRET", storage->secret, sizeof(storage->secret), err);
    if (st == YARD_OK)
        st = read_text(s, "YARD_BIND_HOST", storage->bind_host, sizeof(storage->bind_host), err);
    if (st == YARD_OK && !storage->rendezvous[0] && v.n_ranks > 1)
        st = s->rendezvous(&v);
    if (st != YARD_OK)
        return st;
    config->rank = v.rank;
    config->n_ranks = v.n_ranks;
    if (storage->rendezvous[0])
        config->rendezvous = storage->rendezvous;
    if (storage->secret[0])
        config->secret = storage->secret;
    if (storage->bind_host[0])
        config->bind_host = storage->bind_host;
    return YARD_OK;
}
