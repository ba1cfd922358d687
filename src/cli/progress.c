/* Warnings and progress on stderr. */
#include <stdio.h>
#include <unistd.h>

#include "cli/cli.h"

enum { BAR_CELLS = 30, TERMINAL_PERIOD_US = 100000, LINE_PERIOD_US = 5000000 };

enum { BAR_COLUMNS = BAR_CELLS + 24 };

static struct {
    uint64_t last_us; /* when something was last shown; 0: nothing of this stage yet */
    uint64_t begin_us;
    bool shown;
    bool bar; /* one is on the terminal now */
} state;

void yard_cli_clear_bar(void)
{
    if (state.bar)
        fprintf(stderr, "\r%*s\r", BAR_COLUMNS, "");
    state.bar = false;
}

static void warn(void *ctx, const char *line)
{
    (void)ctx;
    yard_cli_clear_bar();
    fprintf(stderr, "switchyard: %s\n", line);
}

static void draw_bar(const char *what, uint64_t done, uint64_t total)
{
    const int filled = total ? (int)((double)done / (double)total * BAR_CELLS) : BAR_CELLS;

    fprintf(stderr, "\r%-12s [%.*s%*s] %3.0f%%", what, filled, "##############################",
            BAR_CELLS - filled, "", total ? 100.0 * (double)done / (double)total : 100.0);
    state.bar = true;
    if (done == total)
        yard_cli_clear_bar();
}

/* Nothing is shown for a stage that ends within the first period. */
static void progress(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    const bool terminal = isatty(STDERR_FILENO);
    const uint64_t now = yard_now_us();
    const bool end = done == total;

    (void)ctx;
    if (state.last_us == 0)
        state.begin_us = state.last_us = now;
    if (now - state.last_us >= (uint64_t)(terminal ? TERMINAL_PERIOD_US : LINE_PERIOD_US) ||
        (end && state.shown)) {
        state.last_us = now;
        state.shown = true;
        if (terminal)
            draw_bar(what, done, total);
        else
            fprintf(stderr, "%s: %.0f%% after %.0f s\n", what,
                    total ? 100.0 * (double)done / (double)total : 100.0,
                    (double)(now - state.begin_us) * 1e-6);
    }
    if (end) {
        state.last_us = 0;
        state.shown = false;
    }
}

const yard_notify *yard_cli_notify(void)
{
    static const yard_notify notify = { .warn = warn, .progress = progress };

    return &notify;
}
