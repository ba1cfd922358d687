/* Pods: answers of the golden file from every layout, requests refused and aborted, and ranks that
 * are killed or stopped at every stage of start and step: whatever happens, every request ends with
 * one result or one error that names the rank, service goes on by itself, and nothing is left. */
#include "../model/ranks.h"

#include <dirent.h>

#include "engine/engine.h"

enum {
    N_FAULTS = 12,
    DEADLINE_US = 3000000, /* where it is awaited; healthy ranks are never so slow */
    PATIENCE_US = 200000000
};

static ranks_prompt prompts[RANKS_PROMPTS];

typedef struct outcome {
    uint64_t id;
    uint32_t prompt, n_ids;
    bool ended;
    yard_finish finish;
    char message[YARD_ERROR_MESSAGE_BYTES];
} outcome;

static char last_notice[YARD_ERROR_MESSAGE_BYTES];

static void keep_notice(void *ctx, const char *line)
{
    snprintf(last_notice, sizeof(last_notice), "%s", line);
    if (getenv("YARD_TEST_VERBOSE"))
        fprintf(stderr, "%s\n", line);
}

static yard_pod_config pod_config(uint32_t n_ranks, uint32_t tp, const char *transport)
{
    const yard_engine_config engine = YARD_ENGINE_CONFIG_INIT;
    yard_pod_config c = { .engine = engine, .n_ranks = n_ranks, .transport = transport };

    c.engine.model_dir = RANKS_DEMO_DIR;
    c.engine.mode = YARD_EXACT;
    c.engine.n_threads = 1;
    c.engine.kv_tokens = 8192;
    c.engine.max_seqs = 8;
    c.engine.tp = tp;
    c.engine.timeout_us = PATIENCE_US;
    c.start_timeout_us = PATIENCE_US;
    c.notice = keep_notice;
    return c;
}

static yard_pod *open_as(const yard_pod_config *c)
{
    yard_pod *pod = NULL;
    yard_error err = { 0 };

    if (yard_pod_create(&pod, c, &err) != YARD_OK)
        fail_msg("%s", err.message);
    return pod;
}

static yard_pod *open_pod(uint32_t n_ranks, uint32_t tp, const char *transport)
{
    const yard_pod_config c = pod_config(n_ranks, tp, transport);

    return open_as(&c);
}

/* Of ranks that are stopped, which only a deadline tells of. */
static yard_pod *open_pod_with_deadline(uint32_t n_ranks)
{
    yard_pod_config c = pod_config(n_ranks, 1, NULL);

    c.engine.timeout_us = DEADLINE_US;
    return open_as(&c);
}

static outcome submit(yard_pod *pod, uint32_t instance, uint32_t prompt, uint32_t n_new)
{
    yard_request request = YARD_REQUEST_INIT;
    outcome o = { .prompt = prompt };

    request.prompt = prompts[prompt].ids;
    request.n_prompt = prompts[prompt].n_ids;
    request.max_new_tokens = n_new;
    request.ignore_eos = true;
    assert_int_equal(yard_pod_submit(pod, instance, &request, &o.id, NULL), YARD_OK);
    return o;
}

static void take_event(outcome *o, const yard_pod_event *e)
{
    const ranks_prompt *p = &prompts[o->prompt];

    assert_false(o->ended);
    if (e->n_tokens > 0 && o->n_ids < RANKS_NEW)
        assert_int_equal(e->token, p->ids[p->n_ids + o->n_ids]);
    o->n_ids += e->n_tokens;
    o->ended = e->finish != YARD_RUNNING;
    o->finish = e->finish;
    if (e->message)
        snprintf(o->message, sizeof(o->message), "%s", e->message);
}

static void take_events(yard_pod *pod, outcome *o, size_t n)
{
    yard_pod_event events[32];
    uint32_t n_events;

    while ((n_events = yard_pod_poll(pod, events, 32)) > 0)
        for (uint32_t i = 0; i < n_events; i++) {
            for (size_t j = 0; j < n; j++)
                if (o[j].id == events[i].id)
                    take_event(&o[j], &events[i]);
            yard_pod_event_free(&events[i]);
        }
}

static bool all_ended(const outcome *o, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!o[i].ended)
            return false;
    return true;
}

