/* Engines for tests of the front: a link without RPC. The test says what the pod says. */
#ifndef TESTS_SERVE_FAKE_LINK_H
#define TESTS_SERVE_FAKE_LINK_H

#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "serve/front.h"

enum { FAKE_MAX_EVENTS = 4096, FAKE_MAX_SENT = 1024, FAKE_MAX_LINKS = 4, FAKE_MAX_LOGPROBS = 4 };

typedef struct fake_sent {
    uint64_t tag;
    uint32_t instance;
    yard_request request; /* its numbers; prompt is a copy */
    int32_t *prompt;
    bool aborted;
    uint32_t aborted_choice;
} fake_sent;

typedef struct fake_event {
    yard_link_event event;
    int32_t token[8];
    yard_token_logprob logprob[8 * FAKE_MAX_LOGPROBS];
} fake_event;

struct yard_link {
    int fd;
    fake_event event[FAKE_MAX_EVENTS];
    uint32_t first, n_events; /* [first..n_events) are to come */
    fake_sent sent[FAKE_MAX_SENT];
    uint32_t n_sent;
};

static yard_link *fake_links[FAKE_MAX_LINKS];
static uint32_t n_fake_links;

static yard_status fake_open(yard_link **out, const yard_link_config *config, yard_error *err)
{
    yard_link *link = calloc(1, sizeof(*link));

    (void)config;
    if (!link || n_fake_links == FAKE_MAX_LINKS)
        return yard_fail(err, YARD_ENOMEM, "fake link");
    link->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    fake_links[n_fake_links++] = link;
    *out = link;
    return YARD_OK;
}

static void fake_close(yard_link *link)
{
    for (uint32_t i = 0; i < link->n_sent; i++)
        free(link->sent[i].prompt);
    close(link->fd);
    free(link);
    n_fake_links--;
}

static int fake_fd(const yard_link *link)
{
    return link->fd;
}

static bool fake_next(yard_link *link, yard_link_event *out)
{
    uint64_t count;
    fake_event *e;

    if (link->first == link->n_events) {
        link->first = link->n_events = 0;
        if (read(link->fd, &count, sizeof(count)) < 0)
            return false;
        return false;
    }
    e = &link->event[link->first++];
    *out = e->event;
    out->tokens.token = e->token;
    if (out->tokens.logprob)
        out->tokens.logprob = e->logprob;
    return true;
}

static bool fake_generate(yard_link *link, uint32_t instance, uint64_t tag,
                          const yard_request *request)
{
    fake_sent *s = &link->sent[link->n_sent];

    if (link->n_sent == FAKE_MAX_SENT)
        abort();
    *s = (fake_sent){ .tag = tag, .instance = instance, .request = *request };
    s->prompt = malloc(request->n_prompt * sizeof(*s->prompt));
    if (!s->prompt)
        return false;
    link->n_sent++;
    memcpy(s->prompt, request->prompt, request->n_prompt * sizeof(*s->prompt));
    return true;
}

static void fake_abort(yard_link *link, uint64_t tag, uint32_t choice)
{
    for (uint32_t i = 0; i < link->n_sent; i++)
        if (link->sent[i].tag == tag) {
            link->sent[i].aborted = true;
            link->sent[i].aborted_choice = choice;
        }
}

static const yard_link_ops fake_ops = { .open = fake_open,
                                        .close = fake_close,
                                        .fd = fake_fd,
                                        .next = fake_next,
                                        .generate = fake_generate,
                                        .abort = fake_abort };

/* what pods say */

static yard_link_event *fake_say(uint32_t link, yard_link_event_kind kind)
{
    yard_link *l = fake_links[link];
    const uint64_t one = 1;

    if (l->n_events == FAKE_MAX_EVENTS)
        abort();
    l->event[l->n_events] = (fake_event){ .event = { .kind = kind } };
    if (write(l->fd, &one, sizeof(one)) < 0)
        abort();
    return &l->event[l->n_events++].event;
}

static inline void fake_say_up(uint32_t link, uint32_t n_instances, uint32_t max_requests,
                               uint32_t context)
{
    fake_say(link, YARD_LINK_UP)->pod = (yard_link_pod){ .n_instances = n_instances,
                                                         .max_requests = max_requests,
                                                         .context = context,
                                                         .vocab = 4096,
                                                         .page_root = { { 1, 2 } },
                                                         .model = "fake" };
}

static inline void fake_say_down(uint32_t link)
{
    fake_say(link, YARD_LINK_DOWN)->message = "the test says so";
}

/* Of the request that was sent as number sent. */
static inline yard_link_tokens *fake_say_tokens(uint32_t link, uint32_t sent, uint32_t choice,
                                                const int32_t *token, uint32_t n_tokens,
                                                yard_finish finish)
{
    yard_link *l = fake_links[link];
    yard_link_event *e = fake_say(link, YARD_LINK_TOKENS);

    e->tokens = (yard_link_tokens){
        .tag = l->sent[sent].tag, .choice = choice, .n_tokens = n_tokens, .finish = finish
    };
    memcpy(((fake_event *)(void *)e)->token, token, n_tokens * sizeof(*token));
    return &e->tokens;
}

/* Gives each token of the event a log-probability and n - 1 alternatives. */
static inline void fake_add_logprobs(yard_link_tokens *t, uint32_t n)
{
    fake_event *e = (fake_event *)(void *)((char *)t - offsetof(yard_link_event, tokens));

    t->n_logprobs = n;
    t->logprob = e->logprob;
    for (uint32_t i = 0; i < t->n_tokens; i++)
        for (uint32_t k = 0; k < n; k++)
            e->logprob[i * n + k] =
                (yard_token_logprob){ .token = e->token[i] + (k > 1 ? (int32_t)k : 0),
                                      .logprob = -0.5f * (float)(i + k) };
}

#endif
