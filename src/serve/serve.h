/* The serve room's one header for its neighbours. */
#ifndef YARD_SERVE_H
#define YARD_SERVE_H

#include "serve/engine_server.h"
#include "serve/front.h"
#include "serve/http.h"
#include "serve/pod_engine.h"
#include "serve/scheduler.h"

#endif
