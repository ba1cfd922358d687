/* switchyard: one program, one command a file (cmd_<name>.c). */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "cli/cli.h"

static const struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *what;
} commands[] = {
    { "generate", yard_cmd_generate, "complete a prompt" },
    { "chat", yard_cmd_chat, "talk to a model in the terminal" },
    { "serve", yard_cmd_serve, "serve a model over HTTP with the API of OpenAI" },
    { "tokenize", yard_cmd_tokenize, "text to token ids and back" },
    { "template", yard_cmd_template, "chat messages to prompt text" },
    { "logits", yard_cmd_logits, "largest logits at every position of a prompt" },
    { "inspect", yard_cmd_inspect, "parameters, KV bytes and memory per rank of a model" },
    { "synth", yard_cmd_synth, "write a checkpoint with random weights" },
    { "bench", yard_cmd_bench, "measure speed" },
    { "engine", yard_cmd_engine, "run a model on this machine's ranks for fronts elsewhere" },
    { "run", yard_cmd_run, "start the ranks of a job on this machine" },
    { "plan", yard_cmd_plan, "predict what a deployment will give" },
};

enum { N_COMMANDS = sizeof(commands) / sizeof(commands[0]) };

static void print_help(FILE *to)
{
    fprintf(to,
            "Usage: switchyard COMMAND [ARGUMENT...]\n"
            "Serves Mixture-of-Experts language models of the DeepSeek-V3 kind.\n\nCommands:\n");
    for (int i = 0; i < N_COMMANDS; i++)
        fprintf(to, "  %-10s %s\n", commands[i].name, commands[i].what);
    fprintf(to, "\nExamples:\n"
                "  switchyard generate models/demo --prompt 'In the beginning' --max-tokens 32\n"
                "  switchyard chat models/demo\n"
                "  switchyard serve models/demo --port 8080\n"
                "\n'switchyard COMMAND --help' tells the arguments of one command.\n"
                "Exit codes: 0 done, 1 failed, 2 wrong usage.\n");
}

static const char *running = ""; /* the command's name, for check_stdout */

/* Whatever ends the program, --help within argp included, has its output written or fails. */
static void check_stdout(void)
{
    if (yard_cli_close_stdout(running) != EXIT_SUCCESS)
        _exit(EXIT_FAILURE);
}

/* A file that is opened must not take the place of a closed standard stream: messages would go
 * into it. The wrong direction keeps the stream's use an error. */
static void fill_standard_fds(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0)
            open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

int main(int argc, char **argv)
{
    fill_standard_fds();
    signal(SIGXFSZ, SIG_IGN); /* a limit on the size of files is a failed write, told as one */
    if (atexit(check_stdout) != 0)
        return EXIT_FAILURE;
    if (argc < 2) {
        print_help(stderr);
        return YARD_EXIT_USAGE;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "-?") ||
        !strcmp(argv[1], "help")) {
        print_help(stdout);
        return EXIT_SUCCESS; /* unless check_stdout has something to say */
    }
    if (!strcmp(argv[1], "--version") || !strcmp(argv[1], "-V")) {
        printf("switchyard %s\n", YARD_VERSION);
        return EXIT_SUCCESS;
    }
    for (int i = 0; i < N_COMMANDS; i++)
        if (!strcmp(argv[1], commands[i].name)) {
            running = commands[i].name;
            return commands[i].run(argc - 1, argv + 1);
        }
    fprintf(stderr, "switchyard: no command '%s'; 'switchyard --help' lists them\n", argv[1]);
    return YARD_EXIT_USAGE;
}
