/* libyard-ep without an engine: every rank sends eight tokens to random experts, each expert doubles
 * its rows, and the weighted sums come back.
 *
 *   cc examples/ep.c $(pkg-config --cflags --libs yard-ep) -o ep && switchyard run --ranks 4 -- ./ep
 */
#include <stdio.h>
#include <stdlib.h>

#include <yard/ep.h>

enum { HIDDEN = 1024, TOKENS = 8, TOP_K = 2 };

static int failed(const char *what, const char *why)
{
    fprintf(stderr, "%s: %s\n", what, why);
    return 1;
}

int main(void)
{
    yard_ep_config config = YARD_EP_CONFIG_INIT;
    yard_ep_capacity capacity;
    yard_error err = { 0 };
    yard_ep *ep = NULL;
    static float x[TOKENS][HIDDEN], y[TOKENS][HIDDEN], weight[TOKENS][TOP_K];
    int32_t expert[TOKENS][TOP_K], count[16], n_tokens = TOKENS;

    config.n_experts = 16;
    config.top_k = TOP_K;
    config.hidden = HIDDEN;
    config.max_tokens = TOKENS;
    config.dispatch = config.input = config.combine = YARD_EP_F32;
    if (yard_ep_create(&ep, &config, &err) != YARD_OK) /* rank and size from the environment */
        return failed("create", err.message);
    yard_ep_capacity_of(&config, yard_ep_size(ep), &capacity, NULL);
    float *rows = calloc(capacity.expert_x_rows * HIDDEN, sizeof(*rows));
    if (!rows)
        return failed("rows", "no memory");

    srand(yard_ep_rank(ep) + 1);
    for (int t = 0; t < TOKENS; t++) {
        for (int i = 0; i < HIDDEN; i++)
            x[t][i] = (float)(t + 1);
        expert[t][0] = rand() % 8;
        expert[t][1] = 8 + rand() % 8;
        weight[t][0] = weight[t][1] = 0.5f;
    }

    yard_ep_round *round = yard_ep_get_round(ep, 0);
    yard_status st = yard_ep_dispatch_send(round, x, NULL, &expert[0][0], &weight[0][0], &n_tokens,
                                           NULL);
    if (st == YARD_OK)
        st = yard_ep_dispatch_recv(round, rows, NULL, count, NULL, NULL);
    for (uint64_t i = 0; i < capacity.expert_x_rows * HIDDEN; i++)
        rows[i] *= 2; /* the experts; rows beyond the counts are nobody's */
    if (st == YARD_OK)
        st = yard_ep_combine_send(round, rows, NULL);
    if (st == YARD_OK)
        st = yard_ep_combine_recv(round, y, NULL);
    if (st != YARD_OK)
        return failed("exchange", yard_ep_error(ep));
    printf("rank %u of %u (%s): token 3 came back as %g, want %g\n", yard_ep_rank(ep),
           yard_ep_size(ep), yard_ep_describe(ep), (double)y[3][0], 2.0 * (double)x[3][0]);
    free(rows);
    yard_ep_destroy(ep);
    return 0;
}