static void run_once(yard_pod *pod, outcome *o, size_t n)
{
    yard_error err = { 0 };

    if (yard_pod_run(pod, 100000, &err) != YARD_OK)
        fail_msg("%s", err.message);
    take_events(pod, o, n);
}

static void run_to_end(yard_pod *pod, outcome *o, size_t n)
{
    const uint64_t until_us = yard_now_us() + PATIENCE_US;

    while (!all_ended(o, n)) {
        run_once(pod, o, n);
        if (yard_now_us() > until_us)
            fail_msg("a request does not end; last notice: %s", last_notice);
    }
}

static void answers_are_the_golden_ones(void **state)
{
    static const struct {
        uint32_t n_ranks, tp;
        const char *transport;
    } cases[] = { { 1, 1, NULL }, { 2, 1, NULL }, { 2, 2, NULL }, { 4, 2, "tcp" } };
    outcome o[8];

    (void)state;
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        yard_pod *pod = open_pod(cases[c].n_ranks, cases[c].tp, cases[c].transport);
        const uint32_t dp = yard_pod_instance_count(pod);

        assert_int_equal(dp, cases[c].n_ranks / cases[c].tp);
        for (uint32_t i = 0; i < 8; i++) /* before it serves */
            o[i] = submit(pod, i % dp, i, RANKS_NEW);
        run_to_end(pod, o, 8);
        o[0] = submit(pod, dp - 1, 9, RANKS_NEW);
        run_to_end(pod, o, 8);
        for (uint32_t i = 0; i < 8; i++)
            assert_true(o[i].n_ids == RANKS_NEW && o[i].finish == YARD_FINISH_LENGTH);
        yard_pod_destroy(pod);
    }
}

static void requests_are_refused_and_aborted(void **state)
{
    yard_pod *pod = open_pod(2, 2, NULL);
    yard_request request = YARD_REQUEST_INIT;
    const int32_t bad = 99999;
    outcome o[3];
    yard_error err = { 0 };

    (void)state;
    request.prompt = &bad;
    request.n_prompt = 1;
    assert_int_equal(yard_pod_submit(pod, 1, &request, &o[0].id, &err), YARD_EINVAL);
    assert_string_equal(err.message, "instance: want below 1, got 1");
    o[0] = (outcome){ 0 };
    assert_int_equal(yard_pod_submit(pod, 0, &request, &o[0].id, &err), YARD_OK);
    o[1] = submit(pod, 0, 1, 4000);
    o[2] = submit(pod, 0, 2, RANKS_NEW);
    while (o[1].n_ids < 3)
        run_once(pod, o, 3);
    yard_pod_abort(pod, o[1].id, YARD_ALL_CHOICES);
    yard_pod_abort(pod, 12345, YARD_ALL_CHOICES);
    run_to_end(pod, o, 3);
    assert_int_equal(o[0].finish, YARD_FINISH_ERROR);
    assert_non_null(strstr(o[0].message, "99999"));
    assert_int_equal(o[1].finish, YARD_FINISH_ABORTED);
    assert_true(o[2].n_ids == RANKS_NEW);
    yard_pod_destroy(pod);
}

/* Reports and pages come by themselves; requests count as known once they have ended or the
 * instance has spoken of them. */
static void instances_speak(void **state)
{
    yard_pod *pod = open_pod(2, 1, NULL);
    yard_engine_report report;
    yard_page_event page;
    yard_page_hash root;
    bool unknown[2] = { false, false };
    outcome o[2];

    (void)state;
    assert_false(yard_pod_report(pod, 0, &report));
    o[0] = submit(pod, 0, 0, 4000);
    o[1] = submit(pod, 1, 1, RANKS_NEW);
    while (o[0].n_ids < 3)
        run_once(pod, o, 2);
    assert_true(yard_pod_report(pod, 0, &report));
    assert_true(report.n_seen >= o[0].id && report.n_requests == 1 && report.running_tokens > 0);
    assert_true(report.step_age_us < PATIENCE_US);
    assert_true(yard_pod_page_root(pod, &root) && (root.word[0] | root.word[1]) != 0);
    yard_pod_abort(pod, o[0].id, YARD_ALL_CHOICES);
    run_to_end(pod, o, 2);
    do {
        run_once(pod, o, 2);
        assert_true(yard_pod_report(pod, 0, &report));
    } while (report.n_requests > 0);
    assert_int_equal(report.step_age_us, 0);
    assert_int_equal(report.n_seen, o[1].id);
    while (!unknown[0] || !unknown[1])
        while (yard_pod_poll_pages(pod, &page, 1)) {
            assert_true(unknown[page.instance] || page.change == YARD_PAGES_UNKNOWN);
            unknown[page.instance] = true;
        }
    yard_pod_pages_anew(pod, 1);
    unknown[1] = false;
    while (!unknown[1]) {
        run_once(pod, o, 2);
        while (yard_pod_poll_pages(pod, &page, 1))
            unknown[1] = unknown[1] || page.change == YARD_PAGES_UNKNOWN;
    }
    yard_pod_destroy(pod);
}

