/* A small checkpoint in a temporary directory, and ways to spoil it. One shard, one dense layer,
 * one MoE layer, one MTP module; edge blocks are partial. */
#ifndef YARD_TESTS_SMALL_CHECKPOINT_H
#define YARD_TESTS_SMALL_CHECKPOINT_H

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <jansson.h>

#include "model/model.h"

static const char small_shard[] = "model-00001-of-000001.safetensors";

static inline yard_model_config small_config(void)
{
    return (yard_model_config){
        .family = "deepseek_v3",
        .vocab = 96,
        .hidden = 160,
        .n_layers = 2,
        .n_dense_layers = 1,
        .n_heads = 2,
        .n_kv_heads = 2,
        .q_rank = 64,
        .kv_rank = 48,
        .nope_dims = 32,
        .rope_dims = 16,
        .v_dims = 32,
        .dense_inter = 200,
        .expert_inter = 72,
        .n_experts = 4,
        .n_shared_experts = 1,
        .top_k = 2,
        .n_groups = 2,
        .top_groups = 1,
        .router_bias = true,
        .normalise_topk = true,
        .routed_scale = 2.827f,
        .norm_eps = 1e-5f,
        .rope_theta = 50000,
        .max_positions = 512,
        .n_mtp = 1,
        .mtp_reads_normed_hidden = true,
        .plain_bytes = 2,
        .fp8 = true,
        .block_rows = 128,
        .bos = 3,
        .eos = { 1, 2 },
        .n_eos = 2,
    };
}

static inline void small_path(char path[256], const char *dir, const char *name)
{
    snprintf(path, 256, "%s/%s", dir, name);
}

/* Removes the directory and its files. */
static inline void small_remove(const char *dir)
{
    DIR *list = opendir(dir);
    char path[512];

    for (const struct dirent *e; list && (e = readdir(list));) {
        if (e->d_name[0] == '.')
            continue;
        snprintf(path, sizeof(path), "%s/%s", dir, e->d_name);
        unlink(path);
    }
    if (list)
        closedir(list);
    rmdir(dir);
}

/* The whole file, malloc'd. */
static inline uint8_t *small_read(const char *dir, const char *name, size_t *n_bytes)
{
    char path[256];
    uint8_t *bytes;
    long size;
    FILE *f;

    small_path(path, dir, name);
    f = fopen(path, "rb");
    if (!f || fseek(f, 0, SEEK_END) != 0 || (size = ftell(f)) < 8)
        abort();
    rewind(f);
    *n_bytes = (size_t)size;
    bytes = malloc(*n_bytes);
    if (!bytes || fread(bytes, 1, *n_bytes, f) != *n_bytes)
        abort();
    fclose(f);
    return bytes;
}

static inline void small_write(const char *dir, const char *name, const void *bytes, size_t n_bytes)
{
    char path[256];
    FILE *f;

    small_path(path, dir, name);
    f = fopen(path, "wb");
    if (!f || fwrite(bytes, 1, n_bytes, f) != n_bytes || fclose(f) != 0)
        abort();
}

/* The shard taken apart. */
typedef struct small_image {
    json_t *header;
    uint8_t *bytes, *data; /* bytes: the whole file; data: in it */
    size_t n_data;
} small_image;

static inline small_image small_open(const char *dir)
{
    size_t n_bytes;
    uint64_t n_header;
    small_image im = { .bytes = small_read(dir, small_shard, &n_bytes) };

    memcpy(&n_header, im.bytes, 8);
    im.header = json_loadb((char *)im.bytes + 8, n_header, 0, NULL);
    im.data = im.bytes + 8 + n_header;
    im.n_data = n_bytes - 8 - n_header;
    return im;
}

/* Writes it again and releases it. */
static inline void small_close(const char *dir, small_image *im)
{
    char *text = json_dumps(im->header, JSON_COMPACT);
    const uint64_t n_header = yard_align_up(strlen(text), 8);
    uint8_t *out = malloc(8 + n_header + im->n_data);

    memcpy(out, &n_header, 8);
    memset(out + 8, ' ', n_header);
    memcpy(out + 8, text, strlen(text));
    memcpy(out + 8 + n_header, im->data, im->n_data);
    small_write(dir, small_shard, out, 8 + n_header + im->n_data);
    free(out);
    free(text);
    json_decref(im->header);
    free(im->bytes);
}

/* Changes the header's entry of a tensor; dtype and shape are JSON texts, NULL keeps one. */
static inline void small_retype(const char *dir, const char *tensor, const char *dtype,
                                const char *shape)
{
    small_image im = small_open(dir);
    json_t *entry = json_object_get(im.header, tensor);

    if (!entry)
        abort();
    if (dtype)
        json_object_set_new(entry, "dtype", json_loads(dtype, JSON_DECODE_ANY, NULL));
    if (shape)
        json_object_set_new(entry, "shape", json_loads(shape, JSON_DECODE_ANY, NULL));
    small_close(dir, &im);
}

static inline void small_move_key(json_t *object, const char *old, const char *new)
{
    json_t *value = json_object_get(object, old);

    if (!value || json_object_set(object, new, value) || json_object_del(object, old))
        abort();
}

/* Gives a tensor another name, in the shard and in the index. */
static inline void small_rename(const char *dir, const char *old, const char *new)
{
    static const char index_name[] = "model.safetensors.index.json";
    small_image im = small_open(dir);
    size_t n_bytes;
    uint8_t *bytes = small_read(dir, index_name, &n_bytes);
    json_t *index = json_loadb((char *)bytes, n_bytes, 0, NULL);
    char *text;

    small_move_key(im.header, old, new);
    small_close(dir, &im);
    small_move_key(json_object_get(index, "weight_map"), old, new);
    text = json_dumps(index, 0);
    small_write(dir, index_name, text, strlen(text));
    free(text);
    json_decref(index);
    free(bytes);
}

/* Overwrites n bytes of a tensor's data. */
static inline void small_poke(const char *dir, const char *tensor, size_t byte_at,
                              const void *value, size_t n)
{
    small_image im = small_open(dir);
    const json_t *offsets = json_object_get(json_object_get(im.header, tensor), "data_offsets");

    memcpy(im.data + json_integer_value(json_array_get(offsets, 0)) + byte_at, value, n);
    small_close(dir, &im);
}

#endif
