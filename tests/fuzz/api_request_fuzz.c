/* Any text as the body of each request: refused with a message and a status, or a plain request. */
#include <stdlib.h>

#include "serve/api_request.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static size_t touch(const yard_api_request *r)
{
    size_t sum = r->model ? strlen(r->model) : 0;

    for (uint32_t i = 0; i < r->n_stop; i++)
        sum += strlen(r->stop[i]);
    for (uint32_t i = 0; i < r->n_stop_token; i++)
        sum += (size_t)r->stop_token[i];
    for (uint32_t i = 0; i < r->n_bias; i++)
        sum += (size_t)r->bias[i].token;
    for (uint32_t i = 0; i < r->n_prompts; i++) {
        if (!r->prompt[i].text == !r->prompt[i].ids)
            abort();
        sum += r->prompt[i].text ? strlen(r->prompt[i].text) : 0;
        for (uint32_t k = 0; k < r->prompt[i].n_ids; k++)
            sum += (size_t)r->prompt[i].ids[k];
    }
    if (!r->messages == !r->prompt || (r->messages && strlen(r->messages) != r->n_messages_bytes))
        abort();
    return sum;
}

static void check(yard_status st, yard_api_request *r, const yard_api_error *err)
{
    if (st == YARD_OK) {
        if (touch(r) == SIZE_MAX || err->message[0])
            abort();
    } else if (!err->message[0] || err->http_status < 400 || !err->type ||
               !yard_utf8_valid(err->param, strlen(err->param), NULL)) {
        abort();
    }
    yard_api_request_release(r);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    const yard_api_limits limits = YARD_API_LIMITS_INIT;
    const char *body = (const char *)data;
    yard_api_request r = { 0 };
    yard_api_error err = { 0 };

    check(yard_api_parse_chat(&r, body, n_bytes, &limits, &err), &r, &err);
    err = (yard_api_error){ 0 };
    check(yard_api_parse_completion(&r, body, n_bytes, &limits, &err), &r, &err);
    err = (yard_api_error){ 0 };
    check(yard_api_parse_tokenize(&r, body, n_bytes, &err), &r, &err);
    err = (yard_api_error){ 0 };
    check(yard_api_parse_detokenize(&r, body, n_bytes, &err), &r, &err);
    return 0;
}
