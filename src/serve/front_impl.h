/* The front's inside. Private to front*.c. */
#ifndef YARD_SERVE_FRONT_IMPL_H
#define YARD_SERVE_FRONT_IMPL_H

#include <pthread.h>

#include "serve/api_answer.h"
#include "serve/front.h"
#include "serve/metrics.h"
#include "serve/reasoning.h"
#include "serve/scheduler.h"

enum { YARD_FRONT_MAX_STOP = 16 }; /* stop strings and ids of a request */

/* what a body says (front_prepare.c) */

/* Immutable after create: read by the thread too. */
typedef struct yard_front_model_data {
    char *name;
    yard_tokenizer *tok;
    const yard_chat_template *tpl; /* NULL: chat is refused, no_template says why */
    yard_error no_template;
    yard_api_limits limits;
    int32_t bos; /* before a text; -1: none */
    int32_t eos[YARD_MAX_EOS];
    uint32_t n_eos; /* ends of generation_config.json */
    uint32_t max_token_bytes;
    uint32_t max_positions;
} yard_front_model_data;

/* A prompt of a request. */
typedef struct yard_front_prompt {
    int32_t *ids; /* [n_ids] */
    uint32_t n_ids;
    char *echo; /* [n_echo] its text, if wished; NULL: none */
    size_t n_echo;
} yard_front_prompt;

/* A request that was read: error, or the rest. */
typedef struct yard_front_prepared {
    yard_api_error error; /* http_status 0: none */
    yard_api_request request;
    yard_front_prompt *prompt; /* [n_prompts] */
    uint32_t n_prompts;
    yard_reasoning_state begin; /* of every choice */
    yard_api_out answer;        /* tokenize, detokenize: all that there is to say */
} yard_front_prepared;

/* Any thread. */
void yard_front_prepare(yard_front_prepared *out, const yard_front_model_data *m,
                        yard_front_route route, const char *body, size_t n_bytes, uint32_t context);
void yard_front_prepared_release(yard_front_prepared *p);

/* one choice of an answer (front_choice.c) */

typedef struct yard_front_choice {
    uint32_t index; /* in the answer */
    yard_text_stream *tokens;
    yard_text_stream *stops; /* of the answer proper; NULL: none were asked for */
    yard_reasoning reasoning;
    yard_api_out thoughts, text; /* not sent yet */
    yard_api_token *token;       /* [n_tokens] not sent yet */
    yard_api_logprob *top;       /* [n_top] of these, in order */
    uint32_t n_tokens, max_tokens, n_top, max_top;
    uint32_t n_output, n_reasoning;
    uint32_t n_chars, n_prompt_chars; /* of the text so far; of the prompt tokens that came */
    uint64_t last_us;                 /* when tokens came; 0: never */
    const char *finish_reason;        /* NULL: it goes on */
    const char *stop;
    int32_t stop_token;
    bool has_stop_token;
    bool begun, fresh, told; /* an event was sent; something new came; its end was sent */
} yard_front_choice;

/* Ready for the first token, also after it had some. Errors: YARD_ENOMEM. */
yard_status yard_front_choice_open(yard_front_choice *c, uint32_t index,
                                   const yard_front_prepared *p, const yard_front_prompt *prompt,
                                   const yard_tokenizer *tok, yard_error *err);
void yard_front_choice_release(yard_front_choice *c);
/* Takes what a link said; after its end nothing is taken. */
yard_status yard_front_choice_push(yard_front_choice *c, const yard_front_prepared *p,
                                   const yard_tokenizer *tok, const yard_link_tokens *t,
                                   yard_error *err);
/* What is new, as the answer shows it; its pointers are the choice's. */
yard_api_choice yard_front_choice_show(yard_front_choice *c, const yard_front_prepared *p);
/* What was new has been sent. */
void yard_front_choice_sent(yard_front_choice *c);

/* jobs (front_job.c) */

/* A prompt of a job: what the scheduler and the engines know as a request. */
typedef struct yard_front_part {
    yard_front_job *job;
    const yard_front_prompt *prompt;
    yard_front_choice *choices; /* [n_choices] */
    uint32_t n_choices;
    uint64_t id;      /* the scheduler's; 0: it has ended, or not begun */
    uint32_t attempt; /* the scheduler's, of the tag */
    uint64_t tag;     /* the link's; 0: not at an instance */
    uint32_t instance;
    uint32_t n_cached;
    bool started, has_cached;
    bool dirty; /* in the front's list */
    struct yard_front_part *next_dirty;
    yard_error why; /* of a failure */
} yard_front_part;

