/* Safetensors images and directories of them: what is read, and each refusal with file, tensor,
 * expected and found. ctest: sanitize */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "model/safetensors.h"

/* An image with this header and n_data bytes 0, 1, 2, ..; malloc'd. */
static uint8_t *make_image(const char *header, size_t n_data, size_t *n_bytes)
{
    const size_t n_header = strlen(header);
    uint8_t *image = malloc(8 + n_header + n_data);

    assert_non_null(image);
    for (int i = 0; i < 8; i++)
        image[i] = (uint8_t)((uint64_t)n_header >> 8 * i);
    memcpy(image + 8, header, n_header);
    for (size_t i = 0; i < n_data; i++)
        image[8 + n_header + i] = (uint8_t)i;
    *n_bytes = 8 + n_header + n_data;
    return image;
}

struct seen {
    uint32_t n;
    char names[64]; /* one after another */
    yard_tensor last;
};

static yard_status keep(void *ctx, const yard_tensor *t, yard_error *err)
{
    struct seen *seen = ctx;

    (void)err;
    seen->n++;
    strncat(seen->names, t->name, sizeof(seen->names) - strlen(seen->names) - 1);
    seen->last = *t;
    return YARD_OK;
}

/* The header is padded to a multiple of 8, as writers do. */
static void good_image(void **state)
{
    static const char header[] =
        "{\"__metadata__\":{\"format\":\"pt\"},"
        "\"b\":{\"dtype\":\"F8_E4M3\",\"shape\":[3],\"data_offsets\":[10,13]},"
        "\"empty\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[4,4]},"
        "\"scalar\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},"
        "\"a\":{\"dtype\":\"BF16\",\"shape\":[1,3],\"data_offsets\":[4,10]}}";
    struct seen seen = { 0 };
    size_t n_bytes;
    uint8_t *image = make_image(header, 13, &n_bytes);

    (void)state;
    assert_int_equal(strlen(header) % 8, 0);
    assert_int_equal(yard_safetensors_parse(image, n_bytes, "f", keep, &seen, NULL), YARD_OK);
    assert_int_equal(seen.n, 4);
    assert_string_equal(seen.names, "scalaremptyab"); /* in the order of their data */
    assert_string_equal(seen.last.file, "f");
    assert_int_equal(seen.last.dtype, YARD_FP8_E4M3);
    assert_int_equal(seen.last.n_dims, 1);
    assert_int_equal(seen.last.shape[0], 3);
    assert_int_equal(((const uint8_t *)seen.last.data)[0], 10);
    free(image);
}

