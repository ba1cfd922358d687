/* Devices and links: the built-in tables, and users' files. */
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>

#include "plan/plan.h"

#define GPU(...)                                                                                   \
    {                                                                                              \
        .size = sizeof(yard_plan_gpu), __VA_ARGS__                                                 \
    }

/* Rates are dense and of one direction. Prices are round figures of cloud offers, to be replaced by
 * the user's with --price; the H800's is the 2 USD that its owner computes with. */
static const yard_plan_gpu gpus[] = {
    GPU(.name = "h100", .hbm_gb = 80, .hbm_bytes_per_s = 3.35e12, .fp8_flops = 1979e12,
        .bf16_flops = 989.4e12, .nvlink_bytes_per_s = 450e9, .network_bytes_per_s = 50e9,
        .gpus_per_node = 8, .gpus_per_island = 8, .price_per_hour = 2.5,
        .origin = YARD_PLAN_PUBLISHED,
        .source = "deployment article (80 GB, 3.35 TB/s, FP8 1979); BF16 989.4 from vendor pages"),
    GPU(.name = "h200", .hbm_gb = 141, .hbm_bytes_per_s = 4.8e12, .fp8_flops = 1979e12,
        .bf16_flops = 989.4e12, .nvlink_bytes_per_s = 450e9, .network_bytes_per_s = 50e9,
        .gpus_per_node = 8, .gpus_per_island = 8, .price_per_hour = 3.0,
        .origin = YARD_PLAN_PUBLISHED,
        .source = "deployment article (141 GB); vendor figures (4.8 TB/s, compute as H100)"),
    GPU(.name = "h800", .hbm_gb = 80, .hbm_bytes_per_s = 3.35e12, .fp8_flops = 1979e12,
        .bf16_flops = 989.4e12, .nvlink_bytes_per_s = 200e9, .network_bytes_per_s = 50e9,
        .gpus_per_node = 8, .gpus_per_island = 8, .price_per_hour = 2.0,
        .origin = YARD_PLAN_PUBLISHED, .price_origin = YARD_PLAN_PUBLISHED,
        .source = "FlashMLA deep dive (3.35 TB/s, 990 TFLOP/s); NVLink 400 GB/s both ways; price "
                  "from DeepSeek's day 6 overview"),
    GPU(.name = "h20", .hbm_gb = 96, .hbm_bytes_per_s = 4.0e12, .fp8_flops = 296e12,
        .bf16_flops = 148e12, .nvlink_bytes_per_s = 450e9, .network_bytes_per_s = 50e9,
        .gpus_per_node = 8, .gpus_per_island = 8, .price_per_hour = 1.5,
        .origin = YARD_PLAN_ASSUMED, .source = "vendor figures as commonly quoted, not checked"),
    GPU(.name = "b200", .hbm_gb = 180, .hbm_bytes_per_s = 7.67e12, .fp8_flops = 4500e12,
        .bf16_flops = 2250e12, .fp4_flops = 9000e12, .nvlink_bytes_per_s = 900e9,
        .network_bytes_per_s = 50e9, .gpus_per_node = 8, .gpus_per_island = 8,
        .price_per_hour = 5.0, .origin = YARD_PLAN_PUBLISHED,
        .source =
            "MLPerf v6.0 system file (180 GB); bus width x clock (7.67 TB/s); secondary table "
            "(FP8, BF16); FP4 taken as twice FP8"),
    GPU(.name = "gb200", .hbm_gb = 186, .hbm_bytes_per_s = 8.0e12, .fp8_flops = 5000e12,
        .bf16_flops = 2500e12, .fp4_flops = 10000e12, .nvlink_bytes_per_s = 900e9,
        .network_bytes_per_s = 50e9, .gpus_per_node = 4, .gpus_per_island = 72,
        .price_per_hour = 6.0, .origin = YARD_PLAN_PUBLISHED,
        .source = "GB200 NVL72 rack figures / 72 (vendor); FP4 taken as twice FP8; 400 Gb/s a GPU "
                  "between islands assumed"),
};

