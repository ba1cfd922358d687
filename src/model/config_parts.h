/* The parts of config.json's reader that have files of their own. Private to the model room. */
#ifndef YARD_MODEL_CONFIG_PARTS_H
#define YARD_MODEL_CONFIG_PARTS_H

#include "model/config.h"
#include "model/json_reader.h"

/* config.json and generation_config.json are a few kilobytes; more is not one of them. */
enum { YARD_CONFIG_MAX_BYTES = 1 << 20 };

/* Rotary embedding: rope_theta with rope_scaling, or rope_parameters (the newer spelling).
 * Failures stick in r. */
void yard_config_read_rope(yard_model_config *c, yard_json_reader *r, const yard_notify *notify);

/* Adds the ids of eos_token_id (one, a list, or none), each below n_vocab, to eos. */
void yard_config_read_eos(int32_t *eos, uint32_t *n_eos, uint32_t n_vocab, yard_json_reader *r);

#endif
