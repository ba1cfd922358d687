/* One request from its ids to text on standard output, as it comes; what generate and chat share.
 */
#ifndef YARD_CLI_ANSWER_H
#define YARD_CLI_ANSWER_H

#include <yard/engine.h>

#include "cli/cli.h"
#include "model/model.h"

typedef struct yard_answer_config {
    yard_engine *engine;
    const yard_tokenizer *tok; /* NULL: ids separated by commas are shown instead of text */
    const char *const *stop;   /* [n_stop] stop strings; none without a tokenizer */
    uint32_t n_stop;
    bool show; /* write to standard output as it comes */
} yard_answer_config;

/* ids holds everything generated: special tokens, the end id, and the token that completed a stop
 * string. text has neither special tokens nor the stop string nor what follows it. */
typedef struct yard_answer {
    int32_t *ids;
    size_t n_ids, max_ids;
    char *text; /* NUL-terminated; NULL without a tokenizer */
    size_t n_bytes;
    yard_finish finish;             /* YARD_FINISH_STOP also for a stop string */
    uint64_t prefill_us, decode_us; /* to the first token; from there to the last */
} yard_answer;

/* Runs the request to its end; Ctrl-C (see below) ends it as YARD_FINISH_ABORTED, and so does a
 * standard output that takes no more. The caller releases *out, also after an error. */
yard_status yard_answer_run(yard_answer *out, const yard_answer_config *config,
                            const yard_request *request, yard_error *err);
void yard_answer_release(yard_answer *answer);

/* "stop", "length" or "abort". */
const char *yard_answer_finish_name(yard_finish finish);

/* {"text":..,"ids":[..],"finish_reason":..} and a newline on standard output; text is null
 * without a tokenizer. */
yard_status yard_answer_print_json(const yard_answer *answer, yard_error *err);

/* One line about speed on standard error, if that is a terminal. */
void yard_answer_print_timing(const yard_answer *answer, uint32_t n_prompt);

/* From the first call on, Ctrl-C sets a flag that ends the running answer; system calls that wait
 * return with EINTR. The flag stays until it is taken; a second
 * Ctrl-C before that ends the program, whatever it is doing. */
void yard_interrupt_catch(void);
bool yard_interrupt_take(void);

/* Waits for standard input to have something, its end included; false when Ctrl-C came first. The
 * signal may hit any thread, at any moment before the wait begins: EINTR alone would miss it. */
bool yard_interrupt_wait_input(void);

enum { YARD_EXIT_INTERRUPTED = 130 }; /* 128 + SIGINT, as shells have it */

#endif
