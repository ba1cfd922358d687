/* Chat messages through every template. Run in the source directory. */
#include <stdlib.h>

#include "model/chat_template.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static const char *const names[] = { "demo",          "deepseek-v3", "deepseek-v3-0324",
                                         "deepseek-v3.1", "deepseek-r1", "deepseek-r1-0528" };
    static yard_tokenizer *tok; /* loaded once: a fuzzer has no place to keep it */

    if (!tok && yard_tokenizer_load(&tok, "models/demo", NULL, NULL) != YARD_OK)
        abort();
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        const yard_chat_template *tpl;
        yard_error err = { 0 };
        size_t n_text;
        char *text;

        if (yard_chat_template_find(&tpl, tok, names[i], &err) != YARD_OK)
            abort();
        if (yard_chat_template_render(tpl, tok, (const char *)data, n_bytes, true, &text, &n_text,
                                      &err) != YARD_OK) {
            if (!err.message[0])
                abort();
            return 0;
        }
        if (!yard_utf8_valid(text, n_text, NULL))
            abort();
        free(text);
    }
    return 0;
}
