/* One operation of libyard-ops: a row divided by its root mean square, as bf16-rounded FP8.
 *   cc ops.c $(pkg-config --cflags --libs yard-ops) -o ops && ./ops        (or ./ops cuda) */
#include <stdio.h>

#include <yard/ops.h>

enum { N_COLS = 128 };

int main(int argc, char **argv)
{
    const yard_ops *ops = yard_ops_find(argc > 1 ? argv[1] : "cpu");
    const yard_ops_config config = { .n_threads = 1,
                                     .limits = { .max_tokens = 1, .max_in = N_COLS } };
    struct { /* in the device's memory */
        float x[N_COLS], weight[N_COLS], scale;
        int32_t n_rows;
        uint8_t y[N_COLS];
    } host = { .n_rows = 1 }, *device = NULL;
    yard_stream s = NULL;
    yard_error err = { 0 };

    for (int i = 0; i < N_COLS; i++) {
        host.x[i] = i % 2 ? 3 : -3;
        host.weight[i] = 1;
    }
    if (!ops || ops->open(&s, &config, &err) ||
        ops->allocate((void **)&device, s, sizeof(host), &err) ||
        ops->upload(s, device, &host, sizeof(host), &err))
        return fprintf(stderr, "ops: %s\n", ops ? err.message : "no such table"), 1;
    ops->rms_norm_quant(
        s, &(yard_rms_norm_args){
               .n_rows = &device->n_rows, .n_cols = N_COLS, .eps = 1e-6f,
               .x = { YARD_F32, N_COLS, device->x, NULL },
               .weight_dtype = YARD_F32, .weight = device->weight,
               .y = { .quant = { YARD_FP8_E4M3, N_COLS, device->y, &device->scale } } });
    if (ops->download(s, &host, device, sizeof(host), &err) || ops->check(s, &err))
        return fprintf(stderr, "ops: %s\n", err.message), 1;
    printf("%s: x[1] became code 0x%02x times %g\n", ops->describe(s), host.y[1], host.scale);
    ops->release(s, device);
    ops->close(s);
    return 0;
}
