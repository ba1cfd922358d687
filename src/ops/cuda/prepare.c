/* Weights to the device, once, in the layout of the kernels: matrices under one another, rows and
 * columns padded with zeros, one scale for each tile of 128 rows and block of 128 columns. A matrix
 * whose blocks do not fall on such tiles keeps one scale a row, and runs on the plain kernel. */
#include <stdlib.h>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "ops/cuda/cuda.h"
#include "ops/cuda/heads.h"

_Static_assert(sizeof(yard_tensor_map) == sizeof(CUtensorMap), "an opaque CUtensorMap");

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                              const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                              const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static yard_status encode(yard_tensor_map *out, const void *data, uint32_t element_bytes,
                          uint32_t n_dims, const cuuint64_t *dims, const cuuint64_t *strides,
                          const cuuint32_t *box, yard_error *err)
{
    const cuuint32_t steps[4] = { 1, 1, 1, 1 };
    void *fn = NULL;
    enum cudaDriverEntryPointQueryResult found;
    CUresult code;

    /* the driver's library is not linked: programs start where there is none */
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000, cudaEnableDefault,
                                         &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess)
        return yard_fail(err, YARD_EDEVICE, "cuda: the driver has no cuTensorMapEncodeTiled");
    code = ((encode_fn)fn)((CUtensorMap *)out,
                           element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                              : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                           n_dims, (void *)data, dims, strides, box, steps,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (code != CUDA_SUCCESS)
        return yard_fail(err, YARD_EDEVICE,
                         "cuda: tensor map of %llu rows, %llu columns, %llu bytes a row: error %d",
                         (unsigned long long)dims[1], (unsigned long long)dims[0],
                         (unsigned long long)strides[0], (int)code);
    return YARD_OK;
}

yard_status yard_cuda_encode_map(yard_tensor_map *out, const void *data, uint32_t element_bytes,
                                 uint64_t n_rows, uint64_t n_cols, uint64_t ld_bytes,
                                 uint32_t box_rows, yard_error *err)
{
    const cuuint64_t dims[2] = { n_cols, n_rows ? n_rows : 1 }, strides[1] = { ld_bytes };
    const cuuint32_t box[2] = { GEMM_BLOCK_BYTES / element_bytes, box_rows };

    return encode(out, data, element_bytes, 2, dims, strides, box, err);
}

yard_status yard_cuda_encode_chunks(yard_tensor_map *out, const void *data, uint64_t n_rows,
                                    uint32_t n_chunks, uint64_t ld_bytes, uint32_t box_rows,
                                    uint32_t box_chunks, yard_error *err)
{
    const cuuint64_t dims[3] = { GEMM_BLOCK_BYTES / 2, n_rows, n_chunks };
    const cuuint64_t strides[2] = { ld_bytes, GEMM_BLOCK_BYTES };
    const cuuint32_t box[3] = { GEMM_BLOCK_BYTES / 2, box_rows, box_chunks };

    return encode(out, data, 2, 3, dims, strides, box, err);
}

yard_status yard_cuda_encode_heads(yard_tensor_map *out, const void *data, uint64_t n_rows,
                                   uint32_t n_heads, uint32_t head_ld, uint32_t ld,
                                   uint32_t n_chunks, uint32_t box_heads, yard_error *err)
{
    const cuuint64_t dims[4] = { GEMM_BLOCK_BYTES / 2, n_heads, n_rows, n_chunks };
    const cuuint64_t strides[3] = { 2 * (cuuint64_t)head_ld, 2 * (cuuint64_t)ld, GEMM_BLOCK_BYTES };
    const cuuint32_t box[4] = { GEMM_BLOCK_BYTES / 2, box_heads, 1, n_chunks };

    return encode(out, data, 2, 4, dims, strides, box, err);
}

/* ---- shapes ---------------------------------------------------------------------------------- */

static const float *scale_row(const yard_matrix *w, size_t row)
{
    return w->scale + (w->row0 + row) / w->block_rows * w->scale_ld + w->col0 / YARD_GROUP;
}

/* Rows [first, first + n) lie in one row of blocks. */
static bool one_block(const yard_matrix *w, uint32_t first, uint32_t n)
{
    return (w->row0 + first) / w->block_rows == (w->row0 + first + n - 1) / w->block_rows;
}

static bool tiles_have_one_scale(const yard_matrix *w, uint32_t first, uint32_t n_rows,
                                 uint32_t tile)
{
    for (uint32_t r = 0; r < n_rows; r += tile)
        if (!one_block(w, first + r, n_rows - r < tile ? n_rows - r : tile))
            return false;
    return true;
}

