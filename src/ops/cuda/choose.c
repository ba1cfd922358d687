/* Which kernel computes a product. Choices depend on shapes and on bounds that the host knows,
 * never on what is on the device: a captured graph keeps its choice. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "ops/cuda/cuda.h"

const yard_gemm_variant *const yard_cuda_variants[CUDA_VARIANTS] = {
    &yard_gemm_few_fp8, &yard_gemm_few_bf16, &yard_gemm_group96,
    &yard_gemm_rows128, &yard_gemm_rows192,
};

uint32_t yard_cuda_variant_idx(const yard_gemm_variant *variant)
{
    uint32_t i = 0;

    while (yard_cuda_variants[i] != variant)
        i++;
    return i;
}

/* "NAME" or "NAME:MIN_BLOCKS". */
static yard_status parse_choice(cuda_choice *out, const char *text, yard_error *err)
{
    const size_t n = strcspn(text, ":");
    char *end = NULL;

    for (uint32_t i = 0; i < CUDA_VARIANTS; i++) {
        const yard_gemm_variant *v = yard_cuda_variants[i];
        if (strlen(v->name) != n || memcmp(v->name, text, n) != 0)
            continue;
        *out = (cuda_choice){ .variant = v };
        if (text[n] == '\0')
            return YARD_OK;
        out->min_blocks = (uint32_t)strtoul(text + n + 1, &end, 10);
        if (v->splits && end != text + n + 1 && *end == '\0')
            return YARD_OK;
    }
    return yard_fail(err, YARD_EINVAL,
                     "cuda variant: want fast, deterministic or a kernel's name, got '%s'", text);
}

/* Lines "N_OUT N_IN MAX_ROWS KERNEL[:MIN_BLOCKS]"; '#' begins a comment. */
static yard_status parse_line(cuda_stream *s, const char *path, uint32_t number, const char *line,
                              yard_error *err)
{
    cuda_choice_row row, *rows;
    char name[64];
    const int n = sscanf(line, "%u %u %u %63s", &row.n_out, &row.n_in, &row.max_rows, name);

    if (n <= 0 || line[0] == '#')
        return YARD_OK;
    if (n != 4 || parse_choice(&row.choice, name, NULL) != YARD_OK)
        return yard_fail(err, YARD_EFORMAT,
                         "%s: line %u: want 'N_OUT N_IN MAX_ROWS KERNEL[:MIN_BLOCKS]'", path,
                         number);
    rows = realloc(s->rows, (s->n_rows + 1) * sizeof(*rows));
    if (!rows)
        return yard_fail(err, YARD_ENOMEM, "%s: line %u: no memory", path, number);
    s->rows = rows;
    s->rows[s->n_rows++] = row;
    return YARD_OK;
}

static yard_status read_file(cuda_stream *s, const char *path, yard_error *err)
{
    FILE *f = fopen(path, "r");
    char line[256];
    yard_status st = YARD_OK;

    if (!f)
        return yard_fail(err, YARD_EIO, "%s: open: %s", path, strerror(errno));
    for (uint32_t number = 1; st == YARD_OK && fgets(line, sizeof(line), f); number++)
        st = parse_line(s, path, number, line, err);
    fclose(f);
    return st;
}

yard_status yard_cuda_read_choices(cuda_stream *s, const yard_ops_config *config, yard_error *err)
{
    const char *variant = config->variant ? config->variant : "fast";
    yard_status st = YARD_OK;

    s->deterministic = !strcmp(variant, "deterministic");
    if (!s->deterministic && strcmp(variant, "fast") != 0)
        st = parse_choice(&s->forced, variant, err);
    if (st == YARD_OK && config->choices)
        st = read_file(s, config->choices, err);
    return st;
}

/* One matrix, FP8. */
static cuda_choice choose_linear(const cuda_stream *s, uint32_t n_out, uint32_t n_in,
                                 uint32_t n_rows)
{
    const cuda_choice_row *best = NULL;

    for (uint32_t i = 0; i < s->n_rows; i++) {
        const cuda_choice_row *r = &s->rows[i];
        if (r->n_out == n_out && r->n_in == n_in && r->max_rows >= n_rows &&
            (!best || r->max_rows < best->max_rows))
            best = r;
    }
    if (best)
        return best->choice;
    if (n_rows > 256)
        return (cuda_choice){ .variant = &yard_gemm_rows128 };
    return (cuda_choice){ .variant = &yard_gemm_few_fp8, .min_blocks = 4 };
}

cuda_choice yard_cuda_choose(const cuda_stream *s, yard_dtype dtype, uint32_t n_out, uint32_t n_in,
                             uint32_t n_groups, bool grouped, uint32_t n_rows)
{

    if (s->forced.variant && s->forced.variant->dtype == dtype &&
        !(grouped && s->forced.variant->splits))
        return s->forced;
    if (dtype == YARD_BF16)
        return (cuda_choice){ .variant = &yard_gemm_few_bf16,
                              .min_blocks = s->deterministic ? 0 : 8 };
    if (!grouped)
        return s->deterministic ? (cuda_choice){ .variant = &yard_gemm_few_fp8 }
                                : choose_linear(s, n_out, n_in, n_rows);
    if (n_rows / n_groups <= 96)
        return (cuda_choice){ .variant = &yard_gemm_group96 };
    if (n_rows / n_groups <= 500)
        return (cuda_choice){ .variant = &yard_gemm_rows128 };
    return (cuda_choice){ .variant = &yard_gemm_rows192 };
}
