/* Efficiencies from measurement files: rows of `switchyard bench --json`. */
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "plan/plan.h"

/* What a benchmark's name says about the class of its kernel. */
static const struct bench_name {
    const char *part;
    yard_plan_class cls;
} bench_names[] = {
    { "grouped", YARD_PLAN_GROUP_GEMM },
    { "group_gemm", YARD_PLAN_GROUP_GEMM },
    { "mla_prefill", YARD_PLAN_PREFILL_ATTENTION },
    { "mla_decode", YARD_PLAN_ATTENTION },
    { "attention", YARD_PLAN_ATTENTION },
    { "bmm", YARD_PLAN_BMM },
    { "head_linear", YARD_PLAN_BMM },
    { "linear", YARD_PLAN_GEMM },
    { "gemm", YARD_PLAN_GEMM },
    { "norm", YARD_PLAN_VECTOR },
    { "silu", YARD_PLAN_VECTOR },
    { "quant", YARD_PLAN_VECTOR },
    { "route", YARD_PLAN_VECTOR },
};

/* Floors are by the rates that a GPU keeps up under its power limit. Short runs are ahead of them
 * by this at most. */
static const double SHORT_RUN = 1.1;

typedef struct sums {
    double floor_us[YARD_PLAN_CLASS_COUNT], us[YARD_PLAN_CLASS_COUNT];
} sums;

/* Rows of `bench ops` name the operation in their case. */
static const struct bench_name *find_class(const char *bench, const json_t *row)
{
    const char *op = json_string_value(json_object_get(json_object_get(row, "case"), "op"));

    if (op)
        bench = op;
    for (size_t i = 0; i < sizeof(bench_names) / sizeof(bench_names[0]); i++)
        if (strstr(bench, bench_names[i].part))
            return &bench_names[i];
    return NULL;
}

/* "NVIDIA H200" holds the word h200. */
static bool names_gpu(const char *device, const char *gpu)
{
    const size_t n = strlen(gpu);

    for (; *device; device++)
        if (!strncasecmp(device, gpu, n) && !isalnum((unsigned char)device[n]))
            return true;
    return false;
}

static yard_status take_row(sums *s, const json_t *row, const yard_plan_gpu *gpu, const char *path,
                            uint32_t line, yard_error *err)
{
    const char *bench = json_string_value(json_object_get(row, "bench"));
    const char *device = json_string_value(json_object_get(row, "device"));
    const json_t *p50 = json_object_get(row, "p50_us"), *floor = json_object_get(row, "floor_us");
    const struct bench_name *name;

    if (!bench || !device || !json_is_number(p50))
        return yard_fail(err, YARD_EFORMAT, "%s:%u: want bench, device and p50_us", path, line);
    if (!names_gpu(device, gpu->name))
        return yard_fail(err, YARD_EINVAL,
                         "%s:%u: measured on '%s', the plan is for %s; legal: rows "
                         "whose device names %s",
                         path, line, device, gpu->name, gpu->name);
    name = find_class(bench, row);
    if (!name || !json_is_number(floor) || json_number_value(floor) <= 0 ||
        json_number_value(p50) <= 0 || !json_is_true(json_object_get(row, "verified")))
        return YARD_OK; /* another benchmark, or one without a floor */
    if (json_number_value(p50) * SHORT_RUN < json_number_value(floor))
        return yard_fail(err, YARD_EINVAL,
                         "%s:%u: %s took %g us, more than a tenth below its floor of %g: one of "
                         "them is wrong",
                         path, line, bench, json_number_value(p50), json_number_value(floor));
    s->floor_us[name->cls] += json_number_value(floor);
    s->us[name->cls] += json_number_value(p50);
    return YARD_OK;
}

static yard_status read_rows(sums *s, FILE *in, const yard_plan_gpu *gpu, const char *path,
                             yard_error *err)
{
    char *line = NULL;
    size_t size = 0;
    uint32_t number = 0;
    yard_status st = YARD_OK;

    while (!st && getline(&line, &size, in) > 0) {
        json_error_t why = { 0 };
        json_t *row;
        number++;
        if (line[strspn(line, " \t\r\n")] == '\0')
            continue;
        row = json_loads(line, 0, &why);
        st = row ? take_row(s, row, gpu, path, number, err)
                 : yard_fail(err, YARD_EFORMAT, "%s:%u: %s", path, number, why.text);
        json_decref(row);
    }
    free(line);
    return st;
}

yard_status yard_plan_profile_measure(yard_plan_profile *profile, const yard_plan_gpu *gpu,
                                      const char *path, yard_error *err)
{
    FILE *in = fopen(path, "rb");
    sums s = { 0 };
    uint32_t n_found = 0;
    yard_status st;

    if (!in)
        return yard_fail(err, YARD_EIO, "%s: cannot open: %s", path, strerror(errno));
    st = read_rows(&s, in, gpu, path, err);
    fclose(in);
    if (st)
        return st;
    for (uint32_t i = 0; i < YARD_PLAN_CLASS_COUNT; i++) {
        const double share = s.us[i] > 0 ? fmin(s.floor_us[i] / s.us[i], 1) : 0;
        if (share <= 0)
            continue;
        n_found++;
        profile->share[i] =
            (yard_plan_share){ share, share, 0, 0, YARD_PLAN_MEASURED, "bench rows" };
    }
    if (!n_found)
        return yard_fail(
            err, YARD_EINVAL,
            "%s: no verified row of a known kernel with a floor; legal "
            "names hold grouped, mla_decode, mla_prefill, attention, bmm, linear, gemm, "
            "norm, silu, quant or route",
            path);
    return YARD_OK;
}
