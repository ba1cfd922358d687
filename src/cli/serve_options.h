/* The command line of `switchyard serve`: its own options, and those that go on to the engine. */
#ifndef YARD_CLI_SERVE_OPTIONS_H
#define YARD_CLI_SERVE_OPTIONS_H

#include "cli/args.h"
#include "serve/serve.h"

/* Words of a command line; grows as words are added. The strings are its own. */
typedef struct yard_words {
    char **word; /* [n_words] and NULL */
    size_t n_words;
} yard_words;

void yard_words_add(yard_words *words, const char *word); /* no memory ends the program */
void yard_words_release(yard_words *words);

typedef struct yard_serve_options {
    const char *model;       /* directory */
    const char *served_name; /* never NULL after parsing */
    char *default_name;      /* what it points to when it was not given */
    const char *host;
    uint32_t port;
    int listen_fd;      /* -1: listen on host and port */
    yard_words engines; /* addresses; none: an engine of our own */
    yard_words api_keys;
    const char *template_name, *access_log;
    yard_front_config front; /* only the numbers */
    yard_http_config http;   /* only the numbers */
    /* the same options again, for a child process */
    yard_words for_front, for_engine;
} yard_serve_options;

void yard_serve_options_parse(yard_serve_options *out, int argc, char **argv);
void yard_serve_options_release(yard_serve_options *options);

#endif