static bool can_tile(const yard_prepare_args *a)
{
    uint32_t row = 0;

    if (a->parts[0].dtype != YARD_FP8_E4M3 && a->parts[0].dtype != YARD_BF16)
        return false;
    for (uint32_t i = 0; i < a->n_matrices * a->n_parts; i++) {
        const yard_matrix *w = &a->parts[i];
        if (i % a->n_parts == 0)
            row = 0;
        if (w->dtype == YARD_FP8_E4M3 &&
            (row % GEMM_TILE_ROWS || !tiles_have_one_scale(w, 0, w->rows, GEMM_TILE_ROWS)))
            return false;
        row += w->rows;
    }
    return true;
}

static yard_status check_parts(const yard_prepare_args *a, yard_error *err)
{
    if (a->n_matrices == 0 || a->n_parts == 0)
        return yard_fail(err, YARD_EINVAL, "prepare: want matrices, got %u of %u parts",
                         a->n_matrices, a->n_parts);
    for (uint32_t i = 0; i < a->n_matrices * a->n_parts; i++) {
        const yard_matrix *w = &a->parts[i], *like = &a->parts[i % a->n_parts];
        if (w->dtype != a->parts[0].dtype || w->cols != a->parts[0].cols || w->rows != like->rows)
            return yard_fail(
                err, YARD_EINVAL, "prepare: matrix %u, part %u: want %s [%u, %u], got %s [%u, %u]",
                i / a->n_parts, i % a->n_parts, yard_dtype_name(a->parts[0].dtype), like->rows,
                a->parts[0].cols, yard_dtype_name(w->dtype), w->rows, w->cols);
    }
    return YARD_OK;
}

/* ---- copies ---------------------------------------------------------------------------------- */

static yard_status to_device(void **out, const void *host, size_t n_bytes, yard_error *err)
{
    cudaError_t code = cudaMalloc(out, n_bytes);

    if (code != cudaSuccess)
        return yard_fail(err, YARD_ENOMEM, "prepare: %zu bytes of device memory: %s", n_bytes,
                         cudaGetErrorString(code));
    code = host ? cudaMemcpy(*out, host, n_bytes, cudaMemcpyHostToDevice) : cudaSuccess;
    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "prepare: copy: %s", cudaGetErrorString(code));
    return YARD_OK;
}

/* The stacked parts of one matrix, padded. */
static void stack_values(const struct yard_prepared *p, const yard_matrix *parts, uint32_t n_parts,
                         uint8_t *to)
{
    const size_t bytes = yard_dtype_bytes(p->all.dtype), row_bytes = p->all.ld * bytes;

    for (uint32_t i = 0; i < n_parts; i++)
        for (uint32_t r = 0; r < parts[i].rows; r++, to += row_bytes)
            memcpy(to, (const uint8_t *)parts[i].data + (size_t)r * parts[i].ld * bytes,
                   p->cols * bytes);
}

/* Its scales: one row of them for each block_rows rows. */
static void stack_scales(const struct yard_prepared *p, const yard_matrix *parts, uint32_t n_parts,
                         float *to)
{
    for (uint32_t i = 0; i < n_parts; i++)
        for (uint32_t r = 0; r < parts[i].rows; r += p->all.block_rows, to += p->all.scale_ld)
            memcpy(to, scale_row(&parts[i], r), p->all.scale_ld * sizeof(float));
}

static yard_status copy_values(struct yard_prepared *p, const yard_prepare_args *a, yard_error *err)
{
    const size_t bytes = (size_t)p->padded_rows * p->all.ld * yard_dtype_bytes(p->all.dtype);
    uint8_t *host = calloc(1, bytes);
    void *device = NULL;
    yard_status st;

    if (!host)
        return yard_fail(err, YARD_ENOMEM, "prepare: %zu bytes", bytes);
    st = to_device(&device, NULL, bytes * p->n_matrices, err);
    p->all.data = device;
    for (uint32_t i = 0; i < p->n_matrices && st == YARD_OK; i++) {
        cudaError_t code;
        stack_values(p, a->parts + (size_t)i * a->n_parts, a->n_parts, host);
        code = cudaMemcpy((uint8_t *)device + i * bytes, host, bytes, cudaMemcpyHostToDevice);
        if (code != cudaSuccess)
            st = yard_fail(err, YARD_EDEVICE, "prepare: copy: %s", cudaGetErrorString(code));
    }
    free(host);
    return st;
}

