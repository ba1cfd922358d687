/* Small types that several public headers share. */
#ifndef YARD_TYPES_H
#define YARD_TYPES_H

typedef enum yard_dtype {
    YARD_F32,
    YARD_BF16,
    YARD_F16,
    YARD_FP8_E4M3, /* OCP e4m3fn: no infinities, 0x7f and 0xff are NaN, largest value 448 */
    YARD_DTYPE_COUNT
} yard_dtype;

/* Activation groups: one scale per 128 values of a row, counted from the row's first element;
 * a short last group has its own scale. */
enum { YARD_GROUP = 128 };

/* An ordered queue of work of one backend. libyard-ops opens them; libyard-ep takes NULL on the
 * CPU, where every call is complete when it returns, and a cudaStream_t on GPUs. */
typedef struct yard_stream_s *yard_stream;

/* Where threads may run: anywhere; each on a processor of its own; each on all processors of one
 * NUMA node, the threads dealt evenly to the nodes. Always within the affinity mask that the
 * process was started with. */
typedef enum yard_pin { YARD_PIN_NONE, YARD_PIN_CPU, YARD_PIN_NODE } yard_pin;

#endif
