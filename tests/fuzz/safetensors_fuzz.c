/* Any bytes as a safetensors image: refused with a message, or every tensor lies inside. */
#include <stdlib.h>

#include "model/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static yard_status touch(void *ctx, const yard_tensor *t, yard_error *err)
{
    uint64_t *sum = ctx;
    uint64_t n = yard_dtype_bytes(t->dtype);

    (void)err;
    for (uint32_t i = 0; i < t->n_dims; i++)
        n *= t->shape[i];
    if (n != t->n_bytes)
        abort();
    for (size_t i = 0; i < t->n_bytes; i++)
        *sum += ((const uint8_t *)t->data)[i];
    return YARD_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t sum = 0;
    yard_error err = { 0 };
    const yard_status st = yard_safetensors_parse(data, size, "fuzz", touch, &sum, &err);

    if ((st == YARD_OK) == (err.message[0] != '\0'))
        abort();
    return 0;
}
