/* tokenizer.json as an attacker would write it: refused or loaded, and then usable. */
#include <stdlib.h>

#include "model/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static const char text[] = "ab abc <x> 123 \n\n é 漢 🙂";
    yard_tokenizer *tok = NULL;
    yard_error err = { 0 };
    int32_t *ids;
    size_t n_ids, n_text;
    char *decoded;

    if (yard_tokenizer_parse(&tok, (const char *)data, n_bytes, (const char *)data, n_bytes,
                             &err) != YARD_OK) {
        if (!err.message[0])
            abort();
        return 0;
    }
    if (yard_tokenizer_encode(tok, text, sizeof(text) - 1, true, &ids, &n_ids, &err) == YARD_OK) {
        if (yard_tokenizer_decode(tok, ids, n_ids, false, &decoded, &n_text, &err) != YARD_OK)
            abort();
        free(decoded);
        free(ids);
    }
    yard_tokenizer_free(tok);
    return 0;
}
