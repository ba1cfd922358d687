/* Reading every stored value once, looking for those no computation survives. Private to the model
 * room. */
#ifndef YARD_MODEL_WEIGHTS_SCAN_H
#define YARD_MODEL_WEIGHTS_SCAN_H

#include "model/layout.h"
#include "model/safetensors.h"

/* What a tensor is to the model. */
typedef enum yard_tensor_role {
    YARD_ROLE_UNREAD,    /* nothing reads it: not scanned */
    YARD_ROLE_ELSEWHERE, /* another rank reads it: not scanned */
    YARD_ROLE_VALUES,    /* finite in its dtype */
    YARD_ROLE_SCALES     /* F32, finite and above zero */
} yard_tensor_role;

/* What is read of a tensor: all but the first two roles have rows and columns; a vector is one row.
 */
typedef struct yard_tensor_use {
    yard_tensor_role role;
    yard_span rows, cols;
} yard_tensor_use;

/* use: [tensor count]. Progress goes to the stage "weights", in bytes. Errors: YARD_EFORMAT naming
 * file, tensor and place of the first bad value; YARD_ENOMEM. */
yard_status yard_weights_scan(const yard_checkpoint *ckpt, const yard_tensor_use *use,
                              uint32_t n_threads, const yard_notify *notify, yard_error *err);

#endif
