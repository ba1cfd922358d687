/* Reading tokenizer.json: one object carries what every part of the reader needs. */
#ifndef YARD_MODEL_TOKENIZER_LOAD_H
#define YARD_MODEL_TOKENIZER_LOAD_H

#include <jansson.h>

#include "model/tokenizer_impl.h"

enum {
    /* ByteLevel writes each byte as one character below this: the printable ones of Latin-1 as
     * themselves, the other 68 from U+0100 on. */
    YARD_ALPHABET_SIZE = 256 + 68,
    YARD_MAX_NAME_BYTES = 60, /* of a name from the file that a message shows */
};

typedef struct yard_tokenizer_loader {
    yard_tokenizer *tok;
    const char *file; /* for messages */
    const yard_notify *notify;
    yard_error *err;
    int16_t alphabet[YARD_ALPHABET_SIZE]; /* character -> byte, -1 */
    const json_t *vocab;
    size_t n_pool; /* bytes used of tok->pool */
} yard_tokenizer_loader;

/* messages and members (tokenizer.c) */

const char *yard_json_kind(const json_t *value); /* "an array", for messages */
bool yard_json_absent(const json_t *value);      /* or null */
yard_status yard_loader_want(yard_tokenizer_loader *l, const char *field, const char *expected,
                             const json_t *got);
yard_status yard_loader_refuse(yard_tokenizer_loader *l, const char *field, const char *type);
yard_status yard_loader_no_memory(yard_tokenizer_loader *l);
/* The "type" of a component, which must be an object. */
yard_status yard_loader_type(yard_tokenizer_loader *l, const char *field, const json_t *object,
                             const char **type);
/* A boolean member; a missing one keeps *value. */
yard_status yard_loader_bool(yard_tokenizer_loader *l, const char *field, const json_t *object,
                             const char *name, bool *value);

/* parts */

/* model and the texts and ids of added_tokens. (tokenizer_vocab.c) */
yard_status yard_loader_vocab(yard_tokenizer_loader *l, const json_t *model, const json_t *added);
/* added_tokens; after the normalizer, which some of them are looked for in. (tokenizer_vocab.c) */
yard_status yard_loader_added(yard_tokenizer_loader *l, const json_t *added);
/* normalizer, pre_tokenizer, post_processor, decoder. (tokenizer_pipeline.c) */
yard_status yard_loader_pipeline(yard_tokenizer_loader *l, const json_t *root);
/* The same but the post_processor, where model.byte_fallback is true. (tokenizer_metaspace.c) */
yard_status yard_loader_metaspace(yard_tokenizer_loader *l, const json_t *root);

#endif
