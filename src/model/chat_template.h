/* Chat messages to prompt text. The templates of checkpoints are Jinja programs; the ones known
 * here are written as C encoders and recognised by the SHA-256 of the template string. */
#ifndef YARD_MODEL_CHAT_TEMPLATE_H
#define YARD_MODEL_CHAT_TEMPLATE_H

#include "model/tokenizer.h"

typedef struct yard_chat_template yard_chat_template; /* static; nothing to free */

/* The encoder for this tokenizer's template. name NULL: by the hash of its template string;
 * otherwise by name ("demo", "deepseek-v3", "deepseek-r1", ..), and tok may be NULL. Errors:
 * YARD_ENOTSUP with the hash and the known names; YARD_EFORMAT when the checkpoint has no template.
 */
yard_status yard_chat_template_find(const yard_chat_template **out, const yard_tokenizer *tok,
                                    const char *name, yard_error *err);
const char *yard_chat_template_name(const yard_chat_template *tpl);
/* True for models that think first: an answer begins with <think>, unless the rendered prompt ends
 * with it, and the answer proper follows </think>. */
bool yard_chat_template_thinks(const yard_chat_template *tpl);

/* Renders a JSON array of messages {"role","content","tool_calls"}. *text is malloc'd. Errors:
 * YARD_EFORMAT naming the message and member, YARD_ENOTSUP naming a message that the template has
 * no place for, YARD_ENOMEM. */
yard_status yard_chat_template_render(const yard_chat_template *tpl, const yard_tokenizer *tok,
                                      const char *messages_json, size_t n_bytes,
                                      bool add_generation_prompt, char **text, size_t *n_text,
                                      yard_error *err);

/* What a render of these messages left out without saying: one warning for the name of each member
 * that no template reads. Members that say nothing to a model are left out silently: null, and what
 * servers put beside their answers ("refusal", "annotations", "audio", "reasoning_content",
 * "tool_call_id"; of a call "id" and "index"). For messages that were rendered; warns of nothing
 * when they are not JSON or memory ran out. */
void yard_chat_messages_warn_unread(const char *messages_json, size_t n_bytes,
                                    const yard_notify *notify);

#endif
