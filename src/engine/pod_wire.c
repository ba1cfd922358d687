#include "engine/pod_wire.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

typedef struct frame_head {
    uint32_t kind, reserved;
    uint64_t n_bytes;
} frame_head;

enum { READ_BYTES = 1 << 16, FRAME_ALIGN = 8 };

/* What a frame takes in the stream: payloads stay aligned for the structs in them. */
static size_t padded(size_t n_bytes)
{
    return yard_align_up(n_bytes, FRAME_ALIGN);
}

void yard_wire_open(yard_wire *w, int fd)
{
    *w = (yard_wire){ .fd = fd };
}

void yard_wire_close(yard_wire *w)
{
    if (w->fd >= 0)
        close(w->fd);
    free(w->in);
    free(w->out);
    *w = (yard_wire){ .fd = -1 };
}

/* Room for n more bytes behind *end; what lies before *at is given up first. */
static bool make_room(uint8_t **data, size_t *at, size_t *end, size_t *capacity, size_t n)
{
    size_t wanted;
    uint8_t *larger;

    if (*at > 0) {
        memmove(*data, *data + *at, *end - *at);
        *end -= *at;
        *at = 0;
    }
    if (*end + n <= *capacity)
        return true;
    wanted = 2 * (*end + n);
    larger = realloc(*data, wanted);
    if (!larger)
        return false;
    *data = larger;
    *capacity = wanted;
    return true;
}

void yard_wire_flush(yard_wire *w)
{
    while (w->out_at < w->n_out && !w->ended) {
        const ssize_t n = send(w->fd, w->out + w->out_at, w->n_out - w->out_at, MSG_NOSIGNAL);

        if (n > 0)
            w->out_at += (size_t)n;
        else if (n < 0 && errno == EAGAIN)
            return;
        else if (n < 0 && errno != EINTR)
            w->ended = true;
    }
}

bool yard_wire_has_output(const yard_wire *w)
{
    return w->out_at < w->n_out && !w->ended;
}

bool yard_wire_send(yard_wire *w, yard_frame_kind kind, const void *head, size_t n_head,
                    const void *tail, size_t n_tail)
{
    const frame_head frame = { .kind = (uint32_t)kind, .n_bytes = n_head + n_tail };

    if (w->ended || !make_room(&w->out, &w->out_at, &w->n_out, &w->out_capacity,
                               sizeof(frame) + padded(n_head + n_tail)))
        return false;
    memcpy(w->out + w->n_out, &frame, sizeof(frame));
    w->n_out += sizeof(frame);
    if (n_head)
        memcpy(w->out + w->n_out, head, n_head);
    w->n_out += n_head;
    if (n_tail)
        memcpy(w->out + w->n_out, tail, n_tail);
    w->n_out += n_tail;
    memset(w->out + w->n_out, 0, padded(n_head + n_tail) - n_head - n_tail);
    w->n_out += padded(n_head + n_tail) - n_head - n_tail;
    yard_wire_flush(w);
    return true;
}

static bool take_frame(yard_wire *w, yard_frame *out)
{
    frame_head frame;

    if (w->n_in - w->in_at < sizeof(frame))
        return false;
    memcpy(&frame, w->in + w->in_at, sizeof(frame));
    if (w->n_in - w->in_at - sizeof(frame) < padded(frame.n_bytes))
        return false;
    out->kind = (yard_frame_kind)frame.kind;
    out->data = w->in + w->in_at + sizeof(frame);
    out->n_bytes = frame.n_bytes;
    w->in_at += sizeof(frame) + padded(frame.n_bytes);
    return true;
}

bool yard_wire_receive(yard_wire *w, yard_frame *out)
{
    while (!take_frame(w, out)) {
        ssize_t n;

        if (w->ended || !make_room(&w->in, &w->in_at, &w->n_in, &w->in_capacity, READ_BYTES))
            return false;
        n = recv(w->fd, w->in + w->n_in, w->in_capacity - w->n_in, 0);
        if (n > 0)
            w->n_in += (size_t)n;
        else if (n == 0 || (errno != EAGAIN && errno != EINTR))
            w->ended = true;
        else if (errno == EAGAIN)
            return false;
    }
    return true;
}

bool yard_event_encode(uint8_t **data, size_t *n_bytes, size_t *capacity, const yard_event *event)
{
    const size_t n_tail = event->n_logprobs * sizeof(*event->logprob);
    size_t none = 0;

    if (!make_room(data, &none, n_bytes, capacity, sizeof(*event) + n_tail))
        return false;
    memcpy(*data + *n_bytes, event, sizeof(*event));
    if (n_tail)
        memcpy(*data + *n_bytes + sizeof(*event), event->logprob, n_tail);
    *n_bytes += sizeof(*event) + n_tail;
    return true;
}

bool yard_event_decode(const void *data, size_t n_bytes, size_t *at, yard_event *event)
{
    if (n_bytes - *at < sizeof(*event))
        return false;
    memcpy(event, (const uint8_t *)data + *at, sizeof(*event));
    *at += sizeof(*event);
    if ((n_bytes - *at) / sizeof(*event->logprob) < event->n_logprobs)
        return false;
    event->logprob = (const yard_token_logprob *)(const void *)((const uint8_t *)data + *at);
    *at += event->n_logprobs * sizeof(*event->logprob);
    return true;
}

/* Behind it: prompt, bias, stop tokens. */
typedef struct request_head {
    uint64_t id;
    yard_request request; /* its pointers mean nothing */
} request_head;

static size_t request_bytes(const yard_request *r)
{
    return sizeof(request_head) + r->n_prompt * sizeof(*r->prompt) + r->n_bias * sizeof(*r->bias) +
           r->n_stop_token * sizeof(*r->stop_token);
}

static uint8_t *append(uint8_t *at, const void *data, size_t n_bytes)
{
    if (n_bytes)
        memcpy(at, data, n_bytes);
    return at + n_bytes;
}

void *yard_request_encode(uint64_t id, const yard_request *r, size_t *n_bytes)
{
    const request_head head = { .id = id, .request = *r };
    uint8_t *data, *at;

    *n_bytes = request_bytes(r);
    data = malloc(*n_bytes);
    if (!data)
        return NULL;
    at = append(data, &head, sizeof(head));
    at = append(at, r->prompt, r->n_prompt * sizeof(*r->prompt));
    at = append(at, r->bias, r->n_bias * sizeof(*r->bias));
    append(at, r->stop_token, r->n_stop_token * sizeof(*r->stop_token));
    return data;
}

bool yard_request_decode(const void *data, size_t n_bytes, uint64_t *id, yard_request *r)
{
    request_head head;
    const uint8_t *at = data;

    if (n_bytes < sizeof(head))
        return false;
    memcpy(&head, data, sizeof(head));
    if (request_bytes(&head.request) != n_bytes)
        return false;
    *id = head.id;
    *r = head.request;
    at += sizeof(head);
    r->prompt = (const int32_t *)(const void *)at;
    at += r->n_prompt * sizeof(*r->prompt);
    r->bias = (const yard_logit_bias *)(const void *)at;
    at += r->n_bias * sizeof(*r->bias);
    r->stop_token = (const int32_t *)(const void *)at;
    return true;
}
