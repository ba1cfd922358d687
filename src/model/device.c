/* What crosses between the host's memory and the device's: the inputs of a step, logits that the
 * host reads, what sampling reads and tells. Where the two are one, nothing is copied. */
#include <stdlib.h>

#include "model/forward_impl.h"

yard_status yard_mirror_open(const yard_model *m, yard_mirror *mirror, size_t n_bytes,
                             yard_error *err)
{
    void *device = NULL;
    yard_status st = m->ops->allocate(&device, m->stream, n_bytes, err);

    if (st != YARD_OK)
        return st;
    mirror->device = device;
    mirror->n_bytes = n_bytes;
    mirror->host = m->ops->in_host_memory ? device : yard_alloc(n_bytes);
    if (!mirror->host) {
        yard_mirror_close(m, mirror);
        return yard_fail(err, YARD_ENOMEM, "model: %zu bytes of inputs", n_bytes);
    }
    if (m->ops->in_host_memory)
        memset(device, 0, n_bytes);
    return YARD_OK;
}

void yard_mirror_close(const yard_model *m, yard_mirror *mirror)
{
    if (mirror->host != mirror->device)
        free(mirror->host);
    m->ops->release(m->stream, mirror->device);
    *mirror = (yard_mirror){ 0 };
}

yard_status yard_mirror_upload(const yard_model *m, const yard_mirror *mirror, size_t first,
                               size_t n_bytes, yard_error *err)
{
    if (m->ops->in_host_memory)
        return YARD_OK;
    return m->ops->upload(m->stream, mirror->device + first, mirror->host + first, n_bytes, err);
}

uint32_t yard_model_bound_rows(uint32_t n_rows, uint32_t max_rows)
{
    uint32_t bound = 1;

    while (bound < n_rows)
        bound *= 2;
    return bound < max_rows ? bound : max_rows;
}

/* What kernels are taken by. With several ranks all take the same, for what one sends another
 * receives: the most that any of them has. */
static uint32_t rows_to_expect(const yard_model *m, int32_t n_tokens)
{
    return m->ep ? m->step.max_rows : (uint32_t)n_tokens;
}

/* A rank without rows makes the calls of one that generates, so that its pass is recorded too. */
static bool goes_along(const yard_model *m, int32_t n_tokens)
{
    return m->ep && n_tokens == 0 && !m->ops->in_host_memory;
}

/* Of the page table, only rows up to the last one that the step reads. */
yard_status yard_model_bring_rows(yard_model *m, int32_t n_tokens, yard_error *err)
{
    const size_t first = (size_t)((uint8_t *)m->count - m->inputs.host);
    size_t end = m->page_table_at;
    int32_t n_seqs = 0;

    if (m->ep && (uint32_t)n_tokens > m->step.max_rows)
        return yard_fail(err, YARD_EINVAL, "step: want at most the %u rows of all ranks, got %d",
                         m->step.max_rows, n_tokens);
    m->all.n_tokens = n_tokens;
    m->all.max_rows = yard_model_bound_rows(rows_to_expect(m, n_tokens), m->options.max_tokens);
    m->count[0] = n_tokens;
    m->count[1] = (n_tokens + 1) / 2;
    m->count[2] = n_tokens / 2;
    m->all.has_prompts = n_tokens > 0 && memchr(m->step.absorbed, 0, (size_t)n_tokens);
    m->all.has_generated =
        (n_tokens > 0 && memchr(m->step.absorbed, 1, (size_t)n_tokens)) || goes_along(m, n_tokens);
    for (int32_t i = 0; i < n_tokens; i++)
        n_seqs = m->step.seq[i] >= n_seqs ? m->step.seq[i] + 1 : n_seqs;
    end += (size_t)n_seqs * m->options.max_pages_per_seq * sizeof(int32_t);
    return yard_mirror_upload(m, &m->inputs, first, end - first, err);
}

yard_status yard_model_read_logits(yard_model *m, uint32_t first, uint32_t n_rows,
                                   const float **out, yard_error *err)
{
    const size_t vocab = m->config.vocab, n_bytes = n_rows * vocab * sizeof(float);
    const float *from = m->logits + first * vocab;

    *out = from;
    if (m->ops->in_host_memory)
        return YARD_OK;
    if (!m->read_logits)
        m->read_logits = malloc(m->options.max_logits * vocab * sizeof(float));
    if (!m->read_logits)
        return yard_fail(err, YARD_ENOMEM, "model: no memory for %u rows of logits",
                         m->options.max_logits);
    *out = m->read_logits;
    return m->ops->download(m->stream, m->read_logits, from, n_bytes, err);
}