struct yard_front_job {
    yard_front_job *newer, *older; /* of all, newest first */
    yard_front *front;
    yard_front_route route;
    const yard_front_sink *sink; /* NULL: it has heard the last */
    void *ctx;
    char *body; /* [n_bytes] until it is read */
    size_t n_bytes;
    uint32_t context; /* when it came */
    yard_front_prepared prepared;
    yard_front_job *next_read; /* in the thread's lists */
    bool with_thread;
    yard_front_part *parts; /* [n_parts] */
    uint32_t n_parts, n_open;
    bool begun; /* events were sent */
    bool held;  /* by the call that made it: not to be freed */
    char id[96];
    int64_t created;
    uint64_t arrived_us, first_us, sent_us; /* first token; last bytes to the client */
};

/* the thread that reads long bodies (front_reader.c) */

typedef struct yard_front_reader {
    const yard_front_model_data *model;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    yard_front_job *first, **last; /* to be read */
    yard_front_job *done;          /* read, newest first */
    int fd;                        /* an eventfd: readable while there are done ones */
    bool running, stop;
} yard_front_reader;

yard_status yard_front_reader_open(yard_front_reader *r, const yard_front_model_data *model,
                                   yard_error *err);
void yard_front_reader_close(yard_front_reader *r); /* all zero with fd -1 is fine */
void yard_front_reader_give(yard_front_reader *r, yard_front_job *job);
/* One that was read, NULL: none now. */
yard_front_job *yard_front_reader_take(yard_front_reader *r);

/* all of it */

typedef struct yard_front_instance {
    bool up;
    bool paused; /* it ends or forms again: no report is due */
    yard_engine_report report;
    uint64_t heard_us;
} yard_front_instance;

typedef struct yard_front_pod {
    char *address;
    yard_link *link;
    bool up;
    bool unlike;   /* it answers, as about says, but is not as those that are up */
    bool was_told; /* that it answers, or that it does not yet */
    yard_link_pod about;
    yard_front_instance instance[YARD_FRONT_MAX_POD_INSTANCES];
} yard_front_pod;

/* tag = generation << 32 | slot */
typedef struct yard_front_tag {
    yard_front_part *part; /* NULL: free */
    uint32_t generation, next_free;
} yard_front_tag;

struct yard_front {
    yard_front_config config; /* of its strings only link and numbers are used after create */
    yard_front_model_data model;
    yard_front_reader reader;
    yard_scheduler *scheduler;
    yard_front_pod *pods; /* [n_pods] */
    uint32_t n_pods, n_up;
    yard_link_pod about; /* what all pods that are up have in common; kept when none is */
    bool has_about;
    int64_t created;
    char fingerprint[24];
    yard_front_job *newest;
    uint32_t n_jobs;
    yard_front_part *dirty;
    yard_front_tag *tags; /* [n_tags] */
    uint32_t n_tags, free_tag;
    uint64_t next_look_us; /* for silent streams */
    uint64_t miss_us;      /* when engines that never answered are named; 0: before the first run */
    yard_api_out out;      /* being written */
    yard_metrics metrics;
};

/* The instance in the scheduler's numbers. */
static inline yard_front_pod *yard_front_pod_of(yard_front *front, uint32_t instance)
{
    return &front->pods[instance / YARD_FRONT_MAX_POD_INSTANCES];
}

/* front_job.c. Whatever ends parts is followed by decide, which ends and frees them and their jobs.
 */
/* What is prepared goes on its way; false: it has ended, and is freed. */
bool yard_front_job_read(yard_front *front, uint64_t now_us, yard_front_job *job);
void yard_front_job_close(yard_front_job *job); /* frees it, unless something still needs it */
void yard_front_job_abandon(yard_front *front, yard_front_job *job); /* ends its parts */
void yard_front_decide(yard_front *front, uint64_t now_us);          /* the scheduler's actions */

/* front_answer.c: to the client. */
void yard_front_take_tokens(yard_front *front, uint64_t now_us, const yard_link_tokens *t);
void yard_front_flush(yard_front *front, uint64_t now_us); /* what came goes out */
void yard_front_complete(yard_front *front, uint64_t now_us, yard_front_job *job);
void yard_front_answer(yard_front *front, uint64_t now_us, yard_front_job *job, int http_status,
                       const yard_api_out *body, uint32_t retry_after_s);
void yard_front_fail(yard_front *front, uint64_t now_us, yard_front_job *job,
                     const yard_api_error *error, uint32_t retry_after_s);
void yard_front_keep_alive(yard_front *front, uint64_t now_us);

/* front_tags.c. 0: no memory. */
uint64_t yard_front_tag_take(yard_front *front, yard_front_part *part);
void yard_front_tag_drop(yard_front *front, yard_front_part *part);
yard_front_part *yard_front_tag_find(const yard_front *front, uint64_t tag);

#endif
