/* Which processors a pool's threads may use. */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/pool.h"

/* "0-3,8": the processors of a NUMA node. False when there is no such node. */
static bool read_node(uint32_t node, cpu_set_t *set)
{
    char path[64];
    FILE *in;
    int first, last;

    CPU_ZERO(set);
    snprintf(path, sizeof(path), "/sys/devices/system/node/node%u/cpulist", node);
    in = fopen(path, "r");
    if (!in)
        return false;
    while (fscanf(in, "%d", &first) == 1) {
        last = first;
        if (fscanf(in, "-%d", &last) < 0)
            last = first;
        for (int cpu = first; cpu <= last && cpu < CPU_SETSIZE; cpu++)
            CPU_SET(cpu, set);
        if (fgetc(in) != ',')
            break;
    }
    fclose(in);
    return true;
}

/* The i-th processor of a set that has more than i. */
static int nth_cpu(const cpu_set_t *set, uint32_t i)
{
    int cpu = 0;

    for (;; cpu++)
        if (CPU_ISSET(cpu, set) && i-- == 0)
            return cpu;
}

enum { MAX_NODES = 64 };

/* The nodes that the process may use, cut to the processors it may use. */
static uint32_t find_nodes(const cpu_set_t *allowed, cpu_set_t *nodes)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < MAX_NODES; i++) {
        cpu_set_t node;

        if (!read_node(i, &node))
            continue; /* numbers may have gaps */
        CPU_AND(&node, &node, allowed);
        if (CPU_COUNT(&node) > 0)
            nodes[n++] = node;
    }
    if (n == 0)
        nodes[n++] = *allowed;
    return n;
}

yard_status yard_pool_pin(yard_pool *pool, yard_pin pin, yard_error *err)
{
    const uint32_t n_threads = yard_pool_thread_count(pool);
    cpu_set_t allowed, nodes[MAX_NODES];
    uint32_t n_nodes = 0;

    if (pin == YARD_PIN_NONE)
        return YARD_OK;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0)
        return yard_fail(err, YARD_EIO, "pin: cannot read the affinity mask");
    if (pin == YARD_PIN_CPU && n_threads > (uint32_t)CPU_COUNT(&allowed))
        return yard_fail(err, YARD_EINVAL, "pin: want at most %d threads, one a processor, got %u",
                         CPU_COUNT(&allowed), n_threads);
    if (pin == YARD_PIN_NODE)
        n_nodes = find_nodes(&allowed, nodes);
    for (uint32_t i = 0; i < n_threads; i++) {
        cpu_set_t set;

        CPU_ZERO(&set);
        if (pin == YARD_PIN_CPU)
            CPU_SET(nth_cpu(&allowed, i), &set);
        else /* neighbours share a node */
            set = nodes[(uint64_t)i * n_nodes / n_threads];
        if (pthread_setaffinity_np(yard_pool_thread(pool, i), sizeof(set), &set) != 0)
            return yard_fail(err, YARD_EIO, "pin: cannot bind thread %u of %u", i, n_threads);
    }
    return YARD_OK;
}
