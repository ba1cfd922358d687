/* Patterns of tokenizer.json are written for Oniguruma (Ruby syntax). They are translated here to
 * PCRE2, construct by construct; what could mean something else there is refused by name. */
#include <stdlib.h>

#include "model/tokenizer_impl.h"

enum {
    MAX_PATTERN_BYTES = 1 << 14,
    /* Patterns come from downloaded files: bounds on what one match may cost. */
    MATCH_LIMIT = 50 * 1000 * 1000,
    DEPTH_LIMIT = 100 * 1000,
    HEAP_LIMIT_KIB = 64 * 1024,
    JIT_STACK_START_BYTES = 32 * 1024,
    JIT_STACK_MAX_BYTES = 4 * 1024 * 1024,
};

/* White space as the reference has it; PCRE2's own \s also holds U+180E. */
#define SPACE_RANGES                                                                               \
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"    \
    "\\x{205f}\\x{3000}"
#define NOT_SPACE_RANGES                                                                           \
    "\\x{0}-\\x{8}\\x{e}-\\x{1f}\\x{21}-\\x{84}\\x{86}-\\x{9f}\\x{a1}-\\x{167f}"                   \
    "\\x{1681}-\\x{1fff}\\x{200b}-\\x{2027}\\x{202a}-\\x{202e}\\x{2030}-\\x{205e}"                 \
    "\\x{2060}-\\x{2fff}\\x{3001}-\\x{10ffff}"

enum { MAX_GROWTH = sizeof(NOT_SPACE_RANGES) }; /* bytes that one input byte can become */

typedef struct translation {
    const char *where;
    const char *in;
    size_t n_in, at;
    char *out;
    size_t n_out;
    yard_error *err;
} translation;

static void put(translation *t, const char *text, size_t n_bytes)
{
    memcpy(t->out + t->n_out, text, n_bytes);
    t->n_out += n_bytes;
}

static void put_string(translation *t, const char *text)
{
    put(t, text, strlen(text));
}

static void copy(translation *t, size_t n_bytes)
{
    put(t, t->in + t->at, n_bytes);
    t->at += n_bytes;
}

static bool looking_at(const translation *t, const char *text)
{
    const size_t n = strlen(text);
    return t->n_in - t->at >= n && !memcmp(t->in + t->at, text, n);
}

static yard_status refuse(translation *t, const char *what)
{
    return yard_fail(t->err, YARD_ENOTSUP, "%s: %s is not implemented, at byte %zu of the pattern",
                     t->where, what, t->at);
}