#define T(name, dtype, shape, offsets)                                                             \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static void bad_headers(void **state)
{
    static const struct {
        const char *header;
        size_t n_data;
        yard_status status;
        const char *message; /* after "f: " */
    } cases[] = {
        { "", 0, YARD_EFORMAT, "bad JSON at byte 0: '[' or '{' expected near end of file" },
        { "[]", 0, YARD_EFORMAT, "want a JSON object, found an array of 0" },
        { "{\"a\":7}", 0, YARD_EFORMAT, "tensor 'a': want an object, found 7" },
        { "{\"a\":{}}", 0, YARD_EFORMAT, "tensor 'a': dtype: want a string, found none" },
        { "{" T("a", "F64", "[1]", "[0,8]") "}", 8, YARD_ENOTSUP,
          "tensor 'a': dtype: want F32, BF16, F16 or F8_E4M3, found 'F64'" },
        { "{" T("a", "F8_E5M2", "[1]", "[0,1]") "}", 1, YARD_ENOTSUP,
          "tensor 'a': dtype: want F32, BF16, F16 or F8_E4M3, found 'F8_E5M2'" },
        { "{" T("a", "F8_E4M3", "7", "[0,1]") "}", 1, YARD_EFORMAT,
          "tensor 'a': shape: want a list of at most 4 sizes, found 7" },
        { "{\"a\":{\"dtype\":\"F32\"}}", 0, YARD_EFORMAT,
          "tensor 'a': shape: want a list of at most 4 sizes, found none" },
        { "{\"a\":{\"dtype\":32}}", 0, YARD_EFORMAT, "tensor 'a': dtype: want a string, found 32" },
        { "{" T("a", "F8_E4M3", "[1,1,1,1,1]", "[0,1]") "}", 1, YARD_EFORMAT,
          "tensor 'a': shape: want a list of at most 4 sizes, found an array of 5" },
        { "{" T("a", "F8_E4M3", "[-1]", "[0,1]") "}", 1, YARD_EFORMAT,
          "tensor 'a': shape[0]: want a whole number, found -1" },
        { "{" T("a", "F8_E4M3", "[1.0]", "[0,1]") "}", 1, YARD_EFORMAT,
          "tensor 'a': shape[0]: want a whole number, found 1.0" },
        { "{" T("a", "BF16", "[4294967296,4294967296]", "[0,1]") "}", 1, YARD_EFORMAT,
          "tensor 'a': shape: its size does not fit 64 bits" },
        { "{" T("a", "F8_E4M3", "[4]", "[0,3]") "}", 4, YARD_EFORMAT,
          "tensor 'a': data_offsets: want 4 bytes by shape and dtype, found 3" },
        { "{" T("a", "F8_E4M3", "[4]", "[4,0]") "}", 4, YARD_EFORMAT,
          "tensor 'a': data_offsets: want [begin, end] with begin <= end, "
          "found [4, 0]" },
        { "{" T("a", "F8_E4M3", "[4]", "[-4,0]") "}", 4, YARD_EFORMAT,
          "tensor 'a': data_offsets: want [begin, end] with begin <= end, "
          "found [-4, 0]" },
        { "{" T("a", "F8_E4M3", "[4]", "[0,\"4\"]") "}", 4, YARD_EFORMAT,
          "tensor 'a': data_offsets: want [begin, end] with begin <= end, found [0, '4']" },
        { "{" T("a", "F8_E4M3", "[4]", "4") "}", 4, YARD_EFORMAT,
          "tensor 'a': data_offsets: want [begin, end] with begin <= end, found 4" },
        { "{" T("a", "F8_E4M3", "[4]", "[0,4,8]") "}", 4, YARD_EFORMAT,
          "tensor 'a': data_offsets: want [begin, end] with begin <= end, "
          "found an array of 3" },
        { "{" T("a", "F8_E4M3", "[4]", "[0,4]") "}", 3, YARD_EFORMAT,
          "tensor 'a': data_offsets: want an end of at most 3 (the file's data), found 4" },
        { "{" T("a", "F8_E4M3", "[4]", "[0,4]") "," T("b", "F8_E4M3", "[4]", "[2,6]") "}", 6,
          YARD_EFORMAT, "tensor 'b' overlaps 'a': want a begin of 4, found 2" },
        { "{" T("a", "F8_E4M3", "[4]", "[0,4]") "," T("b", "F8_E4M3", "[4]", "[0,4]") "}", 4,
          YARD_EFORMAT, "tensor 'b' overlaps 'a': want a begin of 4, found 0" },
        { "{" T("a", "F8_E4M3", "[4]", "[0,4]") "," T("b", "F8_E4M3", "[4]", "[5,9]") "}", 9,
          YARD_EFORMAT, "tensor 'b': hole before it: want a begin of 4, found 5" },
        { "{" T("a", "F8_E4M3", "[4]", "[0,4]") "}", 5, YARD_EFORMAT,
          "want the data to end at 4 with the last tensor, found 5 bytes" },
        { "{" T("a", "BF16", "[2]", "[0,4]") "}", 4, YARD_EFORMAT,
          "tensor 'a': data: want an offset in the file divisible by 2, found 63" },
        { "{" T("a", "F8_E4M3", "[1]", "[0,1]") "," T("a", "F8_E4M3", "[1]", "[0,1]") "}", 1,
          YARD_EFORMAT, "bad JSON at byte 61: duplicate object key near '\"a\"'" },
        { "{" T("a\\u0000b", "F8_E4M3", "[1]", "[0,1]") "}", 1, YARD_EFORMAT,
          "bad JSON at byte 11: NUL byte in object key not supported near '\"a\\u0000b\"'" },
        { "{" T("a\\u001b[31m", "I64", "[1]", "[0,8]") "}", 8, YARD_ENOTSUP,
          "tensor 'a?[31m': dtype: want F32, BF16, F16 or F8_E4M3, found 'I64'" },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct seen seen = { 0 };
        yard_error err = { 0 };
        char want[YARD_ERROR_MESSAGE_BYTES];
        size_t n_bytes;
        uint8_t *image = make_image(cases[i].header, cases[i].n_data, &n_bytes);
        const yard_status st = yard_safetensors_parse(image, n_bytes, "f", keep, &seen, &err);
        snprintf(want, sizeof(want), "f: %s", cases[i].message);
        assert_string_equal(err.message, want);
        assert_int_equal(st, cases[i].status);
        assert_int_equal(seen.n, 0);
        free(image);
    }
}

