/* The messages of proto/engine.proto to and from plain structs: what crosses the wire is known here
 * and nowhere else. Decoding trusts nothing: a message that is none, or that takes more memory than
 * its reader may have, is refused. Private to the serve room. */
#ifndef YARD_SERVE_ENGINE_MESSAGES_H
#define YARD_SERVE_ENGINE_MESSAGES_H

#include "serve/engine_server.h"

/* Methods, in the order of yard_engine_methods. */
typedef enum yard_engine_method {
    YARD_METHOD_GENERATE,
    YARD_METHOD_ABORT,
    YARD_METHOD_WATCH,
    YARD_METHOD_HEALTH,
    YARD_METHOD_COUNT
} yard_engine_method;

extern const char *const yard_engine_methods[YARD_METHOD_COUNT];

/* encoding */

/* An encoded message; all zero is empty. Reused from one message to the next. */
typedef struct yard_bytes {
    uint8_t *data; /* [n] */
    size_t n, capacity;
} yard_bytes;

void yard_bytes_release(yard_bytes *bytes);

/* Of GenerateRequest. All encoders: false when there is no memory. */
bool yard_encode_request(yard_bytes *out, uint32_t instance, uint64_t tag,
                         const yard_request *request);
bool yard_encode_abort(yard_bytes *out, uint64_t tag, uint32_t choice /* or YARD_ALL_CHOICES */);
bool yard_encode_watch(yard_bytes *out, uint64_t stream);
bool yard_encode_abort_reply(yard_bytes *out, bool found);

/* Outputs that wait for the next Tokens message; all zero is none. */
typedef struct yard_outputs {
    struct yard_output *items; /* [n] */
    int32_t *tokens;           /* [n_tokens] of all */
    yard_token_logprob *logprobs;
    size_t n, max, n_tokens, max_tokens, n_logprobs, max_logprobs;
    size_t n_bytes; /* about what the message will have */
} yard_outputs;

bool yard_outputs_add(yard_outputs *outputs, const yard_link_tokens *output); /* copies */
void yard_outputs_clear(yard_outputs *outputs);
void yard_outputs_release(yard_outputs *outputs);
/* The first message of a stream has its number and nothing else; the others have outputs
 * [first, end). */
bool yard_encode_stream(yard_bytes *out, uint64_t stream);
bool yard_encode_tokens(yard_bytes *out, const yard_outputs *outputs, size_t first, size_t end);
/* The end of the part of the outputs from first on that has about max_bytes. */
size_t yard_outputs_part(const yard_outputs *outputs, size_t first, size_t max_bytes);

typedef struct yard_health {
    bool ready, progressing;
    uint64_t step_age_us;
    uint32_t generation, n_ranks, n_ranks_alive;
} yard_health;

bool yard_encode_health(yard_bytes *out, const yard_health *health);

/* What is new of an instance, which may come several times in a message. */
typedef struct yard_instance_state {
    uint32_t instance;
    const yard_engine_report *report; /* NULL: none */
    yard_page_change change;          /* of pages; with n_pages 0 nothing, but for UNKNOWN */
    const yard_page_hash *page;       /* [n_pages] */
    uint32_t n_pages;
} yard_instance_state;

/* pod: NULL when it is as it was. */
bool yard_encode_state(yard_bytes *out, const yard_pod_state *pod,
                       const yard_instance_state *instances, uint32_t n_instances);

/* decoding */

/* The memory of one decoded message; what a decoder gives points into it until the next one. */
typedef struct yard_reader yard_reader;

/* max_bytes: that a decoded message may take. Errors: YARD_ENOMEM. */
yard_status yard_reader_create(yard_reader **out, size_t max_bytes, yard_error *err);
void yard_reader_destroy(yard_reader *reader); /* NULL is fine */

typedef struct yard_request_message {
    bool is_abort;
    uint64_t tag;
    uint32_t choice;      /* of an abort, or YARD_ALL_CHOICES */
    uint32_t instance;    /* of a request */
    yard_request request; /* values are as sent: the engine checks them */
} yard_request_message;

/* All decoders: false when the bytes are no such message. */
bool yard_decode_request(yard_reader *reader, const uint8_t *bytes, size_t n_bytes,
                         yard_request_message *out);
bool yard_decode_abort(yard_reader *reader, const uint8_t *bytes, size_t n_bytes, uint64_t *stream,
                       uint64_t *tag);
bool yard_decode_watch(yard_reader *reader, const uint8_t *bytes, size_t n_bytes, uint64_t *stream);
bool yard_decode_health(yard_reader *reader, const uint8_t *bytes, size_t n_bytes,
                        yard_health *out);

/* Tokens: *stream is 0 but for the first message; then its outputs one by one. */
bool yard_decode_tokens(yard_reader *reader, const uint8_t *bytes, size_t n_bytes,
                        uint64_t *stream);
bool yard_reader_next_output(yard_reader *reader, yard_link_tokens *out);

/* State: *has_pod tells whether *pod was set; then events one by one: REPORT and PAGES_*. */
bool yard_decode_state(yard_reader *reader, const uint8_t *bytes, size_t n_bytes, bool *has_pod,
                       yard_pod_state *pod);
bool yard_reader_next_event(yard_reader *reader, yard_link_event *out);

#endif
