/* Thoughts and answers, with the text cut at every two places. ctest: sanitize */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "serve/reasoning.h"

static void split(yard_reasoning_state begin, const char *text, const char *thoughts,
                  const char *answer)
{
    const size_t n = strlen(text);

    for (size_t a = 0; a <= n; a++)
        for (size_t b = a; b <= n; b++) {
            yard_reasoning r = { .state = begin };
            yard_api_out out[2] = { { 0 }, { 0 } };

            yard_reasoning_push(&r, text, a, &out[0], &out[1]);
            yard_reasoning_push(&r, text + a, b - a, &out[0], &out[1]);
            yard_reasoning_push(&r, text + b, n - b, &out[0], &out[1]);
            yard_reasoning_finish(&r, &out[0], &out[1]);
            assert_string_equal(out[0].bytes ? out[0].bytes : "", thoughts);
            assert_string_equal(out[1].bytes ? out[1].bytes : "", answer);
            yard_api_out_release(&out[0]);
            yard_api_out_release(&out[1]);
        }
}

static void thoughts_end_at_their_mark(void **state)
{
    (void)state;
    split(YARD_REASONING_INSIDE, "a < b</think>\n\nc", "a < b", "\n\nc");
    split(YARD_REASONING_INSIDE, "a</thi</think>b</think>", "a</thi", "b</think>");
    split(YARD_REASONING_INSIDE, "<</think>", "<", "");
    split(YARD_REASONING_INSIDE, "cut off </thin", "cut off </thin", "");
    split(YARD_REASONING_INSIDE, "<think>", "<think>", "");
    split(YARD_REASONING_INSIDE, "", "", "");
}

static void thoughts_begin_at_the_start_or_not_at_all(void **state)
{
    (void)state;
    split(YARD_REASONING_START, "<think>a</think>b", "a", "b");
    split(YARD_REASONING_START, "b <think>a</think>", "", "b <think>a</think>");
    split(YARD_REASONING_START, "<thin", "", "<thin");
    split(YARD_REASONING_START, "<thi<think>a", "", "<thi<think>a");
    split(YARD_REASONING_START, "</think>", "", "</think>");
    split(YARD_REASONING_START, "<think></think>", "", "");
    split(YARD_REASONING_ANSWER, "<think>a</think>b", "", "<think>a</think>b");
}

static void nothing_is_held_that_is_decided(void **state)
{
    yard_reasoning r = { .state = YARD_REASONING_INSIDE };
    yard_api_out thoughts = { 0 }, answer = { 0 };

    (void)state;
    yard_reasoning_push(&r, "a</thx</", 8, &thoughts, &answer);
    assert_string_equal(thoughts.bytes, "a</thx");
    yard_reasoning_push(&r, "think>b", 7, &thoughts, &answer);
    assert_string_equal(thoughts.bytes, "a</thx");
    assert_string_equal(answer.bytes, "b");
    yard_api_out_release(&thoughts);
    yard_api_out_release(&answer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(thoughts_end_at_their_mark),
        cmocka_unit_test(thoughts_begin_at_the_start_or_not_at_all),
        cmocka_unit_test(nothing_is_held_that_is_decided),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