static void bad_lengths(void **state)
{
    yard_error err = { 0 };
    uint8_t *image = calloc(1, 16);

    (void)state;
    assert_int_equal(yard_safetensors_parse(image, 5, "f", keep, NULL, &err), YARD_EFORMAT);
    assert_string_equal(err.message, "f: header length: want 8 bytes, the file has 5");
    image[0] = 9;
    assert_int_equal(yard_safetensors_parse(image, 16, "f", keep, NULL, &err), YARD_EFORMAT);
    assert_string_equal(err.message,
                        "f: header length: want at most 8 (the rest of the file), found 9");
    memset(image, 0xff, 8);
    assert_int_equal(yard_safetensors_parse(image, 16, "f", keep, NULL, &err), YARD_EFORMAT);
    assert_string_equal(err.message, "f: header length: want at most 8 (the rest of the file), "
                                     "found 18446744073709551615");
    free(image);
}

/* A good image of every length: none but the whole is accepted, and nothing is read beyond. */
static void every_truncation(void **state)
{
    static const char header[] = "{" T("a", "F8_E4M3", "[4]", "[0,4]") "}";
    struct seen seen = { 0 };
    size_t n_bytes;
    uint8_t *image = make_image(header, 4, &n_bytes);

    (void)state;
    for (size_t n = 0; n < n_bytes; n++) {
        uint8_t *part = malloc(n ? n : 1); /* its own block, so that sanitizers see the end */
        memcpy(part, image, n);
        assert_int_equal(yard_safetensors_parse(part, n, "f", keep, &seen, NULL), YARD_EFORMAT);
        free(part);
    }
    assert_int_equal(yard_safetensors_parse(image, n_bytes, "f", keep, &seen, NULL), YARD_OK);
    free(image);
}

static void path_of(char path[256], const char *dir, const char *name)
{
    snprintf(path, 256, "%s/%s", dir, name);
}

static void write_file(const char *dir, const char *name, const void *bytes, size_t n_bytes)
{
    char path[256];
    FILE *f;

    path_of(path, dir, name);
    f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n_bytes, f), n_bytes);
    assert_int_equal(fclose(f), 0);
}

static void write_shard(const char *dir, const char *name, const char *header, size_t n_data)
{
    size_t n_bytes;
    uint8_t *image = make_image(header, n_data, &n_bytes);

    write_file(dir, name, image, n_bytes);
    free(image);
}

#define INDEX "model.safetensors.index.json"
#define A_IN_1 "{" T("a", "F8_E4M3", "[1]", "[0,1]") "}"
#define A_AND_B "{" T("a", "F8_E4M3", "[1]", "[0,1]") "," T("b", "F8_E4M3", "[1]", "[1,2]") "}"
#define B_IN_2 "{" T("b", "F8_E4M3", "[2]", "[0,2]") "}"

