/* Counters and histograms of requests, and Prometheus' text format. Private to the serve room. */
#ifndef YARD_SERVE_METRICS_H
#define YARD_SERVE_METRICS_H

#include "serve/api_out.h"

enum { YARD_HISTOGRAM_BUCKETS = 20 };

/* Of times, in buckets of a factor 2 from 1 ms on; the last one takes the rest. */
typedef struct yard_histogram {
    uint64_t count[YARD_HISTOGRAM_BUCKETS];
    uint64_t sum_us;
} yard_histogram;

void yard_histogram_add(yard_histogram *h, uint64_t us);

/* The statuses that are told apart; others count as the first of their hundred. */
enum { YARD_METRICS_STATUSES = 16, YARD_METRICS_ROUTES = 4 };

typedef struct yard_metrics {
    uint64_t n_requests[YARD_METRICS_ROUTES][YARD_METRICS_STATUSES];
    uint64_t n_gone; /* requests whose clients left before the end, or did not read */
    uint64_t n_prompt_tokens, n_cached_tokens, n_output_tokens;
    yard_histogram first_token, between_tokens, whole;
} yard_metrics;

void yard_metrics_count(yard_metrics *m, uint32_t route, int http_status);
void yard_metrics_put(const yard_metrics *m, yard_api_out *out);

/* "# HELP" and "# TYPE" of a metric, whose samples follow. */
void yard_metrics_head(yard_api_out *out, const char *name, const char *type, const char *help);
/* One sample; labels without braces ("pod=\"0\""), "" for none. */
void yard_metrics_sample(yard_api_out *out, const char *name, const char *labels, double value);

#endif