static bool reads_history(const yard_sample_params *p)
{
    return p->repetition_penalty != 1.0f || p->presence_penalty != 0.0f ||
           p->frequency_penalty != 0.0f;
}

/* A list [n] of four-byte values, copied; NULL while measuring. */
static void *take_list(const yard_mirror *mirror, yard_arena *arena, const void *list, uint32_t n)
{
    void *to = yard_arena_take(arena, n * sizeof(int32_t));

    if (!to)
        return NULL;
    if (n > 0)
        memcpy(to, list, n * sizeof(int32_t));
    return yard_mirrored(mirror, to);
}

/* What sampling reads, and behind it what it tells. Called twice: to measure, then to place. */
typedef struct sampling {
    yard_sample_row *rows;
    int32_t *token;
    uint8_t *finite;
    size_t told_at; /* bytes before token */
} sampling;

static sampling lay_out_sampling(const yard_mirror *mirror, yard_arena *arena,
                                 const yard_sample_row *rows, uint32_t n_rows)
{
    sampling s = { .rows = yard_arena_take(arena, n_rows * sizeof(*rows)) };

    for (uint32_t i = 0; i < n_rows; i++) {
        yard_sample_row r = rows[i];

        if (!reads_history(&r.params))
            r.n_prompt = r.n_output = 0;
        r.prompt = take_list(mirror, arena, r.prompt, r.n_prompt);
        r.output = take_list(mirror, arena, r.output, r.n_output);
        r.bias_token = take_list(mirror, arena, r.bias_token, r.n_bias);
        r.bias_value = take_list(mirror, arena, r.bias_value, r.n_bias);
        if (s.rows)
            s.rows[i] = r;
    }
    s.told_at = arena->used_bytes;
    s.token = yard_arena_take(arena, n_rows * sizeof(*s.token));
    s.finite = yard_arena_take(arena, n_rows);
    return s;
}

/* Room for n_bytes, and as much again, so that it seldom grows. */
static yard_status grow(const yard_model *m, yard_mirror *mirror, size_t n_bytes, yard_error *err)
{
    if (n_bytes <= mirror->n_bytes)
        return YARD_OK;
    yard_mirror_close(m, mirror);
    return yard_mirror_open(m, mirror, 2 * n_bytes, err);
}

static void run_sample(yard_model *m, const yard_sample_row *rows, int32_t *token, uint8_t *finite)
{
    m->ops->sample(m->stream, &(yard_sample_args){ .n_rows = yard_mirrored(&m->inputs, m->n_logits),
                                                   .n_vocab = m->config.vocab,
                                                   .logits = m->logits,
                                                   .rows = rows,
                                                   .token = token,
                                                   .finite = finite });
}

static yard_status sample_there(yard_model *m, const yard_sample_row *rows, uint32_t n_rows,
                                int32_t *token, uint8_t *finite, yard_error *err)
{
    yard_mirror *mirror = &m->sampling;
    yard_arena arena = { 0 };
    yard_status st;
    sampling s;

    lay_out_sampling(mirror, &arena, rows, n_rows);
    st = grow(m, mirror, arena.used_bytes, err);
    if (st != YARD_OK)
        return st;
    arena = (yard_arena){ .base = mirror->host, .size_bytes = mirror->n_bytes };
    s = lay_out_sampling(mirror, &arena, rows, n_rows);
    st = yard_mirror_upload(m, mirror, 0, s.told_at, err);
    if (st != YARD_OK)
        return st;
    run_sample(m, yard_mirrored(mirror, s.rows), yard_mirrored(mirror, s.token),
               yard_mirrored(mirror, s.finite));
    st = m->ops->download(m->stream, s.token, yard_mirrored(mirror, s.token),
                          arena.used_bytes - s.told_at, err);
    if (st == YARD_OK)
        st = m->ops->check(m->stream, err);
    if (st != YARD_OK)
        return st;
    memcpy(token, s.token, n_rows * sizeof(*token));
    memcpy(finite, s.finite, n_rows);
    return YARD_OK;
}

/* After yard_model_logits() of as many rows: their number is on the device. */
yard_status yard_model_sample(yard_model *m, const yard_sample_row *rows, uint32_t n_rows,
                              int32_t *token, uint8_t *finite, yard_error *err)
{
    if (!m->ops->in_host_memory)
        return sample_there(m, rows, n_rows, token, finite, err);
    run_sample(m, rows, token, finite);
    m->ops->synchronise(m->stream);
    return m->ops->check(m->stream, err);
}