static void directories(void **state)
{
    static const struct {
        const char *index, *first, *second; /* NULL: no such file */
        const char *message;                /* NULL: accepted */
    } cases[] = {
        { "{\"weight_map\":{\"a\":\"1\",\"b\":\"2\"}}", A_IN_1, B_IN_2, NULL },
        { "{\"weight_map\":{\"a\":\"1\",\"b\":\"2\"}}", A_IN_1, NULL,
          INDEX ": names shard '2', which is not there" },
        { "{\"weight_map\":{\"a\":\"2\",\"b\":\"1\"}}", A_IN_1, B_IN_2,
          INDEX ": tensor 'a': want it in 2, found 1" },
        { "{\"weight_map\":{\"a\":\"1\",\"b\":\"2\",\"c\":\"2\"}}", A_IN_1, B_IN_2,
          INDEX ": tensor 'c': want it in 2, found it nowhere" },
        { "{\"weight_map\":{\"a\":\"1\"}}", A_AND_B, NULL, "1: tensor 'b' is not in " INDEX },
        { "{\"weight_map\":{\"a\":\"1\",\"b\":\"2\"}}", A_IN_1, A_IN_1,
          "2: tensor 'a': stored twice, also in 1" },
        { "{\"weight_map\":{\"a\":\"../1\"}}", A_IN_1, NULL,
          INDEX ": tensor 'a': want a file name without a folder, found '../1'" },
        { "{\"weight_map\":{\"a\":\"/etc/passwd\"}}", A_IN_1, NULL,
          INDEX ": tensor 'a': want a file name without a folder, found '/etc/passwd'" },
        { "{\"weight_map\":{\"a\":\"..\"}}", A_IN_1, NULL,
          INDEX ": tensor 'a': want a file name without a folder, found '..'" },
        { "{\"weight_map\":{\"a\":\"\"}}", A_IN_1, NULL,
          INDEX ": tensor 'a': want a file name without a folder, found ''" },
        { "{\"weight_map\":{\"a\":1}}", A_IN_1, NULL,
          INDEX ": tensor 'a': want the name of a shard" },
        { "{\"weight_map\":[]}", A_IN_1, NULL, INDEX ": weight_map: want an object" },
        { "{}", A_IN_1, NULL, INDEX ": weight_map: want an object" },
        { "{\"weight_map\":{\"a\":\"1\",\"a\":\"2\"}}", A_IN_1, NULL,
          INDEX ": bad JSON at byte 26: duplicate object key near '\"a\"'" },
    };
    char dir[] = "/tmp/yard-safetensors-XXXXXX", path[256];

    (void)state;
    assert_non_null(mkdtemp(dir));
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        yard_checkpoint *ckpt = NULL;
        yard_error err = { 0 };
        yard_status st;
        write_file(dir, INDEX, cases[i].index, strlen(cases[i].index));
        write_shard(dir, "1", cases[i].first, strcmp(cases[i].first, A_IN_1) ? 2 : 1);
        path_of(path, dir, "2");
        unlink(path);
        if (cases[i].second)
            write_shard(dir, "2", cases[i].second, strcmp(cases[i].second, A_IN_1) ? 2 : 1);
        st = yard_checkpoint_open(&ckpt, dir, NULL, &err);
        assert_string_equal(err.message, cases[i].message ? cases[i].message : "");
        assert_int_equal(st, cases[i].message ? YARD_EFORMAT : YARD_OK);
        yard_checkpoint_close(ckpt);
    }
    path_of(path, dir, INDEX);
    unlink(path);
    path_of(path, dir, "1");
    unlink(path);
    path_of(path, dir, "2");
    unlink(path);
    rmdir(dir);
}

