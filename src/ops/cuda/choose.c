/* Which kernel computes a product. Choices depend on shapes and on bounds that the host knows,
 * never on what is on the device: a captured graph keeps its choice. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "ops/cuda/cuda.h"

/* The last one takes nothing but heads, so that nobody can ask for it by its name. */
enum { NAMED_VARIANTS = CUDA_VARIANTS - 1 };
const yard_gemm_variant *const yard_cuda_variants[CUDA_VARIANTS] = {
    &yard_gemm_few_fp8,       &yard_gemm_few_bf16,     &yard_gemm_many_fp8,   &yard_gemm_group96,
    &yard_gemm_group144,      &yard_gemm_rows128,      &yard_gemm_rows192,    &yard_gemm_wide192,
    &yard_gemm_group144_bf16, &yard_gemm_rows128_bf16, &yard_gemm_heads_bf16,
};

uint32_t yard_cuda_variant_idx(const yard_gemm_variant *variant)
{
    uint32_t i = 0;

    while (yard_cuda_variants[i] != variant)
        i++;
    return i;
}

static const yard_gemm_variant *find_variant(const char *name, size_t n)
{
    for (uint32_t i = 0; i < NAMED_VARIANTS; i++)
        if (strlen(yard_cuda_variants[i]->name) == n &&
            !memcmp(yard_cuda_variants[i]->name, name, n))
            return yard_cuda_variants[i];
    return NULL;
}

/* "NAME", "NAME:MIN_BLOCKS" or "NAME:MIN_BLOCKS:TILE_WIDTH". */
static yard_status parse_choice(cuda_choice *out, const char *text, yard_error *err)
{
    const size_t n = strcspn(text, ":");
    cuda_choice c = { .variant = find_variant(text, n) };
    int used = 0;

    if (c.variant && c.variant->splits && text[n] == ':' &&
        (strpbrk(text + n, "+-") ||
         sscanf(text + n, ":%9u%n:%9u%n", &c.min_blocks, &used, &c.tile_width, &used) < 1))
        c.variant = NULL;
    if (!c.variant || text[n + (size_t)used] != '\0' || c.tile_width > c.variant->max_width)
        return yard_fail(err, YARD_EINVAL,
                         "cuda variant: want fast, deterministic or a kernel's name (such as "
                         "rows128 or few_fp8:8:64), got '%s'",
                         text);
    *out = c;
    return YARD_OK;
}

