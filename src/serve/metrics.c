#include "serve/metrics.h"

#include <math.h>
#include <stdio.h>

enum { FIRST_BUCKET_US = 1000 };

static const int statuses[YARD_METRICS_STATUSES] = { 200, 300, 400, 401, 404, 405, 408, 413,
                                                     429, 431, 499, 500, 501, 502, 503, 504 };
static const char *const routes[YARD_METRICS_ROUTES] = { "chat", "completions", "tokenize",
                                                         "detokenize" };

void yard_histogram_add(yard_histogram *h, uint64_t us)
{
    uint32_t i = 0;

    while (i + 1 < YARD_HISTOGRAM_BUCKETS && us > (uint64_t)FIRST_BUCKET_US << i)
        i++;
    h->count[i]++;
    h->sum_us += us;
}

static uint32_t status_idx(int http_status)
{
    uint32_t best = 0;

    for (uint32_t i = 0; i < YARD_METRICS_STATUSES; i++) {
        if (statuses[i] == http_status)
            return i;
        if (statuses[i] == http_status / 100 * 100)
            best = i;
    }
    return best;
}

void yard_metrics_count(yard_metrics *m, uint32_t route, int http_status)
{
    m->n_requests[route][status_idx(http_status)]++;
}

void yard_metrics_head(yard_api_out *out, const char *name, const char *type, const char *help)
{
    yard_api_put(out, "# HELP ");
    yard_api_put(out, name);
    yard_api_put(out, " ");
    yard_api_put(out, help);
    yard_api_put(out, "\n# TYPE ");
    yard_api_put(out, name);
    yard_api_put(out, " ");
    yard_api_put(out, type);
    yard_api_put(out, "\n");
}

void yard_metrics_sample(yard_api_out *out, const char *name, const char *labels, double value)
{
    char text[40];

    yard_api_put(out, name);
    if (labels[0]) {
        yard_api_put(out, "{");
        yard_api_put(out, labels);
        yard_api_put(out, "}");
    }
    snprintf(text, sizeof(text), fabs(value) < 1e15 && value == floor(value) ? " %.0f\n" : " %g\n",
             value);
    yard_api_put(out, text);
}

static void put_histogram(yard_api_out *out, const char *name, const char *help,
                          const yard_histogram *h)
{
    char full[96], labels[40];
    uint64_t n = 0;

    yard_metrics_head(out, name, "histogram", help);
    snprintf(full, sizeof(full), "%s_bucket", name);
    for (uint32_t i = 0; i < YARD_HISTOGRAM_BUCKETS; i++) {
        n += h->count[i];
        if (i + 1 < YARD_HISTOGRAM_BUCKETS)
            snprintf(labels, sizeof(labels), "le=\"%g\"",
                     (double)((uint64_t)FIRST_BUCKET_US << i) * 1e-6);
        else
            snprintf(labels, sizeof(labels), "le=\"+Inf\"");
        yard_metrics_sample(out, full, labels, (double)n);
    }
    snprintf(full, sizeof(full), "%s_sum", name);
    yard_metrics_sample(out, full, "", (double)h->sum_us * 1e-6);
    snprintf(full, sizeof(full), "%s_count", name);
    yard_metrics_sample(out, full, "", (double)n);
}

static void put_counter(yard_api_out *out, const char *name, const char *help, uint64_t n)
{
    yard_metrics_head(out, name, "counter", help);
    yard_metrics_sample(out, name, "", (double)n);
}

void yard_metrics_put(const yard_metrics *m, yard_api_out *out)
{
    static const char name[] = "switchyard_requests_total";
    char labels[64];

    yard_metrics_head(out, name, "counter", "Requests that were answered, by route and status.");
    for (uint32_t r = 0; r < YARD_METRICS_ROUTES; r++)
        for (uint32_t i = 0; i < YARD_METRICS_STATUSES; i++) {
            if (m->n_requests[r][i] == 0 && statuses[i] != 200)
                continue;
            snprintf(labels, sizeof(labels), "route=\"%s\",status=\"%d\"", routes[r], statuses[i]);
            yard_metrics_sample(out, name, labels, (double)m->n_requests[r][i]);
        }
    put_counter(out, "switchyard_requests_gone_total",
                "Requests whose clients left before the end, or did not read.", m->n_gone);
    put_counter(out, "switchyard_prompt_tokens_total", "Prompt tokens of ended requests.",
                m->n_prompt_tokens);
    put_counter(out, "switchyard_cached_tokens_total", "Of these, tokens found in caches.",
                m->n_cached_tokens);
    put_counter(out, "switchyard_output_tokens_total", "Generated tokens of ended requests.",
                m->n_output_tokens);
    put_histogram(out, "switchyard_time_to_first_token_seconds",
                  "From a request's arrival to its first token.", &m->first_token);
    put_histogram(out, "switchyard_inter_token_seconds",
                  "Between two messages with tokens of one request.", &m->between_tokens);
    put_histogram(out, "switchyard_request_seconds", "From a request's arrival to its end.",
                  &m->whole);
}