static void single_file(void **state)
{
    char dir[] = "/tmp/yard-safetensors-XXXXXX", path[256], want[300];
    yard_checkpoint *ckpt = NULL;
    yard_error err = { 0 };

    (void)state;
    assert_non_null(mkdtemp(dir));
    path_of(path, dir, "model.safetensors");
    snprintf(want, sizeof(want),
             "%s: want model.safetensors.index.json or model.safetensors, found neither", dir);
    assert_int_equal(yard_checkpoint_open(&ckpt, dir, NULL, &err), YARD_EIO);
    assert_string_equal(err.message, want);
    write_file(dir, "model.safetensors", "", 0);
    snprintf(want, sizeof(want), "%s: want a safetensors file, found 0 bytes", path);
    assert_int_equal(yard_checkpoint_open(&ckpt, dir, NULL, &err), YARD_EFORMAT);
    assert_string_equal(err.message, want);
    write_shard(dir, "model.safetensors", A_IN_1, 1);
    assert_int_equal(yard_checkpoint_open(&ckpt, dir, NULL, &err), YARD_OK);
    assert_int_equal(yard_checkpoint_tensor_count(ckpt), 1);
    assert_non_null(yard_checkpoint_find(ckpt, "a"));
    assert_null(yard_checkpoint_find(ckpt, "b"));
    yard_checkpoint_close(ckpt);
    unlink(path);
    rmdir(dir);
    yard_checkpoint_close(NULL);
}

static void demo_tensors(void **state)
{
    static const struct {
        const char *name, *file;
        yard_dtype dtype;
        uint64_t rows, cols; /* cols 0: one dimension */
        uint8_t first[4];
    } want[] = {
        { "model.embed_tokens.weight",
          "model-00001-of-00002.safetensors",
          YARD_BF16,
          3584,
          256,
          { 0xaf, 0xbd, 0x24, 0xbe } },
        { "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
          "model-00001-of-00002.safetensors",
          YARD_FP8_E4M3,
          160,
          256,
          { 0x62, 0xe1, 0xed, 0x66 } },
        { "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv",
          "model-00001-of-00002.safetensors",
          YARD_F32,
          2,
          2,
          { 0xda, 0xdd, 0x49, 0x3b } },
        { "model.layers.5.mlp.gate.e_score_correction_bias",
          "model-00002-of-00002.safetensors",
          YARD_F32,
          24,
          0,
          { 0xb8, 0x9d, 0x64, 0x3e } },
        { "model.layers.6.eh_proj.weight",
          "model-00002-of-00002.safetensors",
          YARD_BF16,
          256,
          512,
          { 0x06, 0x3f, 0x72, 0x3d } },
    };
    yard_checkpoint *ckpt = NULL;

    (void)state;
    assert_int_equal(yard_checkpoint_open(&ckpt, "models/demo", NULL, NULL), YARD_OK);
    for (size_t i = 0; i < sizeof(want) / sizeof(want[0]); i++) {
        const yard_tensor *t = yard_checkpoint_find(ckpt, want[i].name);
        assert_non_null(t);
        assert_string_equal(t->file, want[i].file);
        assert_int_equal(t->dtype, want[i].dtype);
        assert_int_equal(t->n_dims, want[i].cols ? 2 : 1);
        assert_int_equal(t->shape[0], want[i].rows);
        assert_memory_equal(t->data, want[i].first, 4);
    }
    for (uint32_t i = 0; i < yard_checkpoint_tensor_count(ckpt); i++) {
        const yard_tensor *t = yard_checkpoint_tensor(ckpt, i);
        assert_ptr_equal(yard_checkpoint_find(ckpt, t->name), t);
    }
    yard_checkpoint_close(ckpt);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_image),   cmocka_unit_test(bad_headers),
        cmocka_unit_test(bad_lengths),  cmocka_unit_test(every_truncation),
        cmocka_unit_test(directories),  cmocka_unit_test(single_file),
        cmocka_unit_test(demo_tensors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
