/* Bodies through the whole front: what is taken goes to an engine that answers with bytes of the
 * input as tokens, and every request must end. The first byte is the route. */
#include "serve/fake_link.h"

typedef struct client {
    bool ended;
} client;

static void on_answer(void *ctx, const yard_front_summary *summary, const yard_api_out *body,
                      uint32_t retry_after_s)
{
    (void)retry_after_s;
    if (((client *)ctx)->ended || summary->http_status < 200 || body->n_bytes == 0 ||
        !yard_utf8_valid(body->bytes, body->n_bytes, NULL))
        abort();
    ((client *)ctx)->ended = true;
}

static bool on_events(void *ctx, const yard_front_summary *summary, const yard_api_out *events)
{
    if (((client *)ctx)->ended || !yard_utf8_valid(events->bytes, events->n_bytes, NULL))
        abort();
    ((client *)ctx)->ended = summary != NULL;
    return true;
}

static const yard_front_sink sink = { on_answer, on_events };

static yard_front *open_front(void)
{
    static const char *const address = "a:1";
    yard_front_config config = YARD_FRONT_CONFIG_INIT;
    yard_front *front = NULL;
    yard_error err = { 0 };

    config.model_dir = "models/demo";
    config.model = "demo";
    config.engine = &address;
    config.n_engines = 1;
    config.link = &fake_ops;
    config.long_body_bytes = SIZE_MAX; /* all in this thread */
    if (yard_front_create(&front, &config, &err) != YARD_OK)
        abort();
    fake_say_up(0, 1, 128, 4096);
    yard_front_run(front, 1);
    return front;
}

/* Two events for each choice; the second is its end. */
static void answer(const uint8_t *data, size_t n_bytes)
{
    int32_t token[8] = { 0 };
    const uint32_t n = n_bytes < 8 ? (uint32_t)n_bytes : 8;

    for (uint32_t i = 0; i < n; i++)
        token[i] = data[i] * 16 + (int32_t)i; /* anywhere in the vocabulary */
    for (uint32_t i = 0; i < fake_links[0]->n_sent; i++) {
        const yard_request *r = &fake_links[0]->sent[i].request;

        for (uint32_t k = 0; k < 2 * r->n_choices; k++) {
            const bool ends = k >= r->n_choices;
            yard_link_tokens *t = fake_say_tokens(0, i, k % r->n_choices, token, n,
                                                  ends ? YARD_FINISH_LENGTH : YARD_RUNNING);

            if (r->n_logprobs > 0)
                fake_add_logprobs(t, r->n_logprobs < FAKE_MAX_LOGPROBS ? r->n_logprobs
                                                                       : FAKE_MAX_LOGPROBS);
            t->of_prompt = r->prompt_logprobs && !ends;
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static yard_front *front;
    client c = { 0 };
    char *body;

    if (!front)
        front = open_front();
    if (n_bytes == 0)
        return 0;
    body = malloc(n_bytes);
    memcpy(body, data + 1, n_bytes - 1);
    yard_front_submit(front, 1, (yard_front_route)(data[0] % 4), body, n_bytes - 1, "id", &sink,
                      &c);
    answer(data, n_bytes);
    yard_front_run(front, 1);
    for (uint32_t i = 0; i < fake_links[0]->n_sent; i++)
        free(fake_links[0]->sent[i].prompt);
    fake_links[0]->n_sent = 0;
    if (!c.ended)
        abort();
    return 0;
}
