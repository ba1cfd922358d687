/* The engine on GPUs: engine_gpu_test [MODEL GOLDEN [ranks]], by default the demo model and its
 * reference values; ranks: only the cases of several ranks (ranks.c). In exact mode greedy ids and
 * logits are the reference's; in quantised mode the rate of equal largest logits stands beside the
 * CPU's; with the deterministic table a request's ids do not depend on the others of its step,
 * whatever the chunks. Needs libc and a driver only; ends with 77 when there is no GPU. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine_gpu_test.h"

void engine_gpu_check(test *t, bool passed, const char *what)
{
    printf("%s: %s: %s\n", t->case_name, what, passed ? "ok" : "FAILED");
    t->n_failed += !passed;
}

static void fail(const char *what, const char *why)
{
    printf("%s: %s\n", what, why);
    exit(EXIT_FAILURE);
}

static uint32_t read_ids(const json_t *list, int32_t *ids, uint32_t max)
{
    uint32_t n = (uint32_t)json_array_size(list);

    n = n < max ? n : max;
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (int32_t)json_integer_value(json_array_get(list, i));
    return n;
}

static void read_prompts(test *t, const json_t *root)
{
    const json_t *list = json_object_get(root, "prompts"), *p;
    size_t i;

    t->n = (uint32_t)json_array_size(list);
    if (t->n == 0 || t->n > MAX_PROMPTS)
        fail("golden file", "no prompts, or too many");
    json_array_foreach(list, i, p)
    {
        prompt *out = &t->prompts[i];
        out->name = json_string_value(json_object_get(p, "name"));
        out->n_ids = read_ids(json_object_get(p, "ids"), out->ids, MAX_IDS - N_GREEDY);
        out->n_greedy = read_ids(json_object_get(p, "greedy"), out->ids + out->n_ids, N_GREEDY);
        out->logits = json_object_get(p, "logits");
    }
}

static yard_engine *open_engine(const test *t, yard_engine_config config)
{
    yard_engine *engine = NULL;
    yard_error err = { 0 };
    const yard_status st =
        (config.model_dir = t->model, yard_engine_create(&engine, &config, &err));

    if (st == YARD_EDEVICE || st == YARD_ENOTSUP) {
        printf("engine_gpu_test: %s; nothing was tested\n", err.message);
        exit(77);
    }
    if (st != YARD_OK)
        fail("engine", err.message);
    return engine;
}

static yard_engine_config config_of(yard_numeric_mode mode, const char *device, const char *variant)
{
    yard_engine_config config = YARD_ENGINE_CONFIG_INIT;

    config.mode = mode;
    config.device = device;
    config.cuda_variant = variant;
    config.prefix_cache = YARD_CACHE_OFF;
    return config;
}

typedef struct score {
    const prompt *p;
    uint32_t vocab, row;
    uint32_t n_rows, n_same;          /* listed rows, and those with the same largest logit */
    uint32_t n_forced, n_forced_same; /* the same of greedy ids */
    float worst;
} score;

static int32_t largest(const float *x, uint32_t n)
{
    uint32_t best = 0;

    for (uint32_t i = 1; i < n; i++)
        best = x[i] > x[best] ? i : best;
    return (int32_t)best;
}

static void take_row(void *ctx, uint32_t pos, const float *logits, const float *draft)
{
    score *s = ctx;
    const int32_t best = largest(logits, s->vocab);
    const json_t *row = json_array_get(s->p->logits, s->row), *ids, *want;

    (void)draft;
    if (pos + 1 >= s->p->n_ids && pos + 1 < s->p->n_ids + s->p->n_greedy) {
        s->n_forced++;
        s->n_forced_same += best == s->p->ids[pos + 1];
    }
    if (!row || json_integer_value(json_object_get(row, "pos")) != pos)
        return;
    ids = json_object_get(row, "ids");
    want = json_object_get(row, "logits");
    s->row++;
    s->n_rows++;
    s->n_same += best == json_integer_value(json_array_get(ids, 0));
    for (size_t i = 0; i < json_array_size(ids); i++) {
        const float d = fabsf(logits[json_integer_value(json_array_get(ids, i))] -
                              (float)json_number_value(json_array_get(want, i)));
        s->worst = d > s->worst || isnan(d) ? d : s->worst;
    }
}

/* Of all prompts, each with its greedy ids behind it. */
static score run_scores(const test *t, yard_engine_config config)
{
    yard_engine *engine = open_engine(t, config);
    score s = { .vocab = yard_engine_model_config(engine)->vocab };

    for (uint32_t i = 0; i < t->n; i++) {
        s.p = &t->prompts[i];
        s.row = 0;
        if (yard_engine_score(engine, s.p->ids, s.p->n_ids + s.p->n_greedy, 1, take_row, &s) !=
            YARD_OK)
            fail(s.p->name, yard_engine_error(engine));
    }
    yard_engine_destroy(engine);
    return s;
}

static void print_score(const char *name, const score *s)
{
    printf("%-24s largest logit equal: %u of %u listed positions (%.2f %%), %u of %u greedy ones "
           "(%.2f %%); largest difference %.2e\n",
           name, s->n_same, s->n_rows, 100.0 * s->n_same / s->n_rows, s->n_forced_same, s->n_forced,
           100.0 * s->n_forced_same / s->n_forced, (double)s->worst);
}

