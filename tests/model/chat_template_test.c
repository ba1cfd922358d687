/* Chat templates against golden text, the other families' formats, and messages that must be
 * refused. ctest: sanitize */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "model/chat_template.h"
#include "model/tokenizer_files.h"

static yard_tokenizer *demo;

static int set_up(void **state)
{
    (void)state;
    return yard_tokenizer_load(&demo, "models/demo", NULL, NULL) == YARD_OK ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    yard_tokenizer_free(demo);
    return 0;
}

static const yard_chat_template *find(const char *name)
{
    const yard_chat_template *tpl = NULL;
    yard_error err = { 0 };

    if (yard_chat_template_find(&tpl, demo, name, &err) != YARD_OK)
        fail_msg("%s: %s", name, err.message);
    return tpl;
}

static void golden_cases(void **state)
{
    const yard_chat_template *tpl = find(NULL);
    json_t *root = json_load_file("tests/golden/chat_template.json", 0, NULL);
    const json_t *c;
    size_t i;

    (void)state;
    assert_string_equal(yard_chat_template_name(tpl), "demo");
    assert_true(json_array_size(json_object_get(root, "cases")) > 0);
    json_array_foreach(json_object_get(root, "cases"), i, c)
    {
        char *messages = json_dumps(json_object_get(c, "messages"), 0), *text;
        const json_t *want = json_object_get(c, "ids");
        size_t n_text, n_ids;
        yard_error err = { 0 };
        int32_t *ids;

        if (yard_chat_template_render(tpl, demo, messages, strlen(messages),
                                      json_is_true(json_object_get(c, "add_generation_prompt")),
                                      &text, &n_text, &err) != YARD_OK)
            fail_msg("case %zu: %s", i, err.message);
        assert_string_equal(text, json_string_value(json_object_get(c, "text")));
        assert_int_equal(n_text, strlen(text));
        assert_int_equal(yard_tokenizer_encode(demo, text, n_text, true, &ids, &n_ids, NULL),
                         YARD_OK);
        assert_int_equal(n_ids, json_array_size(want));
        for (size_t k = 0; k < n_ids; k++)
            if (ids[k] != json_integer_value(json_array_get(want, k)))
                fail_msg("case %zu: id %zu differs", i, k);
        free(ids);
        free(text);
        free(messages);
    }
    json_decref(root);
}

#define BOS "<｜begin▁of▁sentence｜>"
#define EOS "<｜end▁of▁sentence｜>"
#define CALL "{\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":\"{}\"}}"
#define CALL_TEXT                                                                                  \
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>"
#define OUTPUT_TEXT "<｜tool▁output▁begin｜>7<｜tool▁output▁end｜>"

/* One conversation with all that the templates treat differently. */
static const char conversation[] =
    "[{\"role\":\"system\",\"content\":\"S\"},{\"role\":\"system\",\"content\":\"T\"},"
    "{\"role\":\"user\",\"content\":\"Q\"},"
    "{\"role\":\"assistant\",\"content\":\"<think>hm</think>A\"},"
    "{\"role\":\"user\",\"content\":\"R\"},"
    "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[" CALL "," CALL "]},"
    "{\"role\":\"tool\",\"content\":\"7\"},{\"role\":\"tool\",\"content\":\"7\"},"
    "{\"role\":\"assistant\",\"content\":\"B\"},{\"role\":\"user\",\"content\":\"U\"}]";

