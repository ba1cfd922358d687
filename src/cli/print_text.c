#include "cli/print_text.h"

#include <stdio.h>

#include <jansson.h>

yard_status yard_cli_print_text(const char *text, size_t n_bytes, bool json, yard_error *err)
{
    json_t *object;
    int rc;

    if (!json) {
        fwrite(text, 1, n_bytes, stdout);
        return YARD_OK;
    }
    object = json_pack("{s:s%}", "text", text, n_bytes);
    if (!object)
        return yard_fail(err, YARD_ENOMEM, "text: no memory for its JSON");
    rc = json_dumpf(object, stdout, JSON_COMPACT);
    json_decref(object);
    if (rc != 0 && !ferror(stdout))
        return yard_fail(err, YARD_ENOMEM, "text: no memory for its JSON");
    fputc('\n', stdout);
    return YARD_OK;
}
