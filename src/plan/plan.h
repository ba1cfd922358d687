/* What the files of the plan room share. */
#ifndef YARD_PLAN_ROOM_H
#define YARD_PLAN_ROOM_H

#include <jansson.h>
#include <stdio.h>

#include "base/base.h"
#include <yard/plan.h>

/* The share of a day's capacity that the prompts of an online service used: fitted to D1, a run of
 * the fit half (deployments.c). */
#define YARD_PLAN_ONLINE_OCCUPANCY 0.615

/* kernels.c */

/* The rows of one micro-batch, or of the whole batch. */
typedef struct yard_plan_rows {
    double tokens;   /* of a DP group */
    double requests; /* whose caches are read */
    double load;     /* this rank's share of expert rows over the mean */
} yard_plan_rows;

/* What differs between the kernels of a MoE layer, a dense layer and the draft module. */
typedef enum yard_plan_layer_kind {
    YARD_PLAN_MOE_LAYER,
    YARD_PLAN_DENSE_LAYER
} yard_plan_layer_kind;

/* All kernels of a layer with floors; returns how many. Times are not filled in. */
uint32_t yard_plan_layer_kernels(const yard_plan_config *c, yard_plan_layer_kind kind,
                                 yard_plan_rows rows,
                                 yard_plan_kernel kernels[YARD_PLAN_MAX_KERNELS]);

/* Final norm and output head over n_rows rows, as one kernel. */
yard_plan_kernel yard_plan_head_kernel(const yard_plan_config *c, double n_rows);
/* The projection that joins embedding and hidden state in a draft module. */
yard_plan_kernel yard_plan_draft_kernel(const yard_plan_config *c, double n_rows);

double yard_plan_active_experts(const yard_plan_config *c, double tokens_of_group);
double yard_plan_expert_rows(const yard_plan_config *c, double tokens); /* of one rank, mean */
uint32_t yard_plan_dp(const yard_plan_config *c);
uint32_t yard_plan_slots(const yard_plan_config *c); /* expert slots of one rank */
uint32_t yard_plan_weight_bits(const yard_plan_config *c);
double yard_plan_weight_bytes(uint32_t bits, double n, double k); /* of an [n, k] projection */
double yard_plan_kv_row_bytes(const yard_plan_config *c); /* of a token and layer, without TP */

/* network.c */

typedef struct yard_plan_wire {
    double latency_us; /* from the send to the first byte's arrival */
    double busy_us;    /* the link is taken */
    double kernel_us;  /* the device is taken, half of it by the send, half by the receive */
} yard_plan_wire;

/* Bytes a rank sends for tokens of its DP group, by link. */
void yard_plan_exchange_bytes(const yard_plan_config *c, double tokens, double bytes_per_row,
                              double *network_bytes, double *nvlink_bytes);
double yard_plan_network_rate(const yard_plan_config *c); /* bytes/s */
double yard_plan_dispatch_row_bytes(const yard_plan_config *c);
double yard_plan_combine_row_bytes(const yard_plan_config *c);

/* Dispatch or combine. copies_us: time of the buffer copies on the device, which a measured table
 * includes and the wire does not. */
yard_plan_wire yard_plan_exchange_time(const yard_plan_config *c, const yard_plan_kernel *k,
                                       double tokens, double copies_us);

/* efficiency.c */

/* Fills us and origin from the profile. */
void yard_plan_time_kernel(const yard_plan_config *c, yard_plan_kernel *k);

/* simulate.c */

/* Durations of the work of one micro-batch in one layer. */
typedef struct yard_plan_stage_times {
    double input_us, attend_us, send_us, shared_us, receive_copy_us, experts_us, combine_send_us;
    double combine_receive_us;
    yard_plan_wire dispatch, combine;
} yard_plan_stage_times;

enum { YARD_PLAN_MAX_RANK_CLASSES = 8 };

/* Ranks of equal load behave alike: one class stands for all of them. */
typedef struct yard_plan_work {
    uint32_t n_layers, n_classes;
    yard_plan_stage_times part[YARD_PLAN_MAX_RANK_CLASSES][2]; /* of each half; [0] of a whole */
} yard_plan_work;

typedef struct yard_plan_run {
    double total_us;                /* of all layers, on the slowest class */
    double dispatch_us, combine_us; /* of class 0 and one layer: copies, and waits for data */
    double wire_us, idle_us;        /* of class 0 and one layer */
} yard_plan_run;

typedef struct yard_plan_observer {
    void (*fn)(void *ctx, const yard_plan_event *event);
    void *ctx;
} yard_plan_observer;

/* Walks the schedule's table over the layers; observer may be NULL. */
void yard_plan_simulate(yard_plan_schedule schedule, const yard_plan_work *work,
                        const yard_plan_observer *observer, yard_plan_run *out);
uint32_t yard_plan_schedule_halves(yard_plan_schedule schedule);

/* memory.c, point.c */

yard_status yard_plan_check(const yard_plan_config *c, yard_error *err);
yard_status yard_plan_check_layout(const yard_plan_config *c, yard_error *err); /* EP, TP, slots */
bool yard_plan_is_legal(const yard_plan_config *c); /* of the layout, without words */
void yard_plan_fill_memory(const yard_plan_config *c, bool kv_b_on_all_ranks,
                           yard_plan_memory *out);

/* report_text.c, report_json.c */