static const struct format {
    const char *name, *want;
} formats[] = {
    { "demo", BOS "T<｜User｜>Q<｜Assistant｜><think>hm</think>A" EOS
                  "<｜User｜>R<｜Assistant｜><｜tool▁calls▁begin｜>" CALL_TEXT "\n" CALL_TEXT
                  "<｜tool▁calls▁end｜>" EOS "<｜tool▁outputs▁begin｜>" OUTPUT_TEXT OUTPUT_TEXT
                  "<｜tool▁outputs▁end｜>B" EOS "<｜User｜>U<｜Assistant｜>" },
    { "deepseek-v3",
      BOS "S\n\nT<｜User｜>Q<｜Assistant｜><think>hm</think>A" EOS
          "<｜User｜>R<｜Assistant｜><｜tool▁calls▁begin｜>" CALL_TEXT "\n" CALL_TEXT
          "<｜tool▁calls▁end｜>" EOS "<｜tool▁outputs▁begin｜>" OUTPUT_TEXT "\n" OUTPUT_TEXT
          "<｜tool▁outputs▁end｜>B" EOS "<｜User｜>U<｜Assistant｜>" },
    { "deepseek-v3-0324",
      BOS "S\n\nT<｜User｜>Q<｜Assistant｜><think>hm</think>A" EOS
          "<｜User｜>R<｜Assistant｜><｜tool▁calls▁begin｜>" CALL_TEXT "\n" CALL_TEXT
          "<｜tool▁calls▁end｜>" EOS "<｜tool▁outputs▁begin｜>" OUTPUT_TEXT "\n" OUTPUT_TEXT
          "<｜tool▁outputs▁end｜>B" EOS "<｜User｜>U<｜Assistant｜>" },
    { "deepseek-v3.1", BOS "S\n\nT<｜User｜>Q<｜Assistant｜></think>A" EOS
                           "<｜User｜>R<｜Assistant｜></think><｜tool▁calls▁begin｜>"
                           "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
                           "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
                           "<｜tool▁calls▁end｜>" EOS OUTPUT_TEXT OUTPUT_TEXT "B" EOS
                           "<｜User｜>U<｜Assistant｜></think>" },
    { "deepseek-r1",
      BOS "S\n\nT<｜User｜>Q<｜Assistant｜>A" EOS
          "<｜User｜>R<｜Assistant｜><｜tool▁calls▁begin｜>" CALL_TEXT "\n" CALL_TEXT
          "<｜tool▁calls▁end｜>" EOS "<｜tool▁outputs▁begin｜>" OUTPUT_TEXT OUTPUT_TEXT
          "<｜tool▁outputs▁end｜>B" EOS "<｜User｜>U<｜Assistant｜><think>\n" },
    { "deepseek-r1-2025-01",
      BOS "S\n\nT<｜User｜>Q<｜Assistant｜>A" EOS
          "<｜User｜>R<｜Assistant｜><｜tool▁calls▁begin｜>" CALL_TEXT "\n" CALL_TEXT
          "<｜tool▁calls▁end｜>" EOS "<｜tool▁outputs▁begin｜>" OUTPUT_TEXT OUTPUT_TEXT
          "<｜tool▁outputs▁end｜>B" EOS "<｜User｜>U<｜Assistant｜>" },
    { "deepseek-r1-0528",
      BOS "S\n\nT<｜User｜>Q<｜Assistant｜>A" EOS
          "<｜User｜>R<｜Assistant｜><｜tool▁calls▁begin｜>" CALL_TEXT "\n" CALL_TEXT
          "<｜tool▁calls▁end｜>" EOS "<｜tool▁outputs▁begin｜>" OUTPUT_TEXT "\n" OUTPUT_TEXT
          "<｜tool▁outputs▁end｜>B" EOS "<｜User｜>U<｜Assistant｜>" },
    { "deepseek-r1-distill",
      BOS "T<｜User｜>Q<｜Assistant｜>A" EOS
          "<｜User｜>R<｜Assistant｜><｜tool▁calls▁begin｜>" CALL_TEXT "\n" CALL_TEXT
          "<｜tool▁calls▁end｜>" EOS "<｜tool▁outputs▁begin｜>" OUTPUT_TEXT "\n" OUTPUT_TEXT
          "<｜tool▁outputs▁end｜>B" EOS "<｜User｜>U<｜Assistant｜><think>\n" },
    { "deepseek-r1-distill-2025-01",
      BOS "T<｜User｜>Q<｜Assistant｜>A" EOS
          "<｜User｜>R<｜Assistant｜><｜tool▁calls▁begin｜>" CALL_TEXT "\n" CALL_TEXT
          "<｜tool▁calls▁end｜>" EOS "<｜tool▁outputs▁begin｜>" OUTPUT_TEXT "\n" OUTPUT_TEXT
          "<｜tool▁outputs▁end｜>B" EOS "<｜User｜>U<｜Assistant｜>" },
};

