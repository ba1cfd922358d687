/* switchyard bench: the list of benchmarks. */
#include <stdio.h>
#include <stdlib.h>

#include "cli/bench.h"

static const struct benchmark {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *what;
} benchmarks[] = {
    { "ep", yard_bench_ep, "dispatch and combine, beside MPI, memcpy and plain sockets" },
    { "ops", yard_bench_ops, "every operation, beside what the hardware could do at best" },
    { "load", yard_bench_load, "every rank binding and checking its share of a checkpoint" },
    { "roofline", yard_bench_roofline, "products of a layer on a GPU, as roofline plots" },
    { "engine", yard_bench_engine, "prefill and decode of a model, tokens/s" },
    { "serve", yard_bench_serve, "load on a running server: time to first token, tokens/s" },
};

enum { N_BENCHMARKS = sizeof(benchmarks) / sizeof(benchmarks[0]) };

static void print_help(FILE *to)
{
    fprintf(to, "Usage: switchyard bench BENCHMARK [ARGUMENT...]\n"
                "Measures speed, after a warm-up and with verified results.\n\nBenchmarks:\n");
    for (int i = 0; i < N_BENCHMARKS; i++)
        fprintf(to, "  %-10s %s\n", benchmarks[i].name, benchmarks[i].what);
    fprintf(to, "\nWith --json each row is one JSON object on a line of its own; rows worth\n"
                "keeping lie under bench/results/ and become the tables of docs/performance.md.\n"
                "\nExamples:\n"
                "  switchyard bench engine\n"
                "  switchyard bench ops --model deepseek-v3 --tokens 1,16\n"
                "  switchyard bench ep --device cpu --tokens 1,128\n"
                "  switchyard bench engine models/demo --threads 1,2 --json\n"
                "\n'switchyard bench BENCHMARK --help' tells the arguments of one.\n");
}

int yard_cmd_bench(int argc, char **argv)
{
    if (argc < 2) {
        print_help(stderr);
        return YARD_EXIT_USAGE;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "-?")) {
        print_help(stdout);
        return yard_cli_close_stdout("bench");
    }
    for (int i = 0; i < N_BENCHMARKS; i++)
        if (!strcmp(argv[1], benchmarks[i].name))
            return benchmarks[i].run(argc - 1, argv + 1);
    return yard_cli_usage("bench", "no benchmark '%s'", argv[1]);
}
