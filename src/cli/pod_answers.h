/* Many prompts answered at once by a pod's instances, shown in the order of the prompts. */
#ifndef YARD_CLI_POD_ANSWERS_H
#define YARD_CLI_POD_ANSWERS_H

#include "cli/engine_options.h"
#include "engine/engine.h"

typedef struct yard_pod_answers_config {
    yard_pod *pod;
    const yard_tokenizer *tok; /* NULL: ids separated by commas are shown instead of text */
    const yard_sampling_options *sampling;
    bool json;
} yard_pod_answers_config;

typedef struct yard_prompt {
    int32_t *ids; /* [n_ids] malloc'd */
    size_t n_ids;
} yard_prompt;

/* Prompts of a file, one a line: text, or a JSON string when the line begins with '"'. Empty lines
 * are none. *out is malloc'd. Errors: YARD_EIO, YARD_EFORMAT naming the line, YARD_ENOMEM. */
yard_status yard_prompts_read(const char *path, const yard_tokenizer *tok, yard_prompt **out,
                              size_t *n, yard_error *err);
void yard_prompts_release(yard_prompt *prompts, size_t n);

typedef struct yard_pod_answers_result {
    size_t n_failed;
    bool interrupted; /* by Ctrl-C */
} yard_pod_answers_result;

/* Prompt i goes to instance i mod the group's instances; what belongs to another pod's is passed
 * over. Prints each answer as it comes, one after the other: text and a newline, or with json a
 * line {"prompt":i,"text":..,"ids":[..],"finish_reason":..}, whose reason is "error" with an
 * "error" member when a request failed; text answers that failed are told on standard error. After
 * Ctrl-C all end as "abort". Errors: the pod's. */
yard_status yard_pod_answer_all(const yard_pod_answers_config *config, const yard_prompt *prompts,
                                size_t n, uint32_t n_instances, yard_pod_answers_result *out,
                                yard_error *err);

#endif
