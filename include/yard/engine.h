/* The engine: one model, many requests at once, on this process's device or as one of many ranks.
 *
 *     yard_engine_create(&engine, &config, &err);
 *     yard_engine_submit(engine, &request, &id);
 *     while (!done) {
 *         yard_engine_step(engine);
 *         n = yard_engine_poll(engine, events, 64);
 *     }
 *     yard_engine_destroy(engine);
 *
 * The engine speaks token ids only; text belongs to the caller. It never prints: warnings and the
 * progress of loading go through callbacks. Threads: one caller at a time per engine, but for
 * yard_engine_wake(); engines are independent of each other.
 *
 * Several ranks (config.fabric): each rank of the group has an engine; tp consecutive ranks are an
 * instance and are given the same requests and aborts in the same order. Every rank keeps calling
 * yard_engine_step(), and yard_engine_wait() between steps: a step runs on all ranks together, also
 * on those that have no request. When one is lost, step and wait fail on all others until
 * yard_engine_rejoin(). */
#ifndef YARD_ENGINE_H
#define YARD_ENGINE_H

#include <stdbool.h>
#include <stddef.h>

#include <yard/fabric.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct yard_engine yard_engine;

/* How activations are computed. */
typedef enum yard_numeric_mode {
    YARD_QUANTISED, /* bf16 activations; FP8 projections get FP8 activations, one scale per 128 */
    YARD_EXACT      /* f32 activations, never quantised: for comparing implementations */
} yard_numeric_mode;

/* Where CPU threads run, within the affinity mask of the process. */
typedef enum yard_thread_place {
    YARD_THREADS_ANYWHERE,
    YARD_THREADS_ON_CPUS, /* each on a processor of its own; the calling thread too, from then on */
    YARD_THREADS_ON_NODES /* dealt evenly to the NUMA nodes, each to all processors of its own */
} yard_thread_place;

/* How the KV cache holds its values. */
typedef enum yard_kv_dtype {
    YARD_KV_BF16, /* f32 in exact mode */
    YARD_KV_FP8   /* latents as FP8 e4m3 with one scale per 128, rotated keys as bf16: 656 bytes a
                     token and layer of DeepSeek-V3, not 1,152. Models with latent attention, in
                     quantised mode */
} yard_kv_dtype;

/* Which pages of the KV cache a request may take over from others that began with the same tokens.
 */
typedef enum yard_prefix_cache {
    YARD_CACHE_ON, /* all. Those written while generating differ by rounding from the same tokens
                      as a prompt, so that a request which begins with another's answer may get
                      other bits than without */
    YARD_CACHE_STRICT, /* those of prompt tokens: results are equal to the bit with and without */
    YARD_CACHE_OFF     /* none */
} yard_prefix_cache;

typedef struct yard_engine_config {
    size_t size;           /* set by the initialiser */
    const char *model_dir; /* Hugging Face directory; required */
    yard_numeric_mode mode;
    uint32_t n_threads;  /* 0: all processors this process may use */
    uint32_t max_seqs;   /* requests running at once, 1 to 65,536; default 16 */
    uint32_t max_tokens; /* rows of one step, prompt chunks included, max_seqs to 1,048,576; default
                            512; more than the cache holds is of no use and cut */
    uint64_t kv_tokens;  /* KV cache capacity, at most 2^31 - 1, in pages of 64; 0: max_seqs
                            times max_positions of the model, or what 2 GB hold if that is less
                            (8,192 at least). Memory is taken as it is used */
    const char *cpu_variant; /* NULL: the best; "c" forces the plain definition */
    bool mtp;                /* load the MTP module too, if the checkpoint has one */
    void (*warn)(void *ctx, const char *line);                                    /* may be NULL */
    void (*progress)(void *ctx, const char *what, uint64_t done, uint64_t total); /* may be NULL */
    void *notify_ctx;
    yard_fabric *fabric;       /* of the ranks that run the model together, with the heap that
                                  yard_engine_budget_of() tells; borrowed until destroy or rejoin.
                                  NULL: this process alone */
    uint32_t tp;               /* ranks of an instance; equal on all ranks; 0: 1 */
    uint32_t prefill_budget;   /* prompt tokens of all instances in a step in which one of them
                                  decodes, equal on all ranks: bounds how late its token may be.
                                  0: max_tokens / 8, at least 64 */
    uint64_t timeout_us;       /* of every wait for another rank; 0: the fabric's */
    uint64_t start_timeout_us; /* of the first step's wait: the others may still read their weights;
                                  0: timeout_us */
    yard_thread_place pin;     /* where the CPU threads run */
    const char *cache_salt;    /* part of the names of cache pages: instances with other salts share
                                  none, also not by what they tell; NULL: "" */
    yard_prefix_cache prefix_cache;
    const char *device; /* "cpu", or "cuda": a GPU of compute capability 9.0 for each rank, that
                           which is current to the calling thread; weights and cache are in
                           its memory. Equal on all ranks; NULL: "cpu" */
    const char *cuda_variant; /* "fast", or "deterministic": a request's bits do not depend on the
                                 others of its step; NULL: "fast" */
    const char *cuda_choices; /* file of measured kernels for the products of "fast", which `bench
                                 roofline --write-choices` writes; NULL: the built-in one */
    yard_kv_dtype kv_dtype;   /* equal on all ranks */
} yard_engine_config;

