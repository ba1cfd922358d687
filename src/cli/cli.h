/* What the commands of the program share. A command gets its own argv (argv[0] is its name) and
 * returns the exit code: 0, EXIT_FAILURE (1) or YARD_EXIT_USAGE (2). */
#ifndef YARD_CLI_H
#define YARD_CLI_H

#include "base/base.h"

enum { YARD_EXIT_USAGE = 2 };

int yard_cmd_tokenize(int argc, char **argv);
int yard_cmd_template(int argc, char **argv);
int yard_cmd_inspect(int argc, char **argv);
int yard_cmd_synth(int argc, char **argv);
int yard_cmd_generate(int argc, char **argv);
int yard_cmd_chat(int argc, char **argv);
int yard_cmd_serve(int argc, char **argv);
int yard_cmd_logits(int argc, char **argv);
int yard_cmd_bench(int argc, char **argv);
int yard_cmd_engine(int argc, char **argv);
int yard_cmd_run(int argc, char **argv);
int yard_cmd_plan(int argc, char **argv);

/* MODEL is a directory, or what it is instead. Errors: YARD_EIO. */
yard_status yard_cli_check_model(const char *dir, yard_error *err);

/* Warnings and progress of long work on stderr: a bar on a terminal (at most 10 updates a second),
 * plain lines elsewhere. Lives as long as the program. */
const yard_notify *yard_cli_notify(void);

/* Takes an unfinished bar off the terminal, before anything else is written to stderr. */
void yard_cli_clear_bar(void);

/* "switchyard COMMAND: message" on stderr; returns EXIT_FAILURE, or YARD_EXIT_USAGE for
 * yard_cli_usage, which adds how to get help. */
int yard_cli_fail(const char *command, const yard_error *err);
int yard_cli_usage(const char *command, const char *fmt, ...) YARD_PRINTF(2, 3);

/* What messages call a file to read: "standard input" for "-". */
const char *yard_cli_input_name(const char *path);

/* All of a file, or of standard input for "-". malloc'd, NUL-terminated beyond *n_bytes. */
yard_status yard_cli_read_all(const char *path, char **data, size_t *n_bytes, yard_error *err);

/* Ids separated by commas or white space. malloc'd. Errors: YARD_EFORMAT naming what is no id. */
yard_status yard_cli_parse_ids(const char *text, size_t n_bytes, int32_t **ids, size_t *n_ids,
                               yard_error *err);

/* A whole number in [min, max]; YARD_EINVAL naming the option otherwise. */
yard_status yard_cli_parse_u64(const char *option, const char *text, uint64_t min, uint64_t max,
                               uint64_t *out, yard_error *err);
yard_status yard_cli_parse_f32(const char *option, const char *text, float min, float max,
                               float *out, yard_error *err);

/* Runs gnuplot in dir on a script that lies there. Returns 0, or an errno: ENOENT when there is no
 * gnuplot, EIO when it failed. */
int yard_cli_run_gnuplot(const char *dir, const char *script);

/* Writes what is left of standard output and tells, once, that something could not be written (a
 * full disk), with the reason if it is known. Commands call it to learn their exit code; main calls
 * it for whatever ends the program otherwise, such as --help. */
int yard_cli_close_stdout(const char *command);

#endif
