/* What the front says about itself and its engines: health and metrics. */
#include <stdio.h>
#include <unistd.h>

#include "serve/front_impl.h"

enum { STUCK_US = 2000000 };

/* An engine that is silent may be as stuck as one that says so, unless it said that it would be. */
static uint64_t step_age(const yard_front_instance *x, uint64_t now_us)
{
    const uint64_t silent_us = now_us > x->heard_us && !x->paused ? now_us - x->heard_us : 0;

    return silent_us > STUCK_US ? silent_us + x->report.step_age_us : x->report.step_age_us;
}

void yard_front_get_health(const yard_front *front, uint64_t now_us, yard_front_health *out)
{
    yard_scheduler_stats stats;

    yard_scheduler_get_stats(front->scheduler, &stats);
    *out = (yard_front_health){ .n_pods = front->n_pods,
                                .n_pods_up = front->n_up,
                                .n_jobs = front->n_jobs,
                                .n_queued = stats.n_queued };
    for (uint32_t i = 0; i < front->n_pods; i++)
        for (uint32_t k = 0; front->pods[i].up && k < front->pods[i].about.n_instances; k++) {
            const uint64_t age_us = step_age(&front->pods[i].instance[k], now_us);

            out->n_instances_up++;
            if (age_us > out->step_age_us)
                out->step_age_us = age_us;
        }
    out->stuck = out->step_age_us > STUCK_US;
}

typedef double (*instance_value)(const yard_front *front, const yard_front_pod *pod, uint32_t i,
                                 uint64_t now_us);

static double value_up(const yard_front *front, const yard_front_pod *pod, uint32_t i,
                       uint64_t now_us)
{
    return pod->instance[i].up;
}

static double value_requests(const yard_front *front, const yard_front_pod *pod, uint32_t i,
                             uint64_t now_us)
{
    return pod->instance[i].report.n_requests;
}

static double value_prompt(const yard_front *front, const yard_front_pod *pod, uint32_t i,
                           uint64_t now_us)
{
    return (double)pod->instance[i].report.prompt_tokens;
}

static double value_running(const yard_front *front, const yard_front_pod *pod, uint32_t i,
                            uint64_t now_us)
{
    return (double)pod->instance[i].report.running_tokens;
}

static double value_age(const yard_front *front, const yard_front_pod *pod, uint32_t i,
                        uint64_t now_us)
{
    return pod->instance[i].up ? (double)step_age(&pod->instance[i], now_us) * 1e-6 : 0;
}

static double value_work(const yard_front *front, const yard_front_pod *pod, uint32_t i,
                         uint64_t now_us)
{
    return (double)yard_scheduler_work(
        front->scheduler, (uint32_t)(pod - front->pods) * YARD_FRONT_MAX_POD_INSTANCES + i);
}

static const struct {
    const char *name, *help;
    instance_value value;
} instance_metrics[] = {
    { "switchyard_instance_up", "1 while the instance serves.", value_up },
    { "switchyard_instance_requests", "Requests waiting and running at the instance.",
      value_requests },
    { "switchyard_instance_prompt_tokens", "Prompt tokens of these still to be computed.",
      value_prompt },
    { "switchyard_instance_running_tokens", "Tokens that these hold in the cache.", value_running },
    { "switchyard_instance_step_age_seconds",
      "Since the last finished step while there is work, silence included; 0 of one that is not "
      "up.",
      value_age },
    { "switchyard_instance_work_tokens", "Work in tokens, as the next choice sees it.",
      value_work },
};

static void put_instances(const yard_front *front, uint64_t now_us, yard_api_out *out)
{
    char labels[64];

    for (size_t m = 0; m < sizeof(instance_metrics) / sizeof(instance_metrics[0]); m++) {
        yard_metrics_head(out, instance_metrics[m].name, "gauge", instance_metrics[m].help);
        for (uint32_t i = 0; i < front->n_pods; i++)
            for (uint32_t k = 0; k < front->pods[i].about.n_instances; k++) {
                snprintf(labels, sizeof(labels), "pod=\"%u\",instance=\"%u\"", i, k);
                yard_metrics_sample(out, instance_metrics[m].name, labels,
                                    instance_metrics[m].value(front, &front->pods[i], k, now_us));
            }
    }
}

static void put_one(yard_api_out *out, const char *name, const char *type, const char *help,
                    double value)
{
    yard_metrics_head(out, name, type, help);
    yard_metrics_sample(out, name, "", value);
}

static void put_scheduler(const yard_front *front, yard_api_out *out)
{
    static const char *const reasons[YARD_END_REASON_COUNT] = { "finished", "aborted", "deadline",
                                                                "engine_lost", "failed" };
    static const char ended[] = "switchyard_scheduler_ended_total";
    yard_scheduler_stats s;
    char labels[40];

    yard_scheduler_get_stats(front->scheduler, &s);
    put_one(out, "switchyard_scheduler_queued", "gauge", "Requests that wait for room.",
            s.n_queued);
    put_one(out, "switchyard_scheduler_sent", "gauge", "Requests at an instance.", s.n_sent);
    put_one(out, "switchyard_scheduler_accepted_total", "counter",
            "Requests taken; each prompt is one.", (double)s.n_accepted);
    put_one(out, "switchyard_scheduler_refused_total", "counter",
            "Requests that found a full queue.", (double)s.n_refused);
    put_one(out, "switchyard_scheduler_retried_total", "counter",
            "Requests sent once more, to another instance.", (double)s.n_retried);
    put_one(out, "switchyard_scheduler_expected_cached_tokens_total", "counter",
            "Prompt tokens that were expected in the cache where they were sent.",
            (double)s.n_cached_tokens);
    put_one(out, "switchyard_scheduler_index_pages", "gauge", "Cache pages known, of all engines.",
            s.n_index_pages);
    yard_metrics_head(out, ended, "counter", "How requests ended.");
    for (uint32_t i = 0; i < YARD_END_REASON_COUNT; i++) {
        snprintf(labels, sizeof(labels), "reason=\"%s\"", reasons[i]);
        yard_metrics_sample(out, ended, labels, (double)s.n_ended[i]);
    }
}

static void put_process(yard_api_out *out)
{
    FILE *in = fopen("/proc/self/statm", "r");
    unsigned long long n_pages = 0;

    if (in && fscanf(in, "%*u %llu", &n_pages) == 1)
        put_one(out, "process_resident_memory_bytes", "gauge", "Memory of the front.",
                (double)n_pages * (double)sysconf(_SC_PAGESIZE));
    if (in)
        fclose(in);
}

void yard_front_put_metrics(const yard_front *front, uint64_t now_us, yard_api_out *out)
{
    put_one(out, "switchyard_jobs", "gauge", "HTTP requests under way.", front->n_jobs);
    put_one(out, "switchyard_pods_up", "gauge", "Engines that serve.", front->n_up);
    put_instances(front, now_us, out);
    put_scheduler(front, out);
    yard_metrics_put(&front->metrics, out);
    put_process(out);
}