typedef struct ids {
    int32_t of[MAX_PROMPTS][N_GREEDY];
    uint32_t n[MAX_PROMPTS];
} ids;

static void submit(yard_engine *engine, const prompt *p, uint64_t *id)
{
    yard_request request = YARD_REQUEST_INIT;

    request.prompt = p->ids;
    request.n_prompt = p->n_ids;
    request.max_new_tokens = N_GREEDY;
    request.ignore_eos = true;
    if (yard_engine_submit(engine, &request, id) != YARD_OK)
        fail(p->name, yard_engine_error(engine));
}

static void run_to_end(yard_engine *engine, uint32_t n_live, const uint64_t *id, uint32_t n,
                       ids *out)
{
    yard_event event;

    while (n_live > 0) {
        if (yard_engine_step(engine) != YARD_OK)
            fail("step", yard_engine_error(engine));
        while (yard_engine_poll(engine, &event, 1))
            for (uint32_t i = 0; i < n; i++)
                if (id[i] == event.id) {
                    if (event.n_tokens)
                        out->of[i][out->n[i]++] = event.token;
                    n_live -= event.finish != YARD_RUNNING;
                }
    }
}

/* All prompts at once, or one after the other. */
static void run_greedy(const test *t, yard_engine_config config, bool together, ids *out)
{
    yard_engine *engine = open_engine(t, config);
    uint64_t id[MAX_PROMPTS] = { 0 };

    memset(out, 0, sizeof(*out));
    for (uint32_t i = 0; i < t->n; i++) {
        submit(engine, &t->prompts[i], &id[i]);
        if (!together)
            run_to_end(engine, 1, id, t->n, out);
    }
    if (together)
        run_to_end(engine, t->n, id, t->n, out);
    yard_engine_destroy(engine);
}

static bool same_ids(const test *t, const ids *a, const ids *b)
{
    for (uint32_t i = 0; i < t->n; i++)
        if (a->n[i] != b->n[i] || memcmp(a->of[i], b->of[i], a->n[i] * sizeof(int32_t)) != 0)
            return false;
    return true;
}

static uint32_t count_golden(const test *t, const ids *a)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < t->n; i++)
        n += a->n[i] >= t->prompts[i].n_greedy &&
             !memcmp(a->of[i], t->prompts[i].ids + t->prompts[i].n_ids,
                     t->prompts[i].n_greedy * sizeof(int32_t));
    return n;
}

static ids together, alone;

static void exact_is_golden(test *t)
{
    const yard_engine_config config = config_of(YARD_EXACT, "cuda", "deterministic");
    const score s = run_scores(t, config);

    t->case_name = "exact";
    print_score("exact, cuda", &s);
    engine_gpu_check(t, s.worst < 5e-3f && s.n_same == s.n_rows,
                     "logits within 5e-3 of the reference");
    run_greedy(t, config, true, &together);
    printf("greedy ids of %u of %u prompts are the reference's\n", count_golden(t, &together),
           t->n);
    engine_gpu_check(t, count_golden(t, &together) == t->n, "greedy ids");
}

static void rows_are_independent(test *t)
{
    yard_engine_config config = config_of(YARD_QUANTISED, "cuda", "deterministic");

    t->case_name = "deterministic";
    run_greedy(t, config, true, &together);
    run_greedy(t, config, false, &alone);
    engine_gpu_check(t, same_ids(t, &together, &alone), "together as alone");
    config.max_tokens = 37; /* chunks that end anywhere */
    run_greedy(t, config, true, &alone);
    engine_gpu_check(t, same_ids(t, &together, &alone), "in chunks as whole");
}

/* The rate differs from the CPU's by what rounding does; far below it something is wrong. */
static void quantised_rate(test *t)
{
    const score cpu = run_scores(t, config_of(YARD_QUANTISED, "cpu", NULL));
    const char *const variants[] = { "deterministic", "fast" };

    t->case_name = "quantised";
    print_score("quantised, cpu", &cpu);
    for (int i = 0; i < 2; i++) {
        const score s = run_scores(t, config_of(YARD_QUANTISED, "cuda", variants[i]));
        print_score(i ? "quantised, cuda fast" : "quantised, cuda det.", &s);
        engine_gpu_check(
            t, s.n_same * 100 >= cpu.n_same * 97 && s.n_forced_same * 100 >= cpu.n_forced_same * 97,
            variants[i]);
    }
}

int main(int argc, char **argv)
{
    const char *golden = argc > 2 ? argv[2] : "tests/golden/prompts.json";
    test t = { .model = argc > 2 ? argv[1] : "models/demo" };
    json_error_t error;
    json_t *root = json_load_file(golden, 0, &error);

    setvbuf(stdout, NULL, _IOLBF, 0);
    if (!root)
        fail(golden, error.text);
    t.prompts = calloc(MAX_PROMPTS, sizeof(*t.prompts));
    if (!t.prompts)
        fail("prompts", "no memory");
    read_prompts(&t, root);
    engine_gpu_ranks(&t); /* first: see there */
    if (argc <= 3) {
        exact_is_golden(&t);
        rows_are_independent(&t);
        quantised_rate(&t);
    }
    printf("%s\n", t.n_failed ? "failed" : "passed");
    json_decref(root);
    free(t.prompts);
    return t.n_failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
