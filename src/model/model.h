/* The model room's one header for its neighbours. */
#ifndef YARD_MODEL_H
#define YARD_MODEL_H

#include "model/architectures.h"
#include "model/chat_template.h"
#include "model/config.h"
#include "model/forward.h"
#include "model/identity.h"
#include "model/layout.h"
#include "model/memory.h"
#include "model/safetensors.h"
#include "model/schedule.h"
#include "model/synth.h"
#include "model/tokenizer.h"
#include "model/weights.h"

#endif