static bool is_hex(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

/* \p{..}, \P{..} and \x{..} mean the same in both; \uHHHH is written \x{HHHH} for PCRE2. */
static yard_status translate_braced(translation *t, char letter)
{
    size_t end = t->at + 2;

    if (letter == 'u') {
        for (int i = 0; i < 4; i++)
            if (t->n_in - t->at < 6 || !is_hex(t->in[t->at + 2 + (size_t)i]))
                return refuse(t, "\\u without four hexadecimal digits");
        put_string(t, "\\x{");
        put(t, t->in + t->at + 2, 4);
        put_string(t, "}");
        t->at += 6;
        return YARD_OK;
    }
    if (end < t->n_in && t->in[end] == '{') {
        while (end < t->n_in && t->in[end] != '}')
            end++;
        if (end == t->n_in)
            return refuse(t, "an unclosed brace");
        copy(t, end + 1 - t->at);
        return YARD_OK;
    }
    if (letter == 'x' && t->n_in - t->at >= 4 && is_hex(t->in[end]) && is_hex(t->in[end + 1])) {
        copy(t, 4);
        return YARD_OK;
    }
    return refuse(t, "\\p or \\x without braces");
}

static yard_status translate_escape(translation *t, bool in_class)
{
    const char letter = t->at + 1 < t->n_in ? t->in[t->at + 1] : '\0';
    char name[] = "\\?";

    switch (letter) {
    case 's':
        put_string(t, in_class ? SPACE_RANGES : "[" SPACE_RANGES "]");
        t->at += 2;
        break;
    case 'S':
        put_string(t, in_class ? NOT_SPACE_RANGES : "[^" SPACE_RANGES "]");
        t->at += 2;
        break;
    case 'p':
    case 'P':
    case 'x':
    case 'u':
        return translate_braced(t, letter);
    case 'd':
    case 'D':
    case 'r':
    case 'n':
    case 't':
    case 'f':
        copy(t, 2);
        return YARD_OK;
    case 'A':
    case 'z':
        if (in_class)
            return refuse(t, "an anchor in a class");
        copy(t, 2);
        return YARD_OK;
    default:
        name[1] = letter;
        if ((letter >= '0' && letter <= '9') || (letter >= 'a' && letter <= 'z') ||
            (letter >= 'A' && letter <= 'Z') || letter == '\0' || (unsigned char)letter >= 0x80)
            return refuse(t, name);
        copy(t, 2);
        return YARD_OK;
    }
    if (in_class && looking_at(t, "-") && !looking_at(t, "-]"))
        return refuse(t, "a range that begins with white space");
    return YARD_OK;
}

static yard_status translate_class(translation *t)
{
    yard_status st = YARD_OK;

    copy(t, 1);
    if (looking_at(t, "^"))
        copy(t, 1);
    if (looking_at(t, "]"))
        return refuse(t, "an empty class");
    while (st == YARD_OK && t->at < t->n_in && t->in[t->at] != ']') {
        if (looking_at(t, "["))
            return refuse(t, "a class within a class");
        if (looking_at(t, "&&"))
            return refuse(t, "an intersection of classes");
        if (looking_at(t, "\\"))
            st = translate_escape(t, true);
        else
            copy(t, 1);
    }
    if (st == YARD_OK && t->at == t->n_in)
        return refuse(t, "an unclosed class");
    if (st == YARD_OK)
        copy(t, 1);
    return st;
}

static yard_status translate_group(translation *t)
{
    static const char *const known[] = {
        "(?:", "(?i:", "(?i)", "(?!", "(?=", "(?<!", "(?<=", "(?>"
    };

    if (looking_at(t, "(*"))
        return refuse(t, "(*");
    if (!looking_at(t, "(?")) {
        copy(t, 1);
        return YARD_OK;
    }
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (looking_at(t, known[i])) {
            copy(t, strlen(known[i]));
            return YARD_OK;
        }
    return refuse(t, "this kind of group");
}

static yard_status translate(translation *t)
{
    yard_status st = YARD_OK;

    while (st == YARD_OK && t->at < t->n_in) {
        switch (t->in[t->at]) {
        case '\\':
            st = translate_escape(t, false);
            break;
        case '[':
            st = translate_class(t);
            break;
        case '(':
            st = translate_group(t);
            break;
        case '{':
            if (looking_at(t, "{,"))
                return refuse(t, "{,n}");
            copy(t, 1);
            break;
        case '}':
            if (looking_at(t, "}+") || looking_at(t, "}?"))
                return refuse(t, "a suffix of {n,m}");
            copy(t, 1);
            break;
        default:
            copy(t, 1);
        }
    }
    return st;
}

static yard_status compile(yard_split *split, const char *where, const char *pattern,
                           size_t n_bytes, uint32_t options, yard_error *err)
{
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    PCRE2_SIZE offset;
    int code;

    if (!context)
        return yard_fail(err, YARD_ENOMEM, "%s: no memory for a pattern", where);
    pcre2_set_newline(context, PCRE2_NEWLINE_LF); /* whatever PCRE2 was built for */
    split->code = pcre2_compile((PCRE2_SPTR)pattern, n_bytes, options, &code, &offset, context);
    pcre2_compile_context_free(context);
    if (!split->code) {
        PCRE2_UCHAR text[160];
        pcre2_get_error_message(code, text, sizeof(text));
        return yard_fail(err, code == PCRE2_ERROR_HEAP_FAILED ? YARD_ENOMEM : YARD_ENOTSUP,
                         "%s: want a regular expression: %s", where, (const char *)text);
    }
    split->jit = pcre2_jit_compile(split->code, PCRE2_JIT_COMPLETE) == 0;
    return YARD_OK;
}

yard_status yard_split_compile(yard_split *split, const char *where, const char *pattern,
                               size_t n_bytes, bool literal, yard_error *err)
{
    translation t = { .where = where, .in = pattern, .n_in = n_bytes, .err = err };
    yard_status st;

    if (n_bytes == 0 || n_bytes > MAX_PATTERN_BYTES)
        return yard_fail(err, YARD_ENOTSUP, "%s: want a pattern of 1 to %d bytes, got %zu", where,
                         MAX_PATTERN_BYTES, n_bytes);
    if (literal)
        return compile(split, where, pattern, n_bytes, PCRE2_UTF | PCRE2_LITERAL, err);
    t.out = malloc(n_bytes * MAX_GROWTH);
    if (!t.out)
        return yard_fail(err, YARD_ENOMEM, "%s: no memory for a pattern", where);
    st = translate(&t);
    /* In Ruby syntax ^ and $ mean every line. */
    if (st == YARD_OK)
        st = compile(split, where, t.out, t.n_out, PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, err);
    free(t.out);
    return st;
}

void yard_split_free(yard_split *split)
{
    pcre2_code_free(split->code);
    *split = (yard_split){ 0 };
}

void yard_matcher_free(yard_matcher *matcher)
{
    pcre2_match_data_free(matcher->data);
    pcre2_match_context_free(matcher->context);
    pcre2_jit_stack_free(matcher->jit_stack);
    *matcher = (yard_matcher){ 0 };
}

yard_status yard_matcher_create(yard_matcher *matcher, yard_error *err)
{
    matcher->data = pcre2_match_data_create(1, NULL);
    matcher->context = pcre2_match_context_create(NULL);
    if (!matcher->data || !matcher->context)
        return yard_fail(err, YARD_ENOMEM, "tokenizer: no memory to match patterns");
    pcre2_set_match_limit(matcher->context, MATCH_LIMIT);
    pcre2_set_depth_limit(matcher->context, DEPTH_LIMIT);
    pcre2_set_heap_limit(matcher->context, HEAP_LIMIT_KIB);
    /* Without one the just-in-time code runs on 32 KiB of the machine stack. */
    matcher->jit_stack = pcre2_jit_stack_create(JIT_STACK_START_BYTES, JIT_STACK_MAX_BYTES, NULL);
    if (matcher->jit_stack)
        pcre2_jit_stack_assign(matcher->context, NULL, matcher->jit_stack);
    return YARD_OK;
}

yard_status yard_split_find(const yard_split *split, yard_matcher *matcher, const char *text,
                            size_t n_bytes, size_t at, bool *found, size_t *start, size_t *end,
                            yard_error *err)
{
    const PCRE2_SIZE *range = pcre2_get_ovector_pointer(matcher->data);
    int rc = PCRE2_ERROR_JIT_STACKLIMIT;

    if (split->jit)
        rc = pcre2_jit_match(split->code, (PCRE2_SPTR)text, n_bytes, at, 0, matcher->data,
                             matcher->context);
    /* The interpreter keeps its state on the heap, where there is more room. */
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
        rc = pcre2_match(split->code, (PCRE2_SPTR)text, n_bytes, at,
                         PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, matcher->data, matcher->context);
    *found = rc >= 0;
    if (rc >= 0) {
        *start = range[0];
        *end = range[1];
        return YARD_OK;
    }
    if (rc == PCRE2_ERROR_NOMATCH)
        return YARD_OK;
    if (rc == PCRE2_ERROR_NOMEMORY)
        return yard_fail(err, YARD_ENOMEM, "tokenizer: no memory to match patterns");
    return yard_fail(err, YARD_ENOTSUP,
                     "tokenizer: a pattern of tokenizer.json needs too many steps on this text "
                     "(PCRE2 error %d)",
                     rc);
}
