/* Sampling on the GPU: the ids that the CPU draws, and the logits as it leaves them. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "both_gpu_test.h"

enum { MAX_LIST = 40, LISTS = 4, KINDS = 9 };

/* Rows and the lists they point to, on both sides. */
typedef struct sample_twin {
    rows_twin logits;
    twin lists; /* [n_rows, LISTS, MAX_LIST] words: prompt, output, bias tokens, bias values */
    twin token, finite;
    yard_sample_row *host;
    yard_sample_row *device; /* device memory */
} sample_twin;

static void call_sample(const yard_ops *ops, yard_stream s, const void *args)
{
    ops->sample(s, args);
}

static float normal(both *t)
{
    float sum = 0;

    for (int i = 0; i < 6; i++)
        sum += (float)both_below(t, 1 << 20) * 0x1p-19f - 1;
    return sum * 0.7f;
}

/* Flat, ordinary, steep, tied, all equal, with what is no number, nothing but that, one such value
 * alone, and so flat that many candidates share a bin. */
static void fill_logits(both *t, uint32_t kind, float *x, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        switch (kind) {
        case 0: /* flat: as rows_create left it */
            break;
        case 1:
            x[i] = normal(t) * 2;
            break;
        case 2:
            x[i] = normal(t) * 9;
            break;
        case 3:
            x[i] = rintf(normal(t) * 3);
            break;
        case 4:
            x[i] = 1.5f;
            break;
        case 5:
            x[i] = both_below(t, 3) == 0 ? -INFINITY : both_below(t, 50) == 0 ? NAN : normal(t);
            if (i == n / 2)
                x[i] = INFINITY;
            break;
        case 6:
            x[i] = both_below(t, 2) ? -INFINITY : NAN;
            break;
        case 7:
            x[i] = normal(t) * 4;
            break;
        default:
            x[i] = normal(t) * 0.001f;
        }
    if (kind == 7 && both_below(t, 4) > 0) {
        static const float odd[] = { INFINITY, -INFINITY, NAN };
        x[both_below(t, n)] = odd[both_below(t, 3)];
    }
}

static yard_sample_params random_params(both *t, uint32_t variant)
{
    static const float temperatures[] = { 0, 1, 0.7f, 1.5f, 0.01f };
    static const float top_p[] = { 1, 0.9f, 0.95f, 0.1f, 0 };
    static const float min_p[] = { 0, 0, 0.05f, 1 };
    static const int32_t top_k[] = { 0, 0, 50, 1, 2000 };

    return (yard_sample_params){
        .temperature = temperatures[variant % 5],
        .top_p = top_p[both_below(t, 5)],
        .min_p = min_p[both_below(t, 4)],
        .top_k = top_k[both_below(t, 5)],
        .repetition_penalty = both_below(t, 3) ? 1 : 1.3f,
        .presence_penalty = both_below(t, 4) ? 0 : 0.5f,
        .frequency_penalty = both_below(t, 4) ? 0 : 0.25f,
        .seed = gpu_test_random(t->b.t),
    };
}

static void fill_row(both *t, sample_twin *m, uint32_t i, uint32_t n_vocab, uint32_t variant,
                     yard_sample_row *device)
{
    int32_t *host_list = (int32_t *)m->lists.host + (size_t)i * LISTS * MAX_LIST;
    const int32_t *device_list = (const int32_t *)m->lists.device + (size_t)i * LISTS * MAX_LIST;
    yard_sample_row *row = &m->host[i];

    for (int k = 0; k < 3 * MAX_LIST; k++) /* few different ones, so that many come twice */
        host_list[k] = (int32_t)(both_below(t, 2) ? both_below(t, n_vocab)
                                                  : both_below(t, n_vocab < 20 ? n_vocab : 20));
    for (int k = 0; k < MAX_LIST; k++)
        ((float *)host_list)[3 * MAX_LIST + k] = normal(t);
    *row = (yard_sample_row){ .params = random_params(t, variant),
                              .position = both_below(t, 5000),
                              .prompt = host_list,
                              .output = host_list + MAX_LIST,
                              .bias_token = host_list + 2 * MAX_LIST,
                              .bias_value = (const float *)host_list + 3 * MAX_LIST,
                              .n_prompt = both_below(t, MAX_LIST),
                              .n_output = both_below(t, MAX_LIST),
                              .n_bias = both_below(t, 3) ? 0 : both_below(t, MAX_LIST) };
    *device = *row;
    device->prompt = device_list;
    device->output = device_list + MAX_LIST;
    device->bias_token = device_list + 2 * MAX_LIST;
    device->bias_value = (const float *)device_list + 3 * MAX_LIST;
}

