/* Whether the heaps of a node fit into its memory. The system does not say: it promises more than
 * there is, and ends some process, not always the guilty one, when the pages are touched. */
#include <stdio.h>
#include <stdlib.h>

#include "fabric/fabric_impl.h"

/* A line "NAME: n kB" of /proc/meminfo in bytes; 0 without it. */
static uint64_t read_meminfo(const char *name)
{
    FILE *file = fopen("/proc/meminfo", "re");
    const size_t n_name = strlen(name);
    char line[128];
    uint64_t n_bytes = 0;

    if (!file)
        return 0;
    while (fgets(line, sizeof(line), file))
        if (!strncmp(line, name, n_name) && line[n_name] == ':')
            n_bytes = strtoull(line + n_name + 1, NULL, 10) * 1024;
    fclose(file);
    return n_bytes;
}

/* The number in a file; UINT64_MAX when there is none ("max", no such file). */
static uint64_t read_limit(const char *path)
{
    FILE *file = fopen(path, "re");
    unsigned long long n = UINT64_MAX;

    if (file) {
        if (fscanf(file, "%llu", &n) != 1)
            n = UINT64_MAX;
        fclose(file);
    }
    return n;
}

/* Least limit of a control group and those above it. group: its path, "/a/b"; cut short here. */
static uint64_t least_limit(const char *mount, char *group, const char *file)
{
    uint64_t least = UINT64_MAX;

    for (char *end = group + strlen(group); end; end = strrchr(group, '/')) {
        char path[1024];
        uint64_t limit;

        *end = '\0';
        snprintf(path, sizeof(path), "%s%s/%s", mount, group, file);
        limit = read_limit(path);
        least = limit < least ? limit : least;
    }
    return least;
}

/* What this process's control group (a container's, a batch job's) may use at most. */
static uint64_t group_limit(void)
{
    FILE *file = fopen("/proc/self/cgroup", "re");
    uint64_t least = UINT64_MAX;
    char line[768];

    while (file && fgets(line, sizeof(line), file)) {
        char *group = strstr(line, ":/");
        uint64_t limit = UINT64_MAX;

        line[strcspn(line, "\n")] = '\0';
        if (group && !strncmp(line, "0::", 3))
            limit = least_limit("/sys/fs/cgroup", group + 1, "memory.max");
        else if (group && strstr(line, ":memory:"))
            limit = least_limit("/sys/fs/cgroup/memory", group + 1, "memory.limit_in_bytes");
        least = limit < least ? limit : least;
    }
    if (file)
        fclose(file);
    return least;
}

yard_status yard_memory_check(const yard_fabric *f, yard_error *err)
{
    const uint64_t there = read_meminfo("MemAvailable") + read_meminfo("SwapFree");
    const uint64_t limit = group_limit();
    uint32_t n_here = 1; /* this one */

    for (uint32_t r = 0; r < f->n_ranks; r++)
        n_here += r != f->rank && f->peers[r].node == f->peers[f->rank].node;
    if (there > 0 && f->heap_bytes > there / n_here)
        return yard_fail(err, YARD_ENOMEM,
                         "fabric: heap: want %u x %zu bytes for the ranks of this node, there are "
                         "%llu of free memory",
                         n_here, f->heap_bytes, (unsigned long long)there);
    if (f->heap_bytes > limit / n_here)
        return yard_fail(err, YARD_ENOMEM,
                         "fabric: heap: want %u x %zu bytes for the ranks of this node, its "
                         "control group (container, batch job) may use %llu",
                         n_here, f->heap_bytes, (unsigned long long)limit);
    return YARD_OK;
}
