/* What a group says when something goes wrong: which rank, in which call. */
#include <stdio.h>

#include "ep/ep_impl.h"

const char *yard_ep_error(const yard_ep *ep)
{
    return ep->err.message;
}

/* A rank that stopped keeps others from going on, and those keep others: whoever has not sent its
 * header is listed, the culprit among them. */
static void name_missing(const yard_ep_round *round, yard_sym sig, char *text, size_t n_bytes)
{
    const yard_ep *ep = round->ep;
    bool missing[YARD_EP_MAX_RANKS], any = false;
    char ranks[256];

    for (uint32_t s = 0; s < ep->n_ranks; s++) {
        missing[s] = yard_fabric_read_signal(ep->fabric, sig + s * 8) < round->epoch;
        any |= missing[s];
    }
    text[0] = '\0';
    if (!any)
        return;
    yard_ranks_text(ranks, sizeof(ranks), missing, ep->n_ranks);
    snprintf(text, n_bytes, "; missing: %s", ranks);
}

static yard_status broken(yard_ep *ep, yard_status st, const char *call, const char *missing)
{
    char awaited[YARD_ERROR_MESSAGE_BYTES], lost[48] = "";
    uint32_t first = 0;

    if (ep->status != YARD_OK)
        return ep->status;
    ep->status = st;
    snprintf(awaited, sizeof(awaited), "%s", yard_fabric_error(ep->fabric));
    /* the rank that was awaited may be a later victim of the one that was lost first */
    if (yard_fabric_poll(ep->fabric, &first) == YARD_EPEER &&
        strcmp(awaited, yard_fabric_error(ep->fabric)) != 0)
        snprintf(lost, sizeof(lost), "; lost first: rank %u", first);
    return yard_fail(&ep->err, st, "rank %u, %s: %s%s%s", ep->rank, call, awaited, lost, missing);
}

yard_status yard_ep_broken(yard_ep_round *round, yard_status st, const char *call, yard_sym sig)
{
    char missing[272] = "";

    if (sig != 0)
        name_missing(round, sig, missing, sizeof(missing));
    return broken(round->ep, st, call, missing);
}

yard_status yard_ep_poll(yard_ep *ep)
{
    if (ep->status == YARD_OK && ep->backend->look)
        ep->backend->look(ep);
    if (ep->status == YARD_OK && yard_fabric_poll(ep->fabric, NULL) != YARD_OK)
        return broken(ep, YARD_EPEER, "poll", "");
    return ep->status;
}

yard_status yard_ep_enter(yard_ep_round *round, round_state want, const char *call)
{
    static const char *const next_call[] = { [ROUND_IDLE] = "dispatch_send",
                                             [ROUND_DISPATCH_SENT] = "dispatch_recv",
                                             [ROUND_DISPATCHED] = "combine_send",
                                             [ROUND_COMBINE_SENT] = "combine_recv" };
    yard_ep *ep = round->ep;

    if (ep->status == YARD_OK && ep->backend->look)
        ep->backend->look(ep);
    if (ep->status != YARD_OK)
        return ep->status;
    if (round->state != want)
        return yard_fail(&ep->err, YARD_EINVAL, "%s: this round's next call is %s", call,
                         next_call[round->state]);
    return YARD_OK;
}
