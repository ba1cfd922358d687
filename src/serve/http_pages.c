/* Answers that need no engine: models, health, metrics. */
#include "serve/api_answer.h"
#include "serve/http_impl.h"
#include "serve/metrics.h"

static void put_count(yard_api_out *out, const char *name, uint64_t n)
{
    yard_api_put(out, name);
    yard_api_put_integer(out, (int64_t)n);
}

/* Live: the front answers. Ready: some engine serves, so all its ranks are warm. Progressing: no
 * engine with work has been without a step for long. */
static int put_health(const yard_http *http, const char *what, yard_api_out *out)
{
    yard_front_health h;
    const char *status;
    bool good;

    yard_front_get_health(http->front, yard_now_us(), &h);
    if (!strcmp(what, "live")) {
        good = true;
        status = "live";
    } else if (!strcmp(what, "ready")) {
        good = h.n_pods_up > 0 && !http->draining;
        status = good ? "ready" : http->draining ? "draining" : "no engine is ready";
    } else {
        good = h.n_pods_up > 0 && !h.stuck;
        status = good ? "progressing" : h.stuck ? "stuck" : "no engine is ready";
    }
    yard_api_put(out, "{\"status\":\"");
    yard_api_put(out, status);
    put_count(out, "\",\"engines\":", h.n_pods);
    put_count(out, ",\"engines_up\":", h.n_pods_up);
    put_count(out, ",\"instances_up\":", h.n_instances_up);
    put_count(out, ",\"requests\":", h.n_jobs);
    put_count(out, ",\"queued\":", h.n_queued);
    yard_api_put(out, ",\"step_age_s\":");
    yard_api_put_float(out, (float)h.step_age_us * 1e-6f);
    yard_api_put(out, "}");
    return good ? 200 : 503;
}

static int put_model(const yard_http *http, const char *name, yard_api_out *out)
{
    const char *model = yard_front_model(http->front);
    yard_api_error err = { 0 };

    if (name && strcmp(name, model) != 0) {
        yard_api_no_such_model(&err, name);
        yard_api_put_error(out, &err);
        return err.http_status;
    }
    yard_api_put_models(out, !name, model, yard_front_created(http->front),
                        yard_front_context(http->front));
    return 200;
}

bool yard_http_page(yard_http *http, const char *path, yard_api_out *out, int *status)
{
    static const char models[] = "/v1/models", health[] = "/health";
    const char *rest = path + sizeof(models) - 1;

    *status = 200;
    if (!strcmp(path, "/metrics")) {
        yard_front_put_metrics(http->front, yard_now_us(), out);
        yard_metrics_head(out, "switchyard_connections", "gauge", "Open client connections.");
        yard_metrics_sample(out, "switchyard_connections", "", http->n_connections);
        return true;
    }
    if (!strncmp(path, models, sizeof(models) - 1) && (!*rest || *rest == '/')) {
        *status = put_model(http, *rest ? rest + 1 : NULL, out);
        return true;
    }
    if (strncmp(path, health, sizeof(health) - 1) != 0)
        return false;
    rest = path + sizeof(health) - 1;
    if (*rest && strcmp(rest, "/live") != 0 && strcmp(rest, "/ready") != 0 &&
        strcmp(rest, "/progress") != 0)
        return false;
    *status = put_health(http, *rest ? rest + 1 : "ready", out);
    return true;
}