/* A NIC that a processor thread must drive for the GPU is later by about the difference that
 * pplx-garden's tables show between EFA and ConnectX-7 at 128 tokens (EP16 to EP64: 75 to 105 us
 * in dispatch, 56 to 82 us in combine). */
static const yard_plan_nic nics[] = {
    { .size = sizeof(yard_plan_nic),
      .name = "cx7",
      .bytes_per_s = 50e9,
      .origin = YARD_PLAN_PUBLISHED,
      .source = "ConnectX-7, 400 Gb/s a GPU (DeepEP docs/legacy.md)" },
    { .size = sizeof(yard_plan_nic),
      .name = "efa",
      .bytes_per_s = 50e9,
      .extra_latency_us = 75,
      .origin = YARD_PLAN_PUBLISHED,
      .source = "AWS p5/p5e/p5en, 3,200 Gb/s an instance; latency from pplx-garden's tables" },
    { .size = sizeof(yard_plan_nic),
      .name = "cx8",
      .bytes_per_s = 100e9,
      .origin = YARD_PLAN_ASSUMED,
      .source = "800 Gb/s a GPU, not checked" },
};

enum { N_GPUS = sizeof(gpus) / sizeof(gpus[0]), N_NICS = sizeof(nics) / sizeof(nics[0]) };

const yard_plan_gpu *yard_plan_gpu_at(uint32_t i)
{
    return i < N_GPUS ? &gpus[i] : NULL;
}

const yard_plan_gpu *yard_plan_gpu_find(const char *name)
{
    for (uint32_t i = 0; i < N_GPUS; i++)
        if (!strcmp(gpus[i].name, name))
            return &gpus[i];
    return NULL;
}

const yard_plan_nic *yard_plan_nic_at(uint32_t i)
{
    return i < N_NICS ? &nics[i] : NULL;
}

const yard_plan_nic *yard_plan_nic_find(const char *name)
{
    for (uint32_t i = 0; i < N_NICS; i++)
        if (!strcmp(nics[i].name, name))
            return &nics[i];
    return NULL;
}

/* Numbers of the file; the bounds keep out slips of unit (GB for bytes, sparse PFLOP/s). */
static const struct gpu_field {
    const char *key;
    size_t offset;
    bool whole, optional;
    double min, max;
} gpu_fields[] = {
    { "hbm_gb", offsetof(yard_plan_gpu, hbm_gb), false, false, 1, 4096 },
    { "hbm_bytes_per_s", offsetof(yard_plan_gpu, hbm_bytes_per_s), false, false, 1e10, 1e15 },
    { "fp8_flops", offsetof(yard_plan_gpu, fp8_flops), false, false, 1e11, 1e18 },
    { "bf16_flops", offsetof(yard_plan_gpu, bf16_flops), false, false, 1e11, 1e18 },
    { "fp4_flops", offsetof(yard_plan_gpu, fp4_flops), false, true, 0, 1e18 },
    { "nvlink_bytes_per_s", offsetof(yard_plan_gpu, nvlink_bytes_per_s), false, false, 1e8, 1e14 },
    { "network_bytes_per_s", offsetof(yard_plan_gpu, network_bytes_per_s), false, false, 1e7,
      1e14 },
    { "gpus_per_node", offsetof(yard_plan_gpu, gpus_per_node), true, false, 1, 4096 },
    { "gpus_per_island", offsetof(yard_plan_gpu, gpus_per_island), true, true, 1, 4096 },
    { "price_per_hour", offsetof(yard_plan_gpu, price_per_hour), false, true, 0, 1e4 },
};

enum { N_GPU_FIELDS = sizeof(gpu_fields) / sizeof(gpu_fields[0]) };

static const struct gpu_field *find_field(const char *key)
{
    for (uint32_t i = 0; i < N_GPU_FIELDS; i++)
        if (!strcmp(gpu_fields[i].key, key))
            return &gpu_fields[i];
    return NULL;
}