#define YARD_ENGINE_CONFIG_INIT                                                                    \
    {                                                                                              \
        .size = sizeof(yard_engine_config), .max_seqs = 16, .max_tokens = 512                      \
    }

/* Memory that one rank takes. */
typedef struct yard_engine_budget {
    uint64_t weight_bytes;  /* mapped from the checkpoint, or in the device's memory */
    uint64_t heap_bytes;    /* symmetric heap: what the fabric is to be created with */
    uint64_t cache_bytes;   /* KV */
    uint64_t scratch_bytes; /* taken as it is used */
    uint32_t context;       /* not memory: tokens of prompt and output together that a request may
                               have, by the model and the cache */
    uint32_t vocab;         /* nor this: of the model */
    uint64_t device_heap_bytes; /* the fabric's device_heap_bytes; 0 on CPUs and with one rank */
} yard_engine_budget;

/* The budget of a rank of n_ranks, before anything is allocated; reads config.json only, so that a
 * layout that cannot be is refused at once. config.fabric is not read. Errors: YARD_EINVAL naming
 * what does not divide and the nearest layout that can be; as yard_engine_create(). */
YARD_API yard_status yard_engine_budget_of(const yard_engine_config *config, uint32_t n_ranks,
                                           uint32_t rank, yard_engine_budget *out, yard_error *err);

/* Loads the model and allocates everything. On success the caller owns *out. Errors: YARD_EINVAL,
 * YARD_EIO, YARD_EFORMAT, YARD_ENOTSUP, YARD_ENOMEM, YARD_EDEVICE (no GPU), each with one line in
 * err. */
YARD_API yard_status yard_engine_create(yard_engine **out, const yard_engine_config *config,
                                        yard_error *err);
/* Ends all requests without events. NULL is fine. */
YARD_API void yard_engine_destroy(yard_engine *engine);

typedef struct yard_logit_bias {
    int32_t token;
    float value; /* added to the logit */
} yard_logit_bias;

/* Sampling. Order: logit bias, penalties, temperature, top-k, top-p, min-p. Temperature 0 is
 * greedy: the largest logit after bias and penalties, the lowest id among equals. The random
 * number of a token depends on the seed and the token's position only. */
typedef struct yard_sampling {
    float temperature;        /* >= 0; default 0 */
    float top_p;              /* (0, 1]; default 1: off */
    float min_p;              /* [0, 1]; default 0: off */
    int32_t top_k;            /* >= 0; default 0: off */
    float repetition_penalty; /* > 0; default 1: off; counts prompt and output */
    float presence_penalty;   /* default 0: off; counts output */
    float frequency_penalty;  /* default 0: off; counts output */
    uint64_t seed;
} yard_sampling;

typedef struct yard_request {
    size_t size;           /* set by the initialiser */
    const int32_t *prompt; /* [n_prompt] ids, copied; required, n_prompt >= 1 */
    uint32_t n_prompt;
    uint32_t max_new_tokens; /* default: up to the model's context */
    yard_sampling sampling;
    const yard_logit_bias *bias; /* [n_bias], copied; NULL with n_bias 0 */
    uint32_t n_bias;
    bool ignore_eos;           /* go on after an end-of-sequence id */
    const int32_t *stop_token; /* [n_stop_token], copied: ids that end the sequence beside the
                                  model's, also with ignore_eos; NULL with n_stop_token 0 */
    uint32_t n_stop_token;
    uint32_t n_choices;   /* answers to the prompt, which is computed once; default 1, at most
                             max_seqs. The random numbers of a choice depend on the seed and its
                             number; choice 0 is the answer alone */
    uint32_t n_logprobs;  /* of each generated token: 0: none; 1: its own log-probability; 1 + k:
                             also  those of the k likeliest; at most YARD_MAX_LOGPROBS. Of the
                             model's  distribution, before bias, penalties and temperature */
    bool prompt_logprobs; /* the same of each prompt token, first: computes the whole prompt */
} yard_request;

enum { YARD_MAX_LOGPROBS = 21 };

#define YARD_REQUEST_INIT                                                                          \
    {                                                                                              \
        .size = sizeof(yard_request), .max_new_tokens = UINT32_MAX, .n_choices = 1, .sampling = {  \
            .top_p = 1.0f,                                                                         \
            .repetition_penalty = 1.0f                                                             \
        }                                                                                          \
    }

/* Queues a request; it starts when a later step has room for it. *id is never 0. Errors:
 * YARD_EINVAL (an id outside the vocabulary, a prompt longer than the context or the cache, a
 * sampling value out of range: the message names it), YARD_ENOMEM. Message: yard_engine_error(). */
YARD_API yard_status yard_engine_submit(yard_engine *engine, const yard_request *request,
                                        uint64_t *id);

