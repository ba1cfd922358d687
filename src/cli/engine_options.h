/* The options that generate, chat and logits share, as argp children: each is parsed into the
 * struct named beside it. A wrong value ends the program with YARD_EXIT_USAGE. */
#ifndef YARD_CLI_ENGINE_OPTIONS_H
#define YARD_CLI_ENGINE_OPTIONS_H

#include <yard/engine.h>

#include "cli/args.h"
#include "model/model.h"

/* where the model runs: --exact, --device, --threads, --max-batch-tokens, .. */

/* Input: a yard_engine_config, which the parser initialises, callbacks included. */
extern const struct argp yard_engine_argp;

/* how tokens are chosen: --temperature, .., --max-tokens, --stop, --seed */

typedef struct yard_sampling_options {
    yard_sampling sampling; /* what was not given: the defaults of YARD_REQUEST_INIT */
    bool temperature_given, top_p_given, min_p_given, top_k_given, repetition_given;
    bool presence_given, frequency_given, seed_given, max_tokens_given;
    uint32_t max_tokens; /* UINT32_MAX when not given */
    bool ignore_eos;
    yard_logit_bias *bias; /* [n_bias] */
    const char **stop;     /* [n_stop], strings of argv */
    uint32_t n_bias, n_stop;
    int32_t stop_token[YARD_MAX_EOS]; /* generation_config.json's, for chat */
    uint32_t n_stop_token;
} yard_sampling_options;

/* Input: a yard_sampling_options, which the parser initialises. */
extern const struct argp yard_sampling_argp;
void yard_sampling_options_release(yard_sampling_options *options);

/* Takes the checkpoint's defaults for what was not given. */
void yard_sampling_options_default(yard_sampling_options *options,
                                   const yard_generation_config *defaults);

/* The request for these ids; everything is borrowed until it is submitted. */
yard_request yard_sampling_options_request(const yard_sampling_options *options, const int32_t *ids,
                                           size_t n_ids);

/* the prompt: --prompt, --prompt-file, --ids, --ids-file */

typedef struct yard_prompt_options {
    const char *text, *text_path, *ids_text, *ids_path; /* exactly one is set, unless: */
    bool elsewhere; /* set by the command: it has prompts of its own */
} yard_prompt_options;

/* Input: a yard_prompt_options, which the parser initialises. */
extern const struct argp yard_prompt_argp;

static inline bool yard_prompt_is_text(const yard_prompt_options *options)
{
    return options->text || options->text_path;
}

/* The prompt's ids, malloc'd, at least one. tok may be NULL when the prompt is no text. Errors:
 * YARD_EIO, YARD_EFORMAT, YARD_EINVAL for an empty prompt, YARD_ENOMEM. */
yard_status yard_prompt_read(const yard_prompt_options *options, const yard_tokenizer *tok,
                             int32_t **ids, size_t *n_ids, yard_error *err);

/* The tokenizer of a model. When the directory has no tokenizer.json and it is not required,
 * *out is NULL: a checkpoint of weights alone is run by ids. */
yard_status yard_cli_load_tokenizer(yard_tokenizer **out, const char *model_dir, bool required,
                                    yard_error *err);

#endif