/* Lines "N_OUT N_IN MAX_ROWS KERNEL"; '#' begins a comment line. */
static yard_status parse_line(cuda_stream *s, const char *path, uint32_t number, const char *line,
                              yard_error *err)
{
    const char *text = line + strspn(line, " \t\r\n");
    cuda_choice_row row, *rows;
    char name[64];
    int end = 0;

    if (*text == '\0' || *text == '#')
        return YARD_OK;
    if (strpbrk(text, "+-") ||
        sscanf(text, "%9u %9u %9u %63s %n", &row.n_out, &row.n_in, &row.max_rows, name, &end) !=
            4 ||
        text[end] != '\0' || parse_choice(&row.choice, name, NULL) != YARD_OK)
        return yard_fail(err, YARD_EFORMAT, "%s: line %u: want 'N_OUT N_IN MAX_ROWS KERNEL'", path,
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
    char *line = NULL;
    size_t size = 0;
    yard_status st = YARD_OK;

    if (!f)
        return yard_fail(err, YARD_EIO, "%s: open: %s", path, strerror(errno));
    for (uint32_t number = 1; st == YARD_OK && getline(&line, &size, f) > 0; number++)
        st = parse_line(s, path, number, line, err);
    if (st == YARD_OK && ferror(f))
        st = yard_fail(err, YARD_EIO, "%s: read: %s", path, strerror(errno));
    if (st == YARD_OK && s->n_rows == 0)
        st = yard_fail(err, YARD_EFORMAT, "%s: want lines 'N_OUT N_IN MAX_ROWS KERNEL', found none",
                       path);
    free(line);
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

/* The row for so many rows of that shape, or NULL. */
static const cuda_choice_row *find_row(const cuda_choice_row *rows, uint32_t n, yard_dtype dtype,
                                       uint32_t n_out, uint32_t n_in, uint32_t n_rows)
{
    const cuda_choice_row *best = NULL;

    for (uint32_t i = 0; i < n; i++) {
        const cuda_choice_row *r = &rows[i];
        if (r->n_out == n_out && r->n_in == n_in && r->choice.variant->dtype == dtype &&
            r->max_rows >= n_rows && (!best || r->max_rows < best->max_rows))
            best = r;
    }
    return best;
}

static uint32_t count_tiles(const cuda_choice *c, uint32_t n_out, uint32_t n_rows)
{
    const uint32_t width = c->tile_width ? c->tile_width : c->variant->max_width;

    return yard_ceil_div(n_out, GEMM_TILE_ROWS) * yard_ceil_div(n_rows, width);
}

/* Whole tiles: in as few rounds as can be, and the narrowest of those. A round streams as many
 * weights for few rows as for many, and they take most of its time. */
static cuda_choice whole_tiles(const cuda_stream *s, yard_dtype dtype, uint32_t n_out,
                               uint32_t n_rows)
{
    const bool bf16 = dtype == YARD_BF16;
    const yard_gemm_variant *few = bf16 ? &yard_gemm_few_bf16 : &yard_gemm_few_fp8;
    const cuda_choice candidates[] = {
        { few, 0, 32 },
        { few, 0, 64 },
        { few, 0, 96 },
        { bf16 ? &yard_gemm_rows128_bf16 : &yard_gemm_rows128, 0, 0 },
    };
    const uint32_t n_blocks = s->n_thread_blocks[yard_cuda_variant_idx(few)];
    uint32_t best = 0, best_rounds = UINT32_MAX;

    for (uint32_t i = 0; i < sizeof(candidates) / sizeof(candidates[0]); i++) {
        const uint32_t n_rounds =
            yard_ceil_div(count_tiles(&candidates[i], n_out, n_rows), n_blocks);
        if (n_rounds < best_rounds) {
            best = i;
            best_rounds = n_rounds;
        }
    }
    return candidates[best];
}

/* Shapes that nobody measured: K is cut where whole tiles leave too many processors without. */
static cuda_choice guess_linear(const cuda_stream *s, yard_dtype dtype, uint32_t n_out,
                                uint32_t n_rows)
{
    enum { ENOUGH_FEW = 100, ENOUGH_MANY = 90, MIN_BLOCKS = 8 };
    const cuda_choice c = whole_tiles(s, dtype, n_out, n_rows);

    if (count_tiles(&c, n_out, n_rows) >= (c.variant->splits ? ENOUGH_FEW : ENOUGH_MANY))
        return c;
    return (cuda_choice){ .variant = dtype == YARD_BF16 ? &yard_gemm_few_bf16 : &yard_gemm_few_fp8,
                          .min_blocks = MIN_BLOCKS,
                          .tile_width = n_rows > 32 ? 32 : 0 };
}

static cuda_choice choose_linear(const cuda_stream *s, yard_dtype dtype, uint32_t n_out,
                                 uint32_t n_in, uint32_t n_rows)
{
    const cuda_choice_row *r = s->rows ? find_row(s->rows, s->n_rows, dtype, n_out, n_in, n_rows)
                                       : find_row(yard_cuda_choices_h200, yard_cuda_n_choices_h200,
                                                  dtype, n_out, n_in, n_rows);
    const cuda_choice c = r ? r->choice : guess_linear(s, dtype, n_out, n_rows);

    /* without a cut of K all kernels have the same bits */
    return s->deterministic && c.min_blocks ? whole_tiles(s, dtype, n_out, n_rows) : c;
}

/* By the mean rows of a group: the widest tile that hardly any group exceeds; above that, tiles of
 * 128 or 192 rows where there are enough groups to fill the processors with them. Long tiles pay
 * when K is long. All kernels have the same bits. */
static cuda_choice choose_grouped(yard_dtype dtype, uint32_t mean_rows, uint32_t n_groups,
                                  uint32_t n_in)
{
    const bool short_k = n_in <= 4096;
    const yard_gemm_variant *variant;

    if (dtype == YARD_BF16)
        variant = &yard_gemm_group144_bf16;
    else if (mean_rows <= 72)
        variant = &yard_gemm_group96;
    else if (mean_rows <= 144)
        variant = n_groups >= 16 ? &yard_gemm_rows192 : &yard_gemm_group144;
    else if (short_k)
        variant = &yard_gemm_rows128;
    else if (mean_rows <= 320)
        variant = n_groups >= 8 ? &yard_gemm_rows128 : &yard_gemm_group144;
    else
        variant = &yard_gemm_rows192;
    return (cuda_choice){ .variant = variant };
}

cuda_choice yard_cuda_choose(const cuda_stream *s, yard_dtype dtype, uint32_t n_out, uint32_t n_in,
                             uint32_t n_groups, bool grouped, uint32_t n_rows)
{
    if (s->forced.variant && s->forced.variant->dtype == dtype &&
        !(grouped && s->forced.variant->splits))
        return s->forced;
    return grouped ? choose_grouped(dtype, n_rows / n_groups, n_groups, n_in)
                   : choose_linear(s, dtype, n_out, n_in, n_rows);
}