/* Runs one step: at most max_tokens rows of decodes and prompt chunks. With no work it returns at
 * once. On return every event of the step can be polled. Requests and aborts that came since the
 * last call may wait for the next step when there are several ranks. Errors: YARD_ENOMEM; nothing
 * is lost, the same call can succeed later. YARD_EPEER, YARD_ETIMEDOUT: a rank was lost; the
 * message names it, with layer and stage when a step was under way, whose results are dropped. */
YARD_API yard_status yard_engine_step(yard_engine *engine);

/* Sleeps until there is a step to run here or on another rank, yard_engine_wake() is called, or
 * timeout_us (0: the fabric's) has passed; returns at once without a fabric. Errors: YARD_EPEER. */
YARD_API yard_status yard_engine_wait(yard_engine *engine, uint64_t timeout_us);

/* Ends a yard_engine_wait() that runs or is to come. Any thread, but not during rejoin. */
YARD_API void yard_engine_wake(yard_engine *engine);

/* The orderly end of a group: this rank gets no request any more, what it has goes on. It keeps
 * stepping for the others until yard_engine_ended(), which is true once every rank has said the
 * same and nothing is left to do: then all may leave. */
YARD_API void yard_engine_finish(yard_engine *engine);
YARD_API bool yard_engine_ended(const yard_engine *engine);

/* After YARD_EPEER or YARD_ETIMEDOUT: the same rank in a new group over a new fabric, with the
 * weights it has. All requests end without events. Collective in that every rank of the new fabric
 * calls this or creates an engine. The old fabric may be destroyed before. After an error the
 * engine can only be destroyed or join another one. */
YARD_API yard_status yard_engine_rejoin(yard_engine *engine, yard_fabric *fabric, yard_error *err);

typedef enum yard_finish {
    YARD_RUNNING = 0,
    YARD_FINISH_STOP,   /* the model ended the sequence; the end id is this event's token */
    YARD_FINISH_LENGTH, /* max_new_tokens or the context is used up */
    YARD_FINISH_ABORTED,
    YARD_FINISH_ERROR /* the model's logits were not finite numbers: no token can be chosen */
} yard_finish;

typedef struct yard_token_logprob {
    int32_t token;
    float logprob; /* natural logarithm; NaN: none (a prompt's first token) */
} yard_token_logprob;

/* One token of one choice of a request, or (n_tokens 0) the end of an aborted or failed one. */
typedef struct yard_event {
    uint64_t id;
    uint32_t choice;
    uint32_t n_tokens; /* 0 or 1 */
    int32_t token;
    yard_finish finish; /* other than YARD_RUNNING exactly once per choice, on its last event */
    uint32_t n_cached;  /* prompt tokens found in the cache; on a choice's first event */
    bool of_prompt;     /* the token is the prompt's next: yard_request.prompt_logprobs */
    uint32_t n_logprobs;
    const yard_token_logprob *logprob; /* [n_logprobs] the token's own, then the likeliest,
                                          descending; the engine's, valid until its next step */
} yard_event;

/* Takes up to max_events events, oldest first; returns how many. */
YARD_API uint32_t yard_engine_poll(yard_engine *engine, yard_event *events, uint32_t max_events);

#define YARD_ALL_CHOICES UINT32_MAX

/* Ends a request, or one choice of it, and frees its pages before the next step. Its last event
 * says YARD_FINISH_ABORTED. Errors: YARD_EINVAL for what is not queued or running; with several
 * ranks there is no such error and no event, for the ranks of an instance may learn of the end of a
 * request at different times. YARD_ENOMEM. */
YARD_API yard_status yard_engine_abort(yard_engine *engine, uint64_t id, uint32_t choice);

typedef struct yard_engine_stats {
    uint32_t n_queued, n_running;
    uint32_t n_pages, n_free_pages; /* of 64 tokens; free: no request holds them */
    uint64_t n_steps, n_prompt_tokens, n_output_tokens;
    uint64_t n_empty_steps; /* of n_steps: those without a token here, run for the other ranks */
    uint64_t agree_us;      /* spent waiting for the records of other ranks, sleep excluded */
    uint64_t woken_at_us;   /* when the first step after the last sleep began, on the monotonic
                               clock; 0: none did */
    uint32_t generation;    /* of the group; counts from 1 */
    uint32_t
        n_cached_pages; /* of n_free_pages: those that the prefix cache can give to a request */
    uint64_t n_found_tokens; /* prompt tokens that came from the cache or another choice */
    uint64_t n_preemptions;  /* requests that gave their pages to older ones and began again */
} yard_engine_stats;

YARD_API void yard_engine_get_stats(const yard_engine *engine, yard_engine_stats *out);

/* The message of the last call on this engine that failed; "" if none did. Owned by the engine,
 * valid until its next call. */
YARD_API const char *yard_engine_error(const yard_engine *engine);

/* What the engine runs on and why ("cpu, 2 threads, avx2: ..."). Owned by the engine. */
YARD_API const char *yard_engine_describe(const yard_engine *engine);

#ifdef __cplusplus
}
#endif

#endif
