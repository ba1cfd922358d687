/* What sampling keeps on the device between its thread blocks. See sample.cuh. */
#ifndef YARD_OPS_CUDA_SAMPLE_H
#define YARD_OPS_CUDA_SAMPLE_H

#include "ops/cuda/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Device memory of one stream: two of its samplings never run at the same time. */
typedef struct yard_sample_space {
    void *slots; /* of rows; NULL: no sampling */
    uint32_t max_rows;
    uint32_t n_room; /* thread blocks that run at once */
} yard_sample_space;

/* For up to max_rows rows. */
size_t yard_cuda_sample_bytes(uint32_t max_rows);
/* Allocates and clears. Errors: YARD_ENOMEM, YARD_EDEVICE; yard_cuda_sample_close frees what there
 * is. */
yard_status yard_cuda_sample_open(yard_sample_space *space, uint32_t max_rows, yard_error *err);
void yard_cuda_sample_close(yard_sample_space *space);

yard_status yard_cuda_sample_launch(const yard_sample_args *a, const yard_sample_space *space,
                                    void *stream, yard_error *err);

#ifdef __cplusplus
}
#endif

#endif
