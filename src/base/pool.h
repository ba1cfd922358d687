/* Private to base: what pin.c needs to know of a pool. */
#ifndef YARD_BASE_POOL_H
#define YARD_BASE_POOL_H

#include <pthread.h>

#include "base/base.h"

/* Thread 0 is the one that calls. */
pthread_t yard_pool_thread(const yard_pool *pool, uint32_t thread_idx);

#endif