static void impossible_pods_are_refused(void **state)
{
    yard_pod_config c = pod_config(5, 1, NULL);
    yard_pod *pod = NULL;
    yard_error err = { 0 };

    (void)state;
    assert_int_equal(yard_pod_create(&pod, &c, &err), YARD_EINVAL);
    c = pod_config(3, 2, NULL);
    c.n_pods = 2;
    c.rendezvous = "127.0.0.1:1";
    assert_int_equal(yard_pod_create(&pod, &c, &err), YARD_EINVAL);
    assert_non_null(strstr(err.message, "an instance is on one machine; got 3; nearest: TP 1"));
    c = pod_config(2, 1, "no-such");
    assert_int_equal(yard_pod_create(&pod, &c, &err), YARD_OK);
    assert_int_equal(yard_pod_run(pod, PATIENCE_US, &err), YARD_EFORMAT);
    assert_non_null(strstr(err.message, "no-such"));
    yard_pod_destroy(pod);
}

static uint32_t count_entries(const char *folder)
{
    DIR *dir = opendir(folder);
    uint32_t n = 0;

    assert_non_null(dir);
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

/* Of the process. Returns how many, the last one in *child. */
static uint32_t count_children(pid_t of, pid_t *child)
{
    char path[64];
    FILE *children;
    uint32_t n = 0;

    snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)of, (int)of);
    children = fopen(path, "r");
    while (children && fscanf(children, "%d", child) == 1)
        n++;
    if (children)
        fclose(children);
    return n;
}

typedef struct traces {
    uint32_t n_fds, n_children;
} traces;

/* Of this process alone: other programs use the machine too. Heaps and sockets have no names that
 * could stay behind. */
static traces look(void)
{
    pid_t child;

    return (traces){ .n_fds = count_entries("/proc/self/fd"),
                     .n_children = count_children(getpid(), &child) };
}

/* A fault at a moment that the seed chooses: before it serves, between, or in the middle of steps.
 */
static void harm(yard_pod *pod, uint64_t random, outcome *o, size_t n)
{
    const uint32_t rank = random % 2, what = random / 2 % 3, when = random / 6 % 3;
    const uint32_t n_tokens = (uint32_t)(random / 18 % 12);
    const uint64_t until_us = yard_now_us() + random / 216 % 30000;
    pid_t pid;

    if (when == 0)
        while (yard_now_us() < until_us) /* some stage of the start, or none */
            run_once(pod, o, n);
    else
        while (!yard_pod_serves(pod) || (when == 2 && o[0].n_ids < n_tokens && !o[0].ended))
            run_once(pod, o, n);
    pid = yard_pod_rank_pid(pod, rank);
    if (pid == 0)
        return;
    kill(pid, what == 0 ? SIGKILL : SIGSTOP);
    if (what == 2)
        kill(pid, SIGCONT); /* a moment later it goes on: no harm done */
}

static void cycle(yard_pod *pod, uint64_t seed)
{
    uint64_t random = seed * 0x9e3779b97f4a7c15u;
    outcome o[4];

    random = (random ^ random >> 31) * 0xbf58476d1ce4e5b9u >> 8;
    for (uint32_t i = 0; i < 4; i++)
        o[i] = submit(pod, i % 2, i, RANKS_NEW);
    harm(pod, random, o, 4);
    run_to_end(pod, o, 4);
    for (uint32_t i = 0; i < 4; i++) {
        if (o[i].finish == YARD_FINISH_LENGTH) {
            assert_int_equal(o[i].n_ids, RANKS_NEW);
            continue;
        }
        assert_int_equal(o[i].finish, YARD_FINISH_ERROR);
        if (o[i].n_ids == 0)
            fail_msg("seed %llu: %s", (unsigned long long)seed, o[i].message);
        assert_non_null(strstr(o[i].message, "rank "));
    }
}

