/* What products by strips have in common: how they ask for the next panel meanwhile. */
#ifndef YARD_OPS_CPU_STRIPS_H
#define YARD_OPS_CPU_STRIPS_H

#include "ops/cpu/cpu.h"

static inline uint32_t chunks_of(uint32_t n_k)
{
    return (n_k + CHUNK - 1) / CHUNK;
}

/* What is left to ask for of a piece ahead: from `at` to the end of a row, and the rows after. */
typedef struct fetcher {
    const piece_ahead *piece;
    const uint8_t *at, *row_end;
    uint32_t n_rows, lines_per_tile;
} fetcher;

static inline fetcher start_fetch(const piece_ahead *p, uint32_t n_tiles)
{
    const uint32_t n_lines = p->n_rows * yard_ceil_div(p->n_bytes, 64);

    return (fetcher){ .piece = p,
                      .at = p->first,
                      .row_end = p->first + p->n_bytes,
                      .n_rows = p->n_rows,
                      .lines_per_tile = yard_ceil_div(n_lines, n_tiles) };
}

/* A few lines with every tile: all at once would wait for each other, and products for them. */
static inline void fetch_some(fetcher *f)
{
    for (uint32_t i = 0; i < f->lines_per_tile && f->n_rows > 0; i++) {
        __builtin_prefetch(f->at, 0, 2);
        f->at += 64;
        if (f->at >= f->row_end) {
            f->at = f->row_end - f->piece->n_bytes + f->piece->ld_bytes;
            f->row_end += f->piece->ld_bytes;
            f->n_rows--;
        }
    }
}

#endif