static bool sample_create(both *t, sample_twin *m, uint32_t n, uint32_t n_vocab, uint32_t variant)
{
    const bed *b = &t->b;
    yard_sample_row *rows = calloc(n + 1, sizeof(*rows));
    void *device = NULL;
    bool ok = rows && rows_create(b, &m->logits, YARD_F32, n + 1, n_vocab, n_vocab, true) &&
              twin_create(b, &m->lists, (size_t)(n + 1) * LISTS * MAX_LIST * sizeof(int32_t)) &&
              twin_create(b, &m->token, (n + 1) * sizeof(int32_t)) &&
              twin_create(b, &m->finite, n + 1) && both_set_count(t, n) &&
              b->ops->allocate(&device, b->s, (n + 1) * sizeof(*rows), NULL) == YARD_OK;

    m->device = device;
    m->host = calloc(n + 1, sizeof(*m->host));
    ok = ok && m->host;
    for (uint32_t i = 0; ok && i < n; i++) {
        fill_logits(t, (variant + i) % KINDS, (float *)m->logits.data.host + (size_t)i * n_vocab,
                    n_vocab);
        fill_row(t, m, i, n_vocab, variant / KINDS + i / 3, &rows[i]);
    }
    ok = ok && twin_upload(b, &m->logits.data) && twin_upload(b, &m->lists) &&
         b->ops->upload(b->s, m->device, rows, (n + 1) * sizeof(*rows), NULL) == YARD_OK;
    free(rows);
    return ok;
}

static void sample_case(both *t, uint32_t n, uint32_t n_vocab, uint32_t variant)
{
    const bed *b = &t->b;
    const uint64_t seed = b->t->seed;
    sample_twin m = { 0 };
    const bool ok = sample_create(t, &m, n, n_vocab, variant);
    const yard_sample_args host = { .n_rows = t->n_rows.host,
                                    .n_vocab = n_vocab,
                                    .logits = m.logits.data.host,
                                    .rows = m.host,
                                    .token = m.token.host,
                                    .finite = m.finite.host };
    yard_sample_args device = host;

    device.n_rows = t->n_rows.device;
    device.logits = m.logits.data.device;
    device.rows = m.device;
    device.token = m.token.device;
    device.finite = m.finite.device;
    if (ok)
        both_run(t, call_sample, &host, &device);
    gpu_test_case(b->t, ok && both_same(t, &m.token), "sample: %u rows of %u, state 0x%llx: ids", n,
                  n_vocab, (unsigned long long)seed);
    gpu_test_case(b->t, ok && both_same(t, &m.finite), "sample: %u rows of %u: finite", n, n_vocab);
    gpu_test_case(b->t, ok && both_same_floats(t, &m.logits.data), "sample: %u rows of %u: logits",
                  n, n_vocab);
    rows_destroy(b, &m.logits);
    twin_destroy(b, &m.lists);
    twin_destroy(b, &m.token);
    twin_destroy(b, &m.finite);
    b->ops->release(b->s, m.device);
    free(m.host);
}

void gpu_test_sample(gpu_test *test)
{
    static const uint32_t vocabs[] = { 33, 1, 1000, 3584, 32000, 102400, 129280, 163840 };
    static const uint32_t counts[] = { 0, 1, 2, 7, 64, 129 };
    static const uint32_t many[] = { 300, 600 }; /* the kernels run twice for the second */
    both t;

    if (!both_open(&t, test))
        return;
    for (int v = 0; v < (test->quick ? 4 : 8); v++)
        for (uint32_t c = 0; c < 6; c++)
            for (uint32_t variant = 0; variant < (v < 4 ? 5 * KINDS : c < 4 ? KINDS : 1); variant++)
                sample_case(&t, counts[c], vocabs[v], variant + c);
    for (uint32_t v = 0; v < 4; v++)
        for (uint32_t c = 0; c < 2; c++)
            sample_case(&t, many[c], vocabs[v], v + c);
    both_close(&t);
}