static yard_status copy_scales(struct yard_prepared *p, const yard_prepare_args *a, yard_error *err)
{
    const size_t each = (size_t)p->padded_rows / p->all.block_rows * p->all.scale_ld;
    float *host = calloc(p->n_matrices, each * sizeof(float));
    void *device = NULL;
    yard_status st;

    if (!host)
        return yard_fail(err, YARD_ENOMEM, "prepare: %zu bytes", each * sizeof(float));
    for (uint32_t i = 0; i < p->n_matrices; i++)
        stack_scales(p, a->parts + (size_t)i * a->n_parts, a->n_parts, host + i * each);
    st = to_device(&device, host, p->n_matrices * each * sizeof(float), err);
    p->all.scale = device;
    free(host);
    return st;
}

/* ---- the transposed form of k_b -------------------------------------------------------------- */

static bool can_absorb(const yard_matrix *w, const yard_head_linear_args *h)
{
    if (w->dtype == YARD_BF16)
        return h->head_rows > 0;
    if (w->dtype != YARD_FP8_E4M3 || h->head_rows == 0 || h->head_rows > HEADS_MAX_K)
        return false;
    for (uint32_t i = 0; i < h->n_heads; i++)
        if (!tiles_have_one_scale(w, i * h->head_stride + h->head_offset, h->head_rows, YARD_GROUP))
            return false;
    return true;
}

static void transpose_values(const struct yard_prepared *p, const yard_matrix *w, uint32_t first,
                             uint8_t *to)
{
    const size_t bytes = yard_dtype_bytes(w->dtype);

    for (uint32_t r = 0; r < p->absorb.cols; r++)
        for (uint32_t c = 0; c < w->cols; c++)
            memcpy(to + ((size_t)c * p->absorb.ld + r) * bytes,
                   (const uint8_t *)w->data + ((size_t)(first + r) * w->ld + c) * bytes, bytes);
}

static void transpose_scales(const struct yard_prepared *p, const yard_matrix *w, uint32_t first,
                             float *scale)
{
    for (uint32_t c = 0; c < w->cols; c += YARD_GROUP)
        for (uint32_t r = 0; r < p->absorb.cols; r += YARD_GROUP)
            scale[c / YARD_GROUP * p->absorb.scale_ld + r / YARD_GROUP] =
                scale_row(w, first + r)[c / YARD_GROUP];
}

static yard_status copy_absorb_values(struct yard_prepared *p, const yard_matrix *w,
                                      const yard_head_linear_args *h, yard_error *err)
{
    const uint32_t bytes = (uint32_t)yard_dtype_bytes(w->dtype);
    const size_t row_bytes = (size_t)p->absorb.ld * bytes, n_bytes = p->absorb.rows * row_bytes;
    uint8_t *host = calloc(1, n_bytes);
    void *device = NULL;
    yard_status st;

    if (!host)
        return yard_fail(err, YARD_ENOMEM, "prepare: %zu bytes", n_bytes);
    for (uint32_t i = 0; i < h->n_heads; i++)
        transpose_values(p, w, i * h->head_stride + h->head_offset,
                         host + (size_t)i * p->absorb_step * row_bytes);
    st = to_device(&device, host, n_bytes, err);
    p->absorb.data = device;
    free(host);
    if (st == YARD_OK)
        st = yard_cuda_encode_map(&p->absorb_map, device, bytes, p->absorb.rows, p->absorb.ld,
                                  row_bytes, bytes == 1 ? GEMM_W_BOX : GEMM_TILE_ROWS, err);
    return st;
}

static yard_status copy_absorb_scales(struct yard_prepared *p, const yard_matrix *w,
                                      const yard_head_linear_args *h, yard_error *err)
{
    const size_t step = (size_t)p->absorb_step / YARD_GROUP * p->absorb.scale_ld;
    float *host = calloc(h->n_heads, step * sizeof(float));
    void *device = NULL;
    yard_status st;

    if (!host)
        return yard_fail(err, YARD_ENOMEM, "prepare: %zu bytes", h->n_heads * step * sizeof(float));
    for (uint32_t i = 0; i < h->n_heads; i++)
        transpose_scales(p, w, i * h->head_stride + h->head_offset, host + i * step);
    st = to_device(&device, host, h->n_heads * step * sizeof(float), err);
    p->absorb.scale = device;
    free(host);
    return st;
}

