/* Configs that differ between two ranks, for people. */
#include <stdio.h>

#include "fabric/fabric_impl.h"

static size_t item_length(const char *list)
{
    const char *end = strstr(list, ", ");

    return end ? (size_t)(end - list) : strlen(list);
}

static const char *next_item(const char *list, size_t n)
{
    return list[n] ? list + n + 2 : list + n;
}

/* The items of a list that are not the same at the same place of the other. */
static void different_items(const char *list, const char *other, char *text, size_t n_text)
{
    size_t n = 0;

    text[0] = '\0';
    while (*list && n < n_text) {
        const size_t n_mine = item_length(list), n_theirs = item_length(other);

        if (n_mine != n_theirs || memcmp(list, other, n_mine) != 0)
            n += (size_t)snprintf(text + n, n_text - n, "%s%.*s", n ? ", " : "", (int)n_mine, list);
        list = next_item(list, n_mine);
        other = next_item(other, n_theirs);
    }
}

yard_status yard_fabric_config_differs(const yard_rank_config *a, const yard_rank_config *b,
                                       yard_error *err)
{
    char of_a[YARD_CONFIG_TEXT_BYTES / 2], of_b[YARD_CONFIG_TEXT_BYTES / 2];

    different_items(a->text, b->text, of_a, sizeof(of_a));
    different_items(b->text, a->text, of_b, sizeof(of_b));
    if (of_a[0] || of_b[0])
        return yard_fail(err, YARD_EINVAL,
                         "fabric: config: rank %u has '%s', rank %u has '%s'; want the same on all "
                         "ranks",
                         a->rank, of_a, b->rank, of_b);
    return yard_fail(err, YARD_EINVAL,
                     "fabric: config: hash %llx on rank %u, %llx on rank %u; want the same on all "
                     "ranks",
                     (unsigned long long)a->hash, a->rank, (unsigned long long)b->hash, b->rank);
}
