/* The access log: one JSON line a request. */
#include <time.h>

#include "serve/http_impl.h"

static void put_text(yard_api_out *out, const char *name, const char *text)
{
    yard_api_put(out, name);
    yard_api_put_string(out, text, strlen(text));
}

static void put_number(yard_api_out *out, const char *name, uint64_t n)
{
    yard_api_put(out, name);
    yard_api_put_integer(out, (int64_t)n);
}

static void put_time(yard_api_out *out)
{
    struct timespec now;
    struct tm utc;
    char text[40];
    size_t n;

    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    n = strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%S", &utc);
    snprintf(text + n, sizeof(text) - n, ".%03ldZ", now.tv_nsec / 1000000);
    put_text(out, "{\"time\":", text);
}

static const char *method_of(struct evhttp_request *request)
{
    switch (evhttp_request_get_command(request)) {
    case EVHTTP_REQ_GET:
        return "GET";
    case EVHTTP_REQ_POST:
        return "POST";
    case EVHTTP_REQ_HEAD:
        return "HEAD";
    default:
        return "other";
    }
}

void yard_http_log(yard_http *http, struct evhttp_request *request, const char *id,
                   uint64_t arrived_us, const yard_front_summary *s)
{
    const char *uri = evhttp_request_get_uri(request);
    yard_api_out out = { 0 };

    if (!http->config.access_log)
        return;
    put_time(&out);
    put_text(&out, ",\"id\":", id);
    put_text(&out, ",\"method\":", method_of(request));
    put_text(&out, ",\"uri\":", uri ? uri : "");
    put_number(&out, ",\"status\":", (uint64_t)s->http_status);
    put_number(&out, ",\"us\":", yard_now_us() - arrived_us);
    if (s->n_prompt > 0) {
        yard_api_put(&out, s->stream ? ",\"stream\":true" : ",\"stream\":false");
        put_number(&out, ",\"prompt_tokens\":", s->n_prompt);
        put_number(&out, ",\"cached_tokens\":", s->n_cached);
        put_number(&out, ",\"output_tokens\":", s->n_output);
        put_number(&out, ",\"first_token_us\":", s->first_token_us);
    }
    yard_api_put(&out, "}\n");
    if (!out.no_memory)
        fwrite(out.bytes, 1, out.n_bytes, http->config.access_log);
    yard_api_out_release(&out);
}
