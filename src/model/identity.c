#include "model/identity.h"

#include <sha2.h>
#include <stdio.h>

enum { N_SAMPLES = 64, SAMPLE_BYTES = 256 };

static yard_status add_config(SHA2_CTX *sha, const char *dir, yard_error *err)
{
    char path[4096];
    uint8_t bytes[4096];
    FILE *file;
    size_t n;
    bool failed;

    snprintf(path, sizeof(path), "%s/config.json", dir);
    file = fopen(path, "rb");
    if (!file)
        return yard_fail(err, YARD_EIO, "%s: cannot be read", path);
    while ((n = fread(bytes, 1, sizeof(bytes), file)) > 0)
        SHA256Update(sha, bytes, n);
    failed = ferror(file) != 0;
    fclose(file);
    return failed ? yard_fail(err, YARD_EIO, "%s: cannot be read", path) : YARD_OK;
}

static void add_shape(SHA2_CTX *sha, const yard_tensor *t)
{
    char line[600];
    int n = snprintf(line, sizeof(line), "%.400s %d", t->name, (int)t->dtype);

    for (uint32_t d = 0; d < t->n_dims; d++)
        n += snprintf(line + n, sizeof(line) - (size_t)n, " %llu", (unsigned long long)t->shape[d]);
    SHA256Update(sha, (const uint8_t *)line, (size_t)n + 1);
}

yard_status yard_checkpoint_identity(const yard_checkpoint *ckpt, const char *dir,
                                     char out[YARD_IDENTITY_BYTES], yard_error *err)
{
    const uint32_t n = yard_checkpoint_tensor_count(ckpt);
    uint8_t digest[SHA256_DIGEST_LENGTH];
    SHA2_CTX sha;
    yard_status st;

    SHA256Init(&sha);
    st = add_config(&sha, dir, err);
    if (st != YARD_OK)
        return st;
    for (uint32_t i = 0; i < n; i++)
        add_shape(&sha, yard_checkpoint_tensor(ckpt, i));
    for (uint32_t i = 0; i < N_SAMPLES && n > 0; i++) {
        const yard_tensor *t =
            yard_checkpoint_tensor(ckpt, (uint32_t)((uint64_t)i * n / N_SAMPLES));
        SHA256Update(&sha, t->data, t->n_bytes < SAMPLE_BYTES ? t->n_bytes : SAMPLE_BYTES);
    }
    SHA256Final(digest, &sha);
    for (uint32_t i = 0; i < 16; i++)
        snprintf(out + (size_t)2 * i, 3, "%02x", digest[i]);
    return YARD_OK;
}
