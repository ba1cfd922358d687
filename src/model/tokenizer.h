/* BPE from a checkpoint's tokenizer.json: byte-level (DeepSeek), or in SentencePiece's way with
 * U+2581 for spaces and byte fallback (Mixtral). Immutable after loading; all calls but load
 * and free may run on several threads at once. */
#ifndef YARD_MODEL_TOKENIZER_H
#define YARD_MODEL_TOKENIZER_H

#include "base/base.h"

typedef struct yard_tokenizer yard_tokenizer;

/* Reads dir/tokenizer.json (and bos, eos, chat template of dir/tokenizer_config.json, if present).
 * A member that is not implemented is refused by name. Errors: YARD_EIO, YARD_EFORMAT,
 * YARD_ENOTSUP, YARD_ENOMEM. */
yard_status yard_tokenizer_load(yard_tokenizer **out, const char *dir, const yard_notify *notify,
                                yard_error *err);
/* The same from memory; config may be NULL. */
yard_status yard_tokenizer_parse(yard_tokenizer **out, const char *tokenizer_json, size_t n_bytes,
                                 const char *config_json, size_t n_config_bytes, yard_error *err);
void yard_tokenizer_free(yard_tokenizer *tok); /* NULL is fine */

uint32_t yard_tokenizer_vocab_size(const yard_tokenizer *tok); /* largest id + 1 */

/* Ids of text, nothing added (no BOS). added_tokens: added tokens in the text are recognised;
 * false: they are ordinary text. *ids is malloc'd, the caller frees it. Errors: YARD_EFORMAT for
 * text that is not UTF-8 (the message gives the offset), YARD_ENOTSUP when a pattern of the file
 * needs too many steps on this text, YARD_ENOMEM. */
yard_status yard_tokenizer_encode(const yard_tokenizer *tok, const char *text, size_t n_bytes,
                                  bool added_tokens, int32_t **ids, size_t *n_ids, yard_error *err);

/* Raw bytes of one token (not always whole characters). NULL for an id that does not exist.
 * Owned by the tokenizer. */
const char *yard_tokenizer_token_bytes(const yard_tokenizer *tok, int32_t id, size_t *n_bytes);
/* True for added tokens marked special (BOS, EOS, padding). */
bool yard_tokenizer_is_special(const yard_tokenizer *tok, int32_t id);
/* Id of an added or ordinary token by its exact text (raw bytes: " hello", not "Ġhello"), -1
 * when there is none. */
int32_t yard_tokenizer_find(const yard_tokenizer *tok, const char *text, size_t n_bytes);

/* Text of ids, bad UTF-8 as U+FFFD, without the space that SentencePiece's way puts before a text.
 * *text is malloc'd and NUL-terminated. skip_special leaves special tokens out. Errors: YARD_EINVAL
 * naming an id that does not exist, YARD_ENOMEM. */
yard_status yard_tokenizer_decode(const yard_tokenizer *tok, const int32_t *ids, size_t n_ids,
                                  bool skip_special, char **text, size_t *n_bytes, yard_error *err);

/* From tokenizer_config.json; NULL when absent. Owned by the tokenizer. */
const char *yard_tokenizer_chat_template(const yard_tokenizer *tok);
const char *yard_tokenizer_bos_text(const yard_tokenizer *tok);
const char *yard_tokenizer_eos_text(const yard_tokenizer *tok);
/* "add_bos_token": a text that is no chat begins with the BOS token. False when absent. */
bool yard_tokenizer_adds_bos(const yard_tokenizer *tok);

/* text as it is generated */

/* Turns ids into text one by one, never emitting half a character, and watches for stop strings:
 * text that may be the start of one is held back until it is decided. It goes on where a prompt
 * ended, so a space that begins the first token is shown. */
typedef struct yard_text_stream yard_text_stream;

/* stop: n_stop strings, copied; may be NULL with n_stop 0. The stop string that is complete first
 * ends the text; of two complete at once, the longer. YARD_EINVAL for one that is empty or not
 * UTF-8. */
yard_status yard_text_stream_create(yard_text_stream **out, const yard_tokenizer *tok,
                                    bool skip_special, const char *const *stop, uint32_t n_stop,
                                    yard_error *err);
void yard_text_stream_destroy(yard_text_stream *stream); /* NULL is fine */

/* Adds one token. *text is what can be shown now (maybe empty), valid until the next call.
 * *stopped becomes true when a stop string is complete: it and what follows are not shown. */
yard_status yard_text_stream_push(yard_text_stream *stream, int32_t id, const char **text,
                                  size_t *n_bytes, bool *stopped, yard_error *err);
/* The same for text that is no token (tok may be NULL then, if no token is pushed). */
yard_status yard_text_stream_push_text(yard_text_stream *stream, const char *bytes, size_t n_pushed,
                                       const char **text, size_t *n_bytes, bool *stopped,
                                       yard_error *err);
/* The stop string that is complete, valid until the next call; NULL when none is. */
const char *yard_text_stream_stop(const yard_text_stream *stream, size_t *n_bytes);
/* The end: what was held back, an incomplete character as U+FFFD. */
yard_status yard_text_stream_finish(yard_text_stream *stream, const char **text, size_t *n_bytes,
                                    yard_error *err);

#endif