static void list_fields(char *text, size_t n_bytes)
{
    size_t at = 0;

    text[0] = '\0';
    for (uint32_t i = 0; i < N_GPU_FIELDS && at < n_bytes; i++)
        at += (size_t)snprintf(text + at, n_bytes - at, ", %s", gpu_fields[i].key);
}

static yard_status store_field(yard_plan_gpu *gpu, const struct gpu_field *f, const json_t *value,
                               const char *path, yard_error *err)
{
    const double x = json_number_value(value);

    if (!json_is_number(value) || !isfinite(x) || x < f->min || x > f->max ||
        (f->whole && x != floor(x)))
        return yard_fail(err, YARD_EFORMAT, "%s: %s: want a %snumber from %g to %g", path, f->key,
                         f->whole ? "whole " : "", f->min, f->max);
    if (f->whole)
        *(uint32_t *)(void *)((char *)gpu + f->offset) = (uint32_t)x;
    else
        *(double *)(void *)((char *)gpu + f->offset) = x;
    return YARD_OK;
}

/* Names get into tables, scripts of gnuplot and HTML. */
static bool is_name(const char *text)
{
    const size_t n = text ? strlen(text) : 0;

    return n > 0 && n < YARD_PLAN_NAME_BYTES &&
           strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.") == n;
}

static yard_status read_gpu(yard_plan_gpu *gpu, json_t *object, const char *path, yard_error *err)
{
    char legal[320];
    const char *key;
    json_t *value;
    yard_status st = YARD_OK;

    if (!json_is_object(object))
        return yard_fail(err, YARD_EFORMAT, "%s: want a JSON object", path);
    if (!is_name(json_string_value(json_object_get(object, "name"))))
        return yard_fail(err, YARD_EFORMAT,
                         "%s: name: want 1 to %zu letters, digits, '-', '_' or '.'", path,
                         sizeof(gpu->name) - 1);
    snprintf(gpu->name, sizeof(gpu->name), "%s",
             json_string_value(json_object_get(object, "name")));
    if (!json_object_get(object, "price_per_hour"))
        gpu->price_origin = YARD_PLAN_ASSUMED; /* 0: reports say that there is none */
    json_object_foreach(object, key, value)
    {
        const struct gpu_field *f = find_field(key);
        if (!strcmp(key, "name"))
            continue;
        if (!f) {
            list_fields(legal, sizeof(legal));
            return yard_fail(err, YARD_EFORMAT, "%s: unknown field %s; legal: name%s", path, key,
                             legal);
        }
        if ((st = store_field(gpu, f, value, path, err)))
            return st;
    }
    for (uint32_t i = 0; i < N_GPU_FIELDS; i++)
        if (!gpu_fields[i].optional && !json_object_get(object, gpu_fields[i].key))
            return yard_fail(err, YARD_EFORMAT, "%s: %s is missing", path, gpu_fields[i].key);
    if (!gpu->gpus_per_island)
        gpu->gpus_per_island = gpu->gpus_per_node;
    return YARD_OK;
}

yard_status yard_plan_gpu_load(yard_plan_gpu *out, const char *path, yard_error *err)
{
    yard_plan_gpu gpu = { .size = sizeof(gpu),
                          .origin = YARD_PLAN_GIVEN,
                          .price_origin = YARD_PLAN_GIVEN,
                          .source = "user's file" };
    json_error_t why = { 0 };
    FILE *in = fopen(path, "rb");
    json_t *object;
    yard_status st;

    if (!in)
        return yard_fail(err, YARD_EIO, "%s: cannot open: %s", path, strerror(errno));
    object = json_loadf(in, JSON_REJECT_DUPLICATES, &why);
    fclose(in);
    if (!object)
        return yard_fail(err, YARD_EFORMAT, "%s:%d: %s", path, why.line, why.text);
    st = read_gpu(&gpu, object, path, err);
    json_decref(object);
    if (!st)
        *out = gpu;
    return st;
}
