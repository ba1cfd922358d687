/* A checkpoint's tensors, memory-mapped: one model.safetensors or shards with an index. */
#ifndef YARD_MODEL_SAFETENSORS_H
#define YARD_MODEL_SAFETENSORS_H

#include "base/base.h"

enum { YARD_MAX_DIMS = 4 };

typedef struct yard_tensor {
    const char *name;
    const char *file; /* the shard, for messages */
    yard_dtype dtype;
    uint32_t n_dims;
    uint64_t shape[YARD_MAX_DIMS];
    const void *data; /* in the mapping; little-endian, dense, row-major. May be unaligned to its
                         element size only if the file is (such files are refused) */
    size_t n_bytes;
} yard_tensor;

typedef struct yard_checkpoint yard_checkpoint;

/* Maps every shard of dir and checks every header: sizes, dtypes, offsets that overlap or leave
 * the file, names stored twice, names that the index lacks or misplaces. Errors: YARD_EIO,
 * YARD_EFORMAT (one line naming file and tensor), YARD_ENOMEM. */
yard_status yard_checkpoint_open(yard_checkpoint **out, const char *dir, const yard_notify *notify,
                                 yard_error *err);
void yard_checkpoint_close(yard_checkpoint *ckpt); /* NULL is fine; mappings end here */

uint32_t yard_checkpoint_tensor_count(const yard_checkpoint *ckpt);
const yard_tensor *yard_checkpoint_tensor(const yard_checkpoint *ckpt, uint32_t tensor_idx);
/* NULL when there is none. Owned by the checkpoint. */
const yard_tensor *yard_checkpoint_find(const yard_checkpoint *ckpt, const char *name);

/* Checks one safetensors image in memory, calling each(ctx, tensor) per tensor (fuzzing, tests). */
yard_status yard_safetensors_parse(const void *image, size_t n_bytes, const char *file,
                                   yard_status (*each)(void *ctx, const yard_tensor *t,
                                                       yard_error *err),
                                   void *ctx, yard_error *err);

#endif