static void families(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(formats) / sizeof(formats[0]); i++) {
        yard_error err = { 0 };
        size_t n;
        char *text;

        if (yard_chat_template_render(find(formats[i].name), demo, conversation,
                                      sizeof(conversation) - 1, true, &text, &n, &err) != YARD_OK)
            fail_msg("%s: %s", formats[i].name, err.message);
        if (strcmp(text, formats[i].want))
            fail_msg("%s:\nwant %s\ngot  %s", formats[i].name, formats[i].want, text);
        free(text);
    }
}

/* The published templates without tools, found by their text; what Jinja makes of them. */
#define V2_TEMPLATE(line_end)                                                                      \
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% "      \
    "endif %}{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ "    \
    "'User: ' + message['content'] + '" line_end line_end "' }}{% elif message['role'] == "        \
    "'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}{% elif "                   \
    "message['role'] == 'system' %}{{ message['content'] + '" line_end line_end "' }}{% endif "    \
    "%}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
#define MIXTRAL_TEMPLATE                                                                           \
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != "            \
    "(loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate "              \
    "user/assistant/user/assistant/...') }}{% endif %}{% if message['role'] == 'user' %}{{ "       \
    "'[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ "   \
    "message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant roles " \
    "are supported!') }}{% endif %}{% endfor %}"
static const char mixtral_2024[] =
    "{%- if messages[0]['role'] == 'system' %}\n"
    "    {%- set system_message = messages[0]['content'] %}\n"
    "    {%- set loop_messages = messages[1:] %}\n"
    "{%- else %}\n"
    "    {%- set loop_messages = messages %}\n"
    "{%- endif %}\n"
    "\n"
    "{{- bos_token }}\n"
    "{%- for message in loop_messages %}\n"
    "    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\n"
    "        {{- raise_exception('After the optional system message, conversation roles must "
    "alternate user/assistant/user/assistant/...') }}\n"
    "    {%- endif %}\n"
    "    {%- if message['role'] == 'user' %}\n"
    "        {%- if loop.first and system_message is defined %}\n"
    "            {{- ' [INST] ' + system_message + '\\n\\n' + message['content'] + ' [/INST]' }}\n"
    "        {%- else %}\n"
    "            {{- ' [INST] ' + message['content'] + ' [/INST]' }}\n"
    "        {%- endif %}\n"
    "    {%- elif message['role'] == 'assistant' %}\n"
    "        {{- ' ' + message['content'] + eos_token}}\n"
    "    {%- else %}\n"
    "        {{- raise_exception('Only user and assistant roles are supported, with the exception "
    "of an initial optional system message!') }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n";
#define TURNS                                                                                      \
    "{\"role\":\"user\",\"content\":\"Q\"},{\"role\":\"assistant\",\"content\":\"A\"},"            \
    "{\"role\":\"user\",\"content\":\"R\"}]"
#define SYSTEM_AGAIN "{\"role\":\"system\",\"content\":\"T\"},"
#define SYSTEM "[{\"role\":\"system\",\"content\":\"S\"},"

static const struct {
    const char *template, *name, *messages, *want; /* a text, or a part of the refusal */
    bool refused;
} plain_templates[] = {
    { V2_TEMPLATE("\n"), "deepseek-v2", SYSTEM TURNS,
      "<s>S\n\nUser: Q\n\nAssistant: A</s>User: R\n\nAssistant:", false },
    { V2_TEMPLATE("\\n"), "deepseek-v2-escaped", "[" TURNS,
      "<s>User: Q\n\nAssistant: A</s>User: R\n\nAssistant:", false },
    { V2_TEMPLATE("\n"), "deepseek-v2", "[{\"role\":\"tool\",\"content\":\"7\"}]",
      "messages[0]: template deepseek-v2 has no tools", true },
    { MIXTRAL_TEMPLATE, "mixtral-instruct", "[" TURNS, "<s>[INST] Q [/INST]A</s>[INST] R [/INST]",
      false },
    { MIXTRAL_TEMPLATE, "mixtral-instruct", SYSTEM TURNS,
      "messages[0].role: template mixtral-instruct wants user and assistant in turn", true },
    { mixtral_2024, "mixtral-instruct-2024", "[" TURNS,
      "<s> [INST] Q [/INST] A</s> [INST] R [/INST]", false },
    { mixtral_2024, "mixtral-instruct-2024", SYSTEM TURNS,
      "<s> [INST] S\n\nQ [/INST] A</s> [INST] R [/INST]", false },
    { mixtral_2024, "mixtral-instruct-2024", SYSTEM SYSTEM_AGAIN TURNS,
      "messages[1].role: template mixtral-instruct-2024 wants user and assistant in turn", true },
    { mixtral_2024, "mixtral-instruct-2024", "[{\"role\":\"system\",\"content\":\"S\"}]",
      "messages[0].role: template mixtral-instruct-2024 wants user and assistant in turn", true },
    { MIXTRAL_TEMPLATE, "mixtral-instruct",
      "[{\"role\":\"user\",\"content\":\"Q\"},{\"role\":\"assistant\",\"tool_calls\":[" CALL "]}]",
      "messages[1]: template mixtral-instruct has no tools", true },
};

static void templates_without_tools(void **state)
{
    json_t *root = tokenizer_file_minimal();
    char *file = json_dumps(root, 0);

    (void)state;
    for (size_t i = 0; i < sizeof(plain_templates) / sizeof(plain_templates[0]); i++) {
        const char *messages = plain_templates[i].messages;
        json_t *fields = json_pack("{s:s, s:s, s:s}", "bos_token", "<s>", "eos_token", "</s>",
                                   "chat_template", plain_templates[i].template);
        char *config = json_dumps(fields, 0), *text = NULL;
        const yard_chat_template *tpl = NULL;
        yard_tokenizer *tok = NULL;
        yard_error err = { 0 };
        yard_status st;
        size_t n;

        assert_int_equal(
            yard_tokenizer_parse(&tok, file, strlen(file), config, strlen(config), NULL), YARD_OK);
        if (yard_chat_template_find(&tpl, tok, NULL, &err) != YARD_OK)
            fail_msg("%s", err.message);
        assert_string_equal(yard_chat_template_name(tpl), plain_templates[i].name);
        st = yard_chat_template_render(tpl, tok, messages, strlen(messages), true, &text, &n, &err);
        assert_int_equal(st, plain_templates[i].refused ? YARD_ENOTSUP : YARD_OK);
        if (plain_templates[i].refused)
            assert_non_null(strstr(err.message, plain_templates[i].want));
        else
            assert_string_equal(text, plain_templates[i].want);
        free(text);
        free(config);
        json_decref(fields);
        yard_tokenizer_free(tok);
    }
    free(file);
    json_decref(root);
}

static const struct {
    const char *messages, *want; /* without generation prompt, template demo */
} accepted[] = {
    { "[]", BOS },
    { "[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
      "{\"type\":\"text\",\"text\":\"b\"}]}]",
      BOS "<｜User｜>ab" },
    { "[{\"role\":\"user\",\"content\":[]}]", BOS "<｜User｜>" },
    { "[{\"role\":\"assistant\",\"tool_calls\":[" CALL "]}]",
      BOS "<｜Assistant｜><｜tool▁calls▁begin｜>" CALL_TEXT "<｜tool▁calls▁end｜>" EOS },
    { "[{\"role\":\"assistant\",\"content\":\"A\",\"tool_calls\":[]}]",
      BOS "<｜Assistant｜>A" EOS },
    { "[{\"role\":\"user\",\"content\":\"x\",\"name\":\"n\",\"tool_calls\":null}]",
      BOS "<｜User｜>x" },
};

static void accepted_forms(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(accepted) / sizeof(accepted[0]); i++) {
        const char *messages = accepted[i].messages;
        yard_error err = { 0 };
        size_t n;
        char *text;

        if (yard_chat_template_render(find("demo"), demo, messages, strlen(messages), false, &text,
                                      &n, &err) != YARD_OK)
            fail_msg("%s: %s", messages, err.message);
        assert_string_equal(text, accepted[i].want);
        free(text);
    }
}

static const struct {
    const char *messages, *message;
} refused[] = {
    { "", "messages: want JSON" },
    { "{}", "messages: want an array, got an object" },
    { "[7]", "messages[0]: want an object, got a number" },
    { "[{\"content\":\"x\"}]", "messages[0].role: want a string, got nothing" },
    { "[{\"role\":\"user\",\"content\":\"x\"},{\"role\":\"robot\",\"content\":\"x\"}]",
      "messages[1].role: want system, user, assistant or tool, got 'robot'" },
    { "[{\"role\":\"user\"}]",
      "messages[0].content: want a string or an array of parts, got nothing" },
    { "[{\"role\":\"assistant\",\"content\":null}]", "messages[0].content" },
    { "[{\"role\":\"user\",\"content\":7}]", "messages[0].content" },
    { "[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]",
      "messages[0].content[0]: want {\"type\": \"text\", \"text\": text}, got type image_url" },
    { "[{\"role\":\"user\",\"content\":[7]}]", "messages[0].content[0]" },
    { "[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]", "messages[0].content[0]" },
    { "[{\"role\":\"user\",\"content\":\"x\",\"content\":\"y\"}]", "duplicate" },
    { "[{\"role\":\"user\",\"content\":\"x\",\"tool_calls\":[" CALL "]}]",
      "messages[0].tool_calls" },
    { "[{\"role\":\"assistant\",\"tool_calls\":7}]", "messages[0].tool_calls: want an array" },
    { "[{\"role\":\"assistant\",\"tool_calls\":[7]}]", "messages[0].tool_calls[0].type" },
    { "[{\"role\":\"assistant\",\"tool_calls\":[" CALL ",{\"type\":\"function\"}]}]",
      "messages[0].tool_calls[1].function.name: want a string, got nothing" },
    { "[{\"role\":\"assistant\",\"tool_calls\":[{\"type\":\"function\",\"function\":{\"name\":"
      "\"f\","
      "\"arguments\":{}}}]}]",
      "messages[0].tool_calls[0].function.arguments: want a string, got an object" },
    { "[{\"role\":\"assistant\",\"content\":7,\"tool_calls\":[" CALL "]}]", "messages[0].content" },
};

static void bad_messages_are_refused(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
        const char *messages = refused[i].messages;
        yard_error err = { 0 };
        char *text = NULL;
        size_t n;

        if (yard_chat_template_render(find("demo"), demo, messages, strlen(messages), true, &text,
                                      &n, &err) != YARD_EFORMAT ||
            !strstr(err.message, refused[i].message))
            fail_msg("%s: want '%s', got '%s'", messages, refused[i].message, err.message);
        assert_null(text);
    }
}

static void unknown_templates(void **state)
{
    static const char *const configs[] = { "{\"chat_template\":\"{{ abc }}\"}", "{}" };
    static const char *const want[] = { "SHA-256 c178fe03a96b730fb9c1c60201f89262",
                                        "chat_template: want a template, got none" };
    json_t *root = tokenizer_file_minimal();
    char *file = json_dumps(root, 0), *text;
    const yard_chat_template *tpl = NULL;
    yard_error err = { 0 };
    size_t n;

    (void)state;
    assert_int_equal(yard_chat_template_find(&tpl, demo, "chatml", &err), YARD_ENOTSUP);
    assert_non_null(strstr(err.message, "'chatml' is not known; known: demo, deepseek-v3"));
    for (size_t i = 0; i < 2; i++) {
        yard_tokenizer *tok = NULL;
        assert_int_equal(
            yard_tokenizer_parse(&tok, file, strlen(file), configs[i], strlen(configs[i]), NULL),
            YARD_OK);
        assert_int_equal(yard_chat_template_find(&tpl, tok, NULL, &err),
                         i == 0 ? YARD_ENOTSUP : YARD_EFORMAT);
        if (!strstr(err.message, want[i]))
            fail_msg("want '%s', got '%s'", want[i], err.message);
        assert_null(tpl);
        /* by name it works, but there is no beginning-of-sentence text */
        assert_int_equal(
            yard_chat_template_render(find("demo"), tok, "[]", 2, true, &text, &n, &err),
            YARD_EFORMAT);
        assert_non_null(strstr(err.message, "bos_token"));
        yard_tokenizer_free(tok);
    }
    free(file);
    json_decref(root);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_cases),      cmocka_unit_test(families),
        cmocka_unit_test(accepted_forms),    cmocka_unit_test(bad_messages_are_refused),
        cmocka_unit_test(unknown_templates), cmocka_unit_test(templates_without_tools),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