static yard_status copy_absorb(struct yard_prepared *p, const yard_matrix *w,
                               const yard_head_linear_args *h, yard_error *err)
{
    const uint32_t block = GEMM_BLOCK_BYTES / (uint32_t)yard_dtype_bytes(w->dtype);
    const uint32_t ld = (uint32_t)yard_align_up(h->head_rows, block);
    yard_status st;

    p->absorb_step = (uint32_t)yard_align_up(w->cols, GEMM_TILE_ROWS);
    p->absorb = (yard_matrix){ .dtype = w->dtype,
                               .rows = p->absorb_step * h->n_heads,
                               .cols = h->head_rows,
                               .ld = ld,
                               .scale_ld = yard_group_count(ld),
                               .block_rows = YARD_GROUP };
    st = copy_absorb_values(p, w, h, err);
    if (st == YARD_OK && w->dtype == YARD_FP8_E4M3)
        st = copy_absorb_scales(p, w, h, err);
    return st;
}

/* ---- the whole ------------------------------------------------------------------------------- */

static void lay_out(struct yard_prepared *p, const yard_prepare_args *a)
{
    const yard_dtype dtype = a->parts[0].dtype;
    const uint32_t piece = 16 / (uint32_t)yard_dtype_bytes(dtype);

    p->n_matrices = a->n_matrices;
    for (uint32_t i = 0; i < a->n_parts; i++)
        p->rows += a->parts[i].rows;
    p->cols = a->parts[0].cols;
    p->padded_rows = (uint32_t)yard_align_up(p->rows, GEMM_TILE_ROWS);
    p->tiled = can_tile(a);
    p->all = (yard_matrix){ .dtype = dtype,
                            .rows = p->n_matrices * p->padded_rows,
                            .cols = p->cols,
                            .ld = (uint32_t)yard_align_up(p->cols, piece),
                            .scale_ld = yard_group_count(p->cols),
                            .block_rows = p->tiled ? YARD_GROUP : 1 };
}

yard_status yard_cuda_prepare(struct yard_prepared **out, yard_matrix *w, yard_stream s,
                              const yard_prepare_args *a, yard_error *err)
{
    struct yard_prepared *p = NULL;
    yard_status st = check_parts(a, err);

    if (st != YARD_OK)
        return st;
    p = calloc(1, sizeof(*p));
    if (!p)
        return yard_fail(err, YARD_ENOMEM, "prepare: %zu bytes", sizeof(*p));
    lay_out(p, a);
    st = copy_values(p, a, err);
    if (st == YARD_OK && p->all.dtype == YARD_FP8_E4M3)
        st = copy_scales(p, a, err);
    if (st == YARD_OK && p->tiled)
        st = yard_cuda_encode_map(&p->map, p->all.data, (uint32_t)yard_dtype_bytes(p->all.dtype),
                                  p->all.rows, p->cols, p->all.ld * yard_dtype_bytes(p->all.dtype),
                                  GEMM_TILE_ROWS, err);
    if (st == YARD_OK && p->tiled)
        st = yard_cuda_encode_map(&p->half_map, p->all.data,
                                  (uint32_t)yard_dtype_bytes(p->all.dtype), p->all.rows, p->cols,
                                  p->all.ld * yard_dtype_bytes(p->all.dtype), GEMM_W_BOX, err);
    if (st == YARD_OK && a->absorb && a->n_matrices * a->n_parts == 1 &&
        can_absorb(a->parts, a->absorb))
        st = copy_absorb(p, a->parts, a->absorb, err);
    if (st != YARD_OK) {
        yard_cuda_release_prepared(s, p);
        return st;
    }
    for (uint32_t i = 0; i < p->n_matrices; i++) {
        w[i] = p->all;
        w[i].rows = p->rows;
        w[i].data = (const uint8_t *)p->all.data +
                    (size_t)i * p->padded_rows * p->all.ld * yard_dtype_bytes(p->all.dtype);
        w[i].row0 = 0;
        if (p->all.scale)
            w[i].scale += (size_t)i * p->padded_rows / p->all.block_rows * p->all.scale_ld;
        w[i].prepared = p;
        w[i].prepared_idx = i;
    }
    *out = p;
    return YARD_OK;
}

void yard_cuda_release_prepared(yard_stream s, struct yard_prepared *prepared)
{
    (void)s;
    if (!prepared)
        return;
    cudaFree((void *)prepared->all.data);
    cudaFree((void *)prepared->all.scale);
    cudaFree((void *)prepared->absorb.data);
    cudaFree((void *)prepared->absorb.scale);
    free(prepared);
}
