/* The virtual clock as a drawing: rows are resources, boxes are pieces of work. Written as SVG
 * without help, so that it is there on every machine. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "plan/plan.h"

enum { N_LAYERS = 3, MAX_EVENTS = 512, WIDTH = 1100, LEFT = 150, ROW = 26 };

typedef struct events {
    uint32_t n;
    yard_plan_event event[MAX_EVENTS];
} events;

static void keep(void *ctx, const yard_plan_event *event)
{
    events *list = ctx;

    if (event->rank_class == 0 && list->n < MAX_EVENTS)
        list->event[list->n++] = *event;
}

static const char *color_of(const yard_plan_event *e)
{
    static const struct {
        const char *what, *color;
    } colors[] = { { "projections", "#E69F00" },   { "attention", "#009E73" },
                   { "shared expert", "#CC79A7" }, { "experts", "#D55E00" },
                   { "dispatch", "#0072B2" },      { "combine", "#56B4E9" } };

    for (size_t i = 0; i < sizeof(colors) / sizeof(colors[0]); i++)
        if (!strcmp(colors[i].what, e->what))
            return colors[i].color;
    return "#bbbbbb"; /* copies */
}

static void draw_box(FILE *to, const yard_plan_event *e, double scale, double y)
{
    const double x = LEFT + e->start_us * scale, w = fmax(0.5, (e->end_us - e->start_us) * scale);
    const double top = y + (!strcmp(e->resource, "network") ? ROW + 4 : 0);

    fprintf(to,
            "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%d\" fill=\"%s\" stroke=\"#fff\" "
            "stroke-width=\"0.5\"><title>layer %u, half %c, stage %u: %s, %.0f to %.0f us</title>"
            "</rect>\n",
            x, top, w, ROW, color_of(e), e->layer, 'A' + (int)e->half, e->stage, e->what,
            e->start_us, e->end_us);
    if (w > 26)
        fprintf(to,
                "<text x=\"%.1f\" y=\"%.1f\" fill=\"#fff\" text-anchor=\"middle\">%c%u</text>\n",
                x + w / 2, top + ROW - 8, 'A' + (int)e->half, e->stage);
}

static void draw_legend(FILE *to, double y)
{
    static const char *const names[] = { "projections", "attention", "shared expert", "experts",
                                         "dispatch",    "combine",   "copies" };
    double x = LEFT;

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        const yard_plan_event e = { .what = names[i] };
        fprintf(to,
                "<rect x=\"%.0f\" y=\"%.0f\" width=\"12\" height=\"12\" fill=\"%s\"/>"
                "<text x=\"%.0f\" y=\"%.0f\">%s</text>\n",
                x, y, color_of(&e), x + 17, y + 11, names[i]);
        x += 30 + 7.5 * (double)strlen(names[i]);
    }
}

/* all: one list a schedule. */
static yard_status draw(FILE *to, const yard_plan_config *base, events *all, yard_error *err)
{
    double end[YARD_PLAN_SCHEDULE_COUNT] = { 0 }, longest = 1, y = 50;

    for (int s = 0; s < YARD_PLAN_SCHEDULE_COUNT; s++) {
        yard_plan_config c = *base;
        yard_status st;
        c.schedule = (yard_plan_schedule)s;
        all[s].n = 0;
        if ((st = yard_plan_timeline(&c, N_LAYERS, keep, &all[s], err)))
            return st;
        for (uint32_t i = 0; i < all[s].n; i++)
            end[s] = fmax(end[s], all[s].event[i].end_us);
        longest = fmax(longest, end[s]);
    }
    fprintf(
        to,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d "
        "%d\" font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%%\" height=\"100%%\" "
        "fill=\"#fff\"/>\n<text x=\"%d\" y=\"24\" font-size=\"16\">%d layers on %u x %s, EP %u, %u "
        "requests a group: letter = half of the batch, number = stage</text>\n",
        WIDTH, 50 + YARD_PLAN_SCHEDULE_COUNT * 95 + 40, WIDTH,
        50 + YARD_PLAN_SCHEDULE_COUNT * 95 + 40, 20, N_LAYERS, base->ep, base->gpu->name, base->ep,
        base->batch);
    for (int s = 0; s < YARD_PLAN_SCHEDULE_COUNT; s++) {
        fprintf(
            to,
            "<text x=\"20\" y=\"%.0f\" font-weight=\"bold\">%s, %.0f us</text>"
            "<text x=\"20\" y=\"%.0f\">compute</text><text x=\"20\" y=\"%.0f\">network</text>\n",
            y + 2, yard_plan_schedule_name((yard_plan_schedule)s), end[s], y + 26, y + 56);
        for (uint32_t i = 0; i < all[s].n; i++)
            draw_box(to, &all[s].event[i], (WIDTH - LEFT - 20) / longest, y + 8);
        y += 95;
    }
    draw_legend(to, y + 5);
    fprintf(to, "</svg>\n");
    return YARD_OK;
}

yard_status yard_plan_draw_timeline(const char *dir, const yard_plan_config *base, yard_error *err)
{
    events *all = calloc(YARD_PLAN_SCHEDULE_COUNT, sizeof(*all));
    FILE *f;
    yard_status st, closed;

    if (!all)
        return yard_fail(err, YARD_ENOMEM, "timeline: no memory");
    st = yard_plan_open(&f, dir, "timeline.svg", err);
    if (!st) {
        st = draw(f, base, all, err);
        closed = yard_plan_close(f, "timeline.svg", st ? NULL : err);
        st = st ? st : closed;
    }
    free(all);
    return st;
}
