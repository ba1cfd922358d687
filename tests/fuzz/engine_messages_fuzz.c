/* Any bytes as each message of the engine RPC: refused, or structs whose every value can be read,
 * in bounded memory; and what is read is written again as the same. */
#include <stdlib.h>

#include "serve/engine_messages.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void need(bool condition)
{
    if (!condition)
        abort();
}

static size_t touch(const yard_request_message *m)
{
    const yard_request *r = &m->request;
    size_t sum = m->tag + m->choice;

    for (uint32_t i = 0; i < r->n_prompt; i++)
        sum += (size_t)r->prompt[i];
    for (uint32_t i = 0; i < r->n_bias; i++)
        sum += (size_t)r->bias[i].token + yard_bits_from_f32(r->bias[i].value);
    for (uint32_t i = 0; i < r->n_stop_token; i++)
        sum += (size_t)r->stop_token[i];
    return sum;
}

static void check_request(yard_reader *reader, const uint8_t *data, size_t n_bytes)
{
    yard_request_message first, second;
    yard_bytes bytes = { 0 };
    size_t sum;

    if (!yard_decode_request(reader, data, n_bytes, &first))
        return;
    sum = touch(&first);
    need(first.is_abort ? yard_encode_abort(&bytes, first.tag, first.choice)
                        : yard_encode_request(&bytes, first.instance, first.tag, &first.request));
    need(yard_decode_request(reader, bytes.data, bytes.n, &second));
    need(touch(&second) == sum && second.is_abort == first.is_abort &&
         second.instance == first.instance &&
         second.request.max_new_tokens == first.request.max_new_tokens);
    yard_bytes_release(&bytes);
}

static void check_tokens(yard_reader *reader, const uint8_t *data, size_t n_bytes)
{
    yard_outputs outputs = { 0 };
    yard_bytes bytes = { 0 };
    yard_link_tokens t;
    uint64_t stream;
    size_t n = 0;

    if (!yard_decode_tokens(reader, data, n_bytes, &stream))
        return;
    while (yard_reader_next_output(reader, &t)) {
        need((unsigned int)t.finish <= YARD_FINISH_ERROR);
        need(!t.message || strlen(t.message) < n_bytes);
        need(yard_outputs_add(&outputs, &t));
        n++;
    }
    need(outputs.n == n && yard_outputs_part(&outputs, 0, SIZE_MAX) == n);
    need(yard_encode_tokens(&bytes, &outputs, 0, n));
    need(yard_decode_tokens(reader, bytes.data, bytes.n, &stream) && stream == 0);
    while (yard_reader_next_output(reader, &t))
        n--;
    need(n == 0);
    yard_outputs_release(&outputs);
    yard_bytes_release(&bytes);
}

static void check_state(yard_reader *reader, const uint8_t *data, size_t n_bytes)
{
    yard_pod_state pod = { 0 };
    yard_link_event e;
    bool has_pod;
    uint64_t sum = 0;

    if (!yard_decode_state(reader, data, n_bytes, &has_pod, &pod))
        return;
    need(memchr(pod.pod.model, '\0', sizeof(pod.pod.model)) != NULL);
    while (yard_reader_next_event(reader, &e)) {
        need(e.kind == YARD_LINK_REPORT || e.kind == YARD_LINK_PAGES_ADDED ||
             e.kind == YARD_LINK_PAGES_EVICTED || e.kind == YARD_LINK_PAGES_UNKNOWN);
        for (uint32_t i = 0; i < e.n_pages; i++)
            sum += e.page[i].word[0] ^ e.page[i].word[1];
    }
    need(sum != 1 || n_bytes > 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    yard_reader *reader = NULL;
    yard_health health;
    uint64_t stream, tag;

    need(yard_reader_create(&reader, 64 << 20, NULL) == YARD_OK);
    check_request(reader, data, n_bytes);
    check_tokens(reader, data, n_bytes);
    check_state(reader, data, n_bytes);
    yard_decode_abort(reader, data, n_bytes, &stream, &tag);
    yard_decode_watch(reader, data, n_bytes, &stream);
    yard_decode_health(reader, data, n_bytes, &health);
    yard_reader_destroy(reader);
    return 0;
}
