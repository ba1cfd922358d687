/* What fabric/cuda/nvshmem.c needs of CUDA, on host memory: nvshmem_test.c. */
#ifndef YARD_TESTS_FAKE_CUDA_H
#define YARD_TESTS_FAKE_CUDA_H

#include <string.h>

typedef enum cudaError { cudaSuccess } cudaError_t;

static inline cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return cudaSuccess;
}

static inline cudaError_t cudaSetDevice(int device)
{
    (void)device;
    return cudaSuccess;
}

static inline cudaError_t cudaFree(void *p)
{
    (void)p;
    return cudaSuccess;
}

static inline cudaError_t cudaMemset(void *p, int value, size_t n_bytes)
{
    memset(p, value, n_bytes);
    return cudaSuccess;
}

static inline cudaError_t cudaDeviceSynchronize(void)
{
    return cudaSuccess;
}

static inline const char *cudaGetErrorString(cudaError_t rc)
{
    (void)rc;
    return "none";
}

#endif