static void faults_end_in_service(void **state)
{
    const char *text = getenv("YARD_TEST_FAULTS");
    const uint32_t n = text ? (uint32_t)atoi(text) : N_FAULTS;
    const traces before = look();
    traces after;

    (void)state;
    for (uint32_t part = 0; part < n;
         part += 4) { /* some faults at the start, each with a new pod */
        yard_pod *pod = open_pod_with_deadline(2);

        for (uint32_t i = part; i < n && i < part + 4; i++)
            cycle(pod, i);
        yard_pod_destroy(pod);
    }
    after = look();
    assert_int_equal(after.n_fds, before.n_fds);
    assert_int_equal(after.n_children, before.n_children);
}

/* Both kinds of loss while a step is under way: the error names rank, layer and stage, what had
 * streamed nothing is answered, and service is back soon. */
static void a_lost_rank_is_named(void **state)
{
    static const int signals[] = { SIGKILL, SIGSTOP };

    (void)state;
    for (int i = 0; i < 2; i++) {
        yard_pod *pod = signals[i] == SIGKILL ? open_pod(2, 1, NULL) : open_pod_with_deadline(2);
        outcome o[2];
        uint32_t generation;

        o[0] = submit(pod, 0, 0, 4000);
        while (o[0].n_ids < 5)
            run_once(pod, o, 1);
        generation = yard_pod_generation(pod);
        kill(yard_pod_rank_pid(pod, 1), signals[i]);
        o[1] = submit(pod, 1, 1, RANKS_NEW);
        run_to_end(pod, o, 2);
        assert_int_equal(o[0].finish, YARD_FINISH_ERROR);
        assert_non_null(strstr(o[0].message, "rank 1"));
        print_message("%s\n", o[0].message);
        assert_true(o[1].finish == YARD_FINISH_LENGTH && o[1].n_ids == RANKS_NEW);
        assert_int_equal(yard_pod_generation(pod), generation + 1);
        print_message("%s\n", last_notice);
        yard_pod_destroy(pod);
    }
}

/* One pod of two waits for the other, which never comes. When it loses a rank it begins again, and
 * the rank that waited does not have to end for that. */
static void a_rank_leaves_a_rendezvous(void **state)
{
    const uint64_t until_us = yard_now_us() + PATIENCE_US;
    yard_pod_config c = pod_config(2, 1, NULL);
    yard_pod *pod = NULL;
    yard_error err = { 0 };
    char rendezvous[64];
    pid_t first;

    (void)state;
    snprintf(rendezvous, sizeof(rendezvous), "unix:yard-leaves-%d", getpid());
    c.n_pods = 2;
    c.rendezvous = rendezvous;
    c.secret = "words";
    assert_int_equal(yard_pod_create(&pod, &c, &err), YARD_OK);
    while (yard_pod_generation(pod) < 1 && yard_now_us() < until_us)
        assert_int_equal(yard_pod_run(pod, 1000, &err), YARD_OK);
    first = yard_pod_rank_pid(pod, 0);
    kill(yard_pod_rank_pid(pod, 1), SIGKILL);
    while (yard_pod_generation(pod) < 2 && yard_now_us() < until_us)
        assert_int_equal(yard_pod_run(pod, 1000, &err), YARD_OK);
    assert_int_equal(yard_pod_generation(pod), 2);
    assert_int_equal(yard_pod_rank_pid(pod, 0), first);
    yard_pod_destroy(pod);
}