/* Whether drafts are counted that nothing of the model makes. */
bool yard_plan_drafts_are_free(const yard_plan_config *c);
void yard_plan_print_point(FILE *to, const yard_plan_config *c, const yard_plan_result *r);
/* Checks and published runs; returns whether all gates hold. */
bool yard_plan_print_checks(FILE *to, const yard_plan_check_result *checks, uint32_t n);
bool yard_plan_print_deployments(FILE *to, const yard_plan_deployment *d, uint32_t n);
/* Whether the errors of the blind half are within the aim. */
bool yard_plan_deployments_pass(const yard_plan_deployment *d, uint32_t n);
/* Median and largest |error| of a half; those withheld do not count. */
void yard_plan_error_summary(const yard_plan_deployment *d, uint32_t n, yard_plan_half half,
                             double *median, double *worst);

/* NULL when memory ran out. The caller owns the value. */
json_t *yard_plan_json_point(const yard_plan_config *c, const yard_plan_result *r);

json_t *yard_plan_json_checks(const yard_plan_check_result *checks, uint32_t n);
json_t *yard_plan_json_deployments(const yard_plan_deployment *d, uint32_t n);

void yard_plan_print_sweep(FILE *to, const yard_plan_choice *list, uint32_t n, bool all);

/* advise.c */

typedef struct yard_plan_wish {
    double min_speed;               /* tokens/s a request; 0: any */
    double max_ttft_ms;             /* 0: any */
    uint32_t max_gpus;              /* of both pools; 0: any */
    uint32_t in_tokens, out_tokens; /* of a mean request */
    double occupancy;               /* of the prefill pool by its traffic */
} yard_plan_wish;

/* What a mean request needs of two separate pools. */
typedef struct yard_plan_pools {
    yard_plan_choice decode, prefill;
    bool has_prefill;
    double fastest_ttft_ms; /* of all prefill layouts that fit; 0: none does */
    double gpus_ratio;      /* prefill GPUs for one decode GPU */
    double requests_per_s;  /* of one decode group and its prefill */
    double usd_per_million; /* output tokens, both pools */
} yard_plan_pools;

/* The points, and the decision; pools may be NULL: "decision" is then null. */
json_t *yard_plan_json_sweep(const yard_plan_choice *list, uint32_t n,
                             const yard_plan_pools *pools);

/* The cheapest pair that meets the wish. Errors: YARD_EINVAL when none does, with what comes
 * nearest. */
yard_status yard_plan_choose(const yard_plan_choice *list, uint32_t n, const yard_plan_wish *wish,
                             yard_plan_pools *out, yard_error *err);

/* What to run, what bounds it, what would bound it next, what more machines bring. */
yard_status yard_plan_advise(FILE *to, const yard_plan_choice *list, uint32_t n,
                             const yard_plan_wish *wish, yard_error *err);

/* report_plot.c, report_timeline.c, report_html.c */

/* Write NAME.dat and NAME.gp into dir; `gnuplot NAME.gp` there makes NAME.svg and NAME.png. Errors:
 * YARD_EIO. */
yard_status yard_plan_plot_frontier(const char *dir, const yard_plan_choice *list, uint32_t n,
                                    yard_error *err);
yard_status yard_plan_plot_layer(const char *dir, const yard_plan_config *base, yard_error *err);
yard_status yard_plan_plot_crossover(const char *dir, const yard_plan_config *base,
                                     yard_error *err);
yard_status yard_plan_plot_roofline(const char *dir, const yard_plan_config *base, yard_error *err);
/* dir/timeline.svg: three layers of each schedule; needs no gnuplot. */
yard_status yard_plan_draw_timeline(const char *dir, const yard_plan_config *base, yard_error *err);

/* dir/report.html with the drawings that are in dir, everything in one file. */
yard_status yard_plan_write_html(const char *dir, const yard_plan_choice *list, uint32_t n,
                                 const yard_plan_wish *wish, yard_error *err);

/* Opens dir/name for writing. */
yard_status yard_plan_open(FILE **out, const char *dir, const char *name, yard_error *err);
/* Closes it; YARD_EIO if anything did not reach the disk. */
yard_status yard_plan_close(FILE *f, const char *name, yard_error *err);

/* scale.c */

typedef struct yard_plan_scale_row {
    yard_plan_config config;
    yard_plan_result result;
    double against_first; /* tokens/s a GPU over the first row's */
} yard_plan_scale_row;

enum { YARD_PLAN_MAX_SCALE = 16 };

/* Groups of ep[0..n) ranks, experts replicated where there are more ranks than experts, each with
 * its best schedule. EPs that no number of spare slots below one an expert makes legal are left
 * out. */
yard_status yard_plan_scale(const yard_plan_config *base, const uint32_t *ep, uint32_t n,
                            yard_plan_scale_row out[YARD_PLAN_MAX_SCALE], uint32_t *n_out,
                            yard_error *err);

/* A machine of a group is lost for an hour. */
typedef struct yard_plan_failure {
    uint32_t ep_before, ep_after; /* 0: no smaller legal group */
    double restart_s;
    double tokens_before, tokens_after; /* of that hour */
    double lost;                        /* share */
    double lost_with_spare;             /* if a spare machine takes its place after the restart */
} yard_plan_failure;
yard_status yard_plan_fail_node(const yard_plan_config *base, double restart_s,
                                yard_plan_failure *out, yard_error *err);

/* A day of traffic in 24 relative loads. */
typedef struct yard_plan_day {
    double requests_per_s[24];
    uint32_t groups[24];   /* decode groups that run */
    double group_capacity; /* requests/s */
    uint32_t peak_groups;
    double gpu_hours_fixed, gpu_hours_scaled; /* of the decode pool */
    double usd_fixed, usd_scaled, usd_per_million;
} yard_plan_day;
yard_status yard_plan_run_day(const yard_plan_config *base, const double shape[24],
                              double mean_requests_per_s, double out_tokens, double occupancy,
                              yard_plan_day *out, yard_error *err);

#endif
