/* What the files of engine_gpu_test share. */
#ifndef YARD_TESTS_ENGINE_GPU_TEST_H
#define YARD_TESTS_ENGINE_GPU_TEST_H

#include <jansson.h>

#include "engine/engine.h"

enum { MAX_PROMPTS = 32, MAX_IDS = 4096, N_GREEDY = 48 };

typedef struct prompt {
    const char *name;
    int32_t ids[MAX_IDS]; /* the prompt, then the reference's greedy ids */
    uint32_t n_ids, n_greedy;
    const json_t *logits; /* rows of some positions, ascending */
} prompt;

typedef struct test {
    const char *model;
    prompt *prompts; /* [n] */
    uint32_t n, n_failed;
    const char *case_name;
} test;

/* One line; counts a failure. */
void engine_gpu_check(test *t, bool passed, const char *what);

/* Greedy ids and their log-probabilities are those of one rank, to the bit, on 2 ranks of 2
 * instances; in exact mode the ids are the reference's on 2 ranks of one. A rank that ends in the
 * middle of a step is an error of the other, who goes on with another. Ranks are processes: call it
 * before this one has touched a GPU. Ends the program with 77 when there is none. */
void engine_gpu_ranks(test *t);

#endif