/* No other rank waits for it: the pod itself sees that it is stopped. */
static void a_rank_alone_is_missed(void **state)
{
    yard_pod *pod = open_pod_with_deadline(1);
    outcome o[2];

    (void)state;
    o[0] = submit(pod, 0, 0, 4000);
    while (o[0].n_ids < 3)
        run_once(pod, o, 1);
    kill(yard_pod_rank_pid(pod, 0), SIGSTOP);
    o[1] = submit(pod, 0, 1, RANKS_NEW);
    run_to_end(pod, o, 2);
    assert_int_equal(o[0].finish, YARD_FINISH_ERROR);
    assert_non_null(strstr(o[0].message, "is stopped"));
    assert_true(o[1].finish == YARD_FINISH_LENGTH && o[1].n_ids == RANKS_NEW);
    yard_pod_destroy(pod);
}

/* Also when nobody has taken note of its end. */
static bool is_gone(pid_t pid)
{
    char path[64], stat[256] = "";
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    file = fopen(path, "r");
    if (!file)
        return true;
    stat[fread(stat, 1, sizeof(stat) - 1, file)] = '\0';
    fclose(file);
    return strstr(stat, ") Z") != NULL || !stat[0];
}

/* Ranks are not the caller's children, and do not outlive the process that they are of. */
static void the_process_that_starts_ranks_is_lost(void **state)
{
    yard_pod *pod = open_pod(2, 1, NULL);
    const uint64_t until_us = yard_now_us() + PATIENCE_US;
    outcome o = submit(pod, 0, 0, 4000);
    pid_t spawner = 0, rank, ranks[2];
    yard_error err = { 0 };
    yard_status st = YARD_OK;

    (void)state;
    while (o.n_ids < 3)
        run_once(pod, &o, 1);
    assert_int_equal(count_children(getpid(), &spawner), 1);
    assert_int_equal(count_children(spawner, &rank), 2);
    for (uint32_t r = 0; r < 2; r++)
        ranks[r] = yard_pod_rank_pid(pod, r);
    assert_int_equal(rank, ranks[1]);
    kill(spawner, SIGKILL);
    while (st == YARD_OK && yard_now_us() < until_us) {
        st = yard_pod_run(pod, 100000, &err);
        take_events(pod, &o, 1);
    }
    assert_int_equal(st, YARD_EIO);
    assert_non_null(strstr(err.message, "that starts ranks is gone"));
    yard_pod_destroy(pod);
    for (uint32_t r = 0; r < 2; r++)
        while (!is_gone(ranks[r]))
            assert_true(yard_now_us() < until_us);
}

/* It goes on when it is needed: for a rank that has died, and to end. */
static void the_process_that_starts_ranks_is_stopped(void **state)
{
    yard_pod *pod = open_pod_with_deadline(1);
    outcome o[2];
    pid_t spawner = 0;

    (void)state;
    o[0] = submit(pod, 0, 0, 4000);
    while (o[0].n_ids < 3)
        run_once(pod, o, 1);
    assert_int_equal(count_children(getpid(), &spawner), 1);
    kill(spawner, SIGSTOP);
    kill(yard_pod_rank_pid(pod, 0), SIGKILL);
    o[1] = submit(pod, 0, 1, RANKS_NEW);
    run_to_end(pod, o, 2);
    assert_int_equal(o[0].finish, YARD_FINISH_ERROR);
    assert_true(o[1].finish == YARD_FINISH_LENGTH && o[1].n_ids == RANKS_NEW);
    kill(spawner, SIGSTOP);
    kill(yard_pod_rank_pid(pod, 0), SIGSTOP); /* which only that process can see */
    o[1] = submit(pod, 0, 1, RANKS_NEW);
    run_to_end(pod, o, 2);
    assert_int_equal(o[1].n_ids, RANKS_NEW);
    kill(spawner, SIGSTOP);
    yard_pod_destroy(pod);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_are_the_golden_ones),
        cmocka_unit_test(requests_are_refused_and_aborted),
        cmocka_unit_test(instances_speak),
        cmocka_unit_test(impossible_pods_are_refused),
        cmocka_unit_test(a_lost_rank_is_named),
        cmocka_unit_test(a_rank_alone_is_missed),
        cmocka_unit_test(a_rank_leaves_a_rendezvous),
        cmocka_unit_test(faults_end_in_service),
        cmocka_unit_test(the_process_that_starts_ranks_is_lost),
        cmocka_unit_test(the_process_that_starts_ranks_is_stopped),
    };

    ranks_load_prompts(RANKS_DEMO_GOLDEN, prompts);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
