/* Synthetic checkpoints: they load as what they were made from, the same bytes for every number of
 * threads, sane sizes, nothing left after a failure. ctest: sanitize */
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "small_checkpoint.h"

static void make_dir(char dir[64])
{
    snprintf(dir, 64, "/tmp/yard-synth-XXXXXX");
    assert_non_null(mkdtemp(dir));
}

static void config_survives(void **state)
{
    const yard_synth_options options = { .seed = 5, .n_threads = 2 };
    yard_model_config c = small_config(), read;
    yard_weights *w = NULL;
    char dir[64];

    (void)state;
    for (int variant = 0; variant < 3; variant++) {
        c.ue8m0 = variant == 1;
        c.fp8 = variant < 2;
        c.block_rows = c.fp8 ? 128 : 0;
        c.q_rank = variant == 2 ? 0 : 64;
        c.bos = variant == 2 ? -1 : 3;
        c.has_yarn = variant == 1;
        c.yarn_factor = variant == 1 ? 4 : 0;
        c.yarn_beta_fast = variant == 1 ? 32 : 0;
        c.yarn_beta_slow = c.yarn_mscale = c.yarn_mscale_all_dim = variant == 1;
        c.yarn_original_positions = variant == 1 ? 128 : 0;
        make_dir(dir);
        assert_int_equal(yard_synth_write(dir, &c, &options, NULL, NULL), YARD_OK);
        memset(&read, 0, sizeof(read));
        assert_int_equal(yard_model_config_load(&read, dir, NULL, NULL), YARD_OK);
        assert_string_equal(read.family, c.family);
        read.family = c.family;
        assert_memory_equal(&read, &c, sizeof(c));
        assert_int_equal(yard_weights_load(&w, dir, &read, NULL, 1, NULL, NULL), YARD_OK);
        yard_weights_free(w);
        small_remove(dir);
    }
}

/* Each known architecture, made small: what synth writes is read back as the same description. */
static void architectures_survive(void **state)
{
    static const char *const archs[] = { "deepseek-v3", "deepseek-v2-lite", "kimi-k2",
                                         "mixtral-8x7b" };
    const yard_synth_options options = { .seed = 5, .n_threads = 2 };
    yard_model_config c, read;
    yard_weights *w = NULL;
    char dir[64];

    (void)state;
    for (size_t i = 0; i < sizeof(archs) / sizeof(archs[0]); i++) {
        memset(&c, 0, sizeof(c));
        assert_int_equal(yard_synth_dimensions(&c, archs[i], NULL), YARD_OK);
        c.vocab = 128;
        c.hidden = 96;
        c.n_layers = 2;
        c.n_dense_layers = c.dense_inter ? 1 : 0;
        c.dense_inter = c.dense_inter ? 80 : 0;
        c.n_heads = 4;
        c.n_kv_heads = c.attention == YARD_ATTENTION_GQA ? 2 : 4;
        c.expert_inter = 48;
        c.bos = 0;
        c.eos[0] = 1;
        make_dir(dir);
        assert_int_equal(yard_synth_write(dir, &c, &options, NULL, NULL), YARD_OK);
        memset(&read, 0, sizeof(read));
        assert_int_equal(yard_model_config_load(&read, dir, NULL, NULL), YARD_OK);
        assert_ptr_equal(read.family, c.family);
        assert_memory_equal(&read, &c, sizeof(c));
        assert_int_equal(yard_weights_load(&w, dir, &read, NULL, 1, NULL, NULL), YARD_OK);
        assert_non_null(w->layers[1].attention.o.data);
        assert_int_equal(w->layers[1].moe.bias != NULL, c.router_bias);
        assert_int_equal(w->layers[1].attention.k.data != NULL, c.attention == YARD_ATTENTION_GQA);
        yard_weights_free(w);
        small_remove(dir);
    }
}

static double deviation(const yard_matrix *m)
{
    double sum = 0, sum2 = 0;
    const double n = (double)m->rows * m->cols;

    for (uint32_t r = 0; r < m->rows; r++)
        for (uint32_t k = 0; k < m->cols; k++) {
            const size_t at = (size_t)r * m->ld + k;
            double x;
            if (m->dtype == YARD_FP8_E4M3)
                x = (double)(yard_f32_from_e4m3(((const uint8_t *)m->data)[at]) *
                             m->scale[r / m->block_rows * m->scale_ld + k / YARD_GROUP]);
            else
                x = (double)yard_f32_from_bf16(((const uint16_t *)m->data)[at]);
            sum += x;
            sum2 += x * x;
        }
    assert_true(fabs(sum / n) < 0.05 * sqrt(sum2 / n));
    return sqrt(sum2 / n);
}

static void sizes_are_sane(void **state)
{
    const yard_synth_options options = { .seed = 5, .n_threads = 2 };
    const yard_model_config c = small_config();
    yard_weights *w = NULL;
    char dir[64];

    (void)state;
    make_dir(dir);
    assert_int_equal(yard_synth_write(dir, &c, &options, NULL, NULL), YARD_OK);
    assert_int_equal(yard_weights_load(&w, dir, &c, NULL, 1, NULL, NULL), YARD_OK);
    assert_true(fabs(deviation(&w->embed) - 1) < 0.05);
    assert_true(fabs(deviation(&w->head) * sqrt(160) - 1) < 0.05);
    assert_true(fabs(deviation(&w->layers[0].dense.gate) * sqrt(160) - 0.5) < 0.1);
    assert_true(fabs(deviation(&w->layers[0].dense.down) * sqrt(200) - 0.5) < 0.1);
    for (uint32_t e = 0; e < c.n_experts; e++)
        assert_true(w->layers[1].moe.bias[e] > 0);
    /* tensors and experts differ from each other */
    assert_memory_not_equal(w->layers[1].moe.gate[0].data, w->layers[1].moe.gate[1].data, 256);
    assert_memory_not_equal(w->layers[1].moe.gate[0].data, w->layers[1].moe.up[0].data, 256);
    yard_weights_free(w);
    small_remove(dir);
}

/* One number for all values of a checkpoint, whatever its shards. */
static uint64_t digest(const char *dir)
{
    yard_checkpoint *ckpt = NULL;
    uint64_t sum = 0;

    assert_int_equal(yard_checkpoint_open(&ckpt, dir, NULL, NULL), YARD_OK);
    for (uint32_t i = 0; i < yard_checkpoint_tensor_count(ckpt); i++) {
        const yard_tensor *t = yard_checkpoint_tensor(ckpt, i);
        uint64_t h = 0xcbf29ce484222325u;
        for (const char *name = t->name; *name; name++)
            h = (h ^ (uint8_t)*name) * 0x100000001b3u;
        for (size_t j = 0; j < t->n_bytes; j++)
            h = (h ^ ((const uint8_t *)t->data)[j]) * 0x100000001b3u;
        sum += h;
    }
    yard_checkpoint_close(ckpt);
    return sum;
}

static uint64_t make_digest(const yard_synth_options *options)
{
    const yard_model_config c = small_config();
    uint64_t sum;
    char dir[64];

    make_dir(dir);
    assert_int_equal(yard_synth_write(dir, &c, options, NULL, NULL), YARD_OK);
    sum = digest(dir);
    small_remove(dir);
    return sum;
}

static void bytes_depend_on_the_seed_alone(void **state)
{
    const yard_synth_options one = { .seed = 5, .n_threads = 1 };
    const yard_synth_options four = { .seed = 5, .n_threads = 4, .shard_bytes = 50000 };
    const yard_synth_options other = { .seed = 6, .n_threads = 1 };

    (void)state;
    assert_int_equal(make_digest(&one), make_digest(&four));
    assert_int_not_equal(make_digest(&one), make_digest(&other));
}

static void shards_end_in_time(void **state)
{
    const yard_synth_options options = { .n_threads = 1, .shard_bytes = 110000 };
    const yard_model_config c = small_config();
    char dir[64], path[256];
    struct stat info;
    uint32_t n = 0;

    (void)state;
    make_dir(dir);
    assert_int_equal(yard_synth_write(dir, &c, &options, NULL, NULL), YARD_OK);
    for (uint32_t all = 2; all < 100 && n == 0; all++) {
        snprintf(path, sizeof(path), "%s/model-00001-of-%06u.safetensors", dir, all);
        if (stat(path, &info) == 0)
            n = all;
    }
    assert_true(n > 2);
    for (uint32_t i = 0; i < n; i++) {
        snprintf(path, sizeof(path), "%s/model-%05u-of-%06u.safetensors", dir, i + 1, n);
        assert_int_equal(stat(path, &info), 0);
        assert_true(info.st_size < 110000 + 16384); /* data and header */
    }
    small_remove(dir);
}

static uint32_t count_files(const char *dir)
{
    DIR *list = opendir(dir);
    uint32_t n = 0;

    assert_non_null(list);
    for (const struct dirent *e; (e = readdir(list));)
        n += e->d_name[0] != '.';
    closedir(list);
    return n;
}

static void refuses_a_used_directory(void **state)
{
    const yard_synth_options options = { .n_threads = 1 };
    const yard_model_config c = small_config();
    yard_error err = { 0 };
    char dir[64], want[128];

    (void)state;
    make_dir(dir);
    small_write(dir, "precious", "data", 4);
    assert_int_equal(yard_synth_write(dir, &c, &options, NULL, &err), YARD_EINVAL);
    snprintf(want, sizeof(want), "%s: want an empty directory, found 'precious'", dir);
    assert_string_equal(err.message, want);
    assert_int_equal(count_files(dir), 1);
    assert_int_equal(yard_synth_write("/no/such/parent", &c, &options, NULL, &err), YARD_EIO);
    assert_string_equal(err.message,
                        "/no/such/parent: cannot make the directory: No such file or directory");
    small_remove(dir);
}

/* More than any file system has free. */
static void checks_space_first(void **state)
{
    const yard_synth_options options = { .n_threads = 1 };
    yard_model_config c = small_config();
    yard_error err = { 0 };
    char dir[64];

    (void)state;
    make_dir(dir);
    c.vocab = 1 << 24;
    c.hidden = 1 << 17;
    c.n_mtp = 0;
    assert_int_equal(yard_synth_write(dir, &c, &options, NULL, &err), YARD_EIO);
    assert_non_null(strstr(err.message, " bytes, the file system has "));
    assert_int_equal(count_files(dir), 0);
    small_remove(dir);
}

/* Writes that fail leave nothing: a limit on the size of files stands for a full disk. */
static void failed_writes_leave_nothing(void **state)
{
    const yard_synth_options options = { .n_threads = 2 };
    const yard_model_config c = small_config();
    static const rlim_t limits[] = { 4, 1000, 20000, 200000 };
    struct rlimit old, small;
    char dir[64], made[80];

    (void)state;
    make_dir(dir);
    snprintf(made, sizeof(made), "%s/made", dir);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    signal(SIGXFSZ, SIG_IGN);
    for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
        yard_error err = { 0 };
        yard_status st;
        small = (struct rlimit){ limits[i], old.rlim_max };
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
        st = yard_synth_write(made, &c, &options, NULL, &err);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
        assert_int_equal(st, YARD_EIO);
        assert_non_null(strstr(err.message, "cannot write: File too large; the checkpoint needs "));
        assert_int_equal(count_files(dir), 0);
    }
    small_remove(dir);
}

static void cancel(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    (void)what;
    if (2 * done >= total)
        atomic_store((atomic_int *)ctx, 1);
}

/* Before anything was written, and in the midst, with a directory that was there and one made. */
static void cancelled_writes_leave_nothing(void **state)
{
    const yard_model_config c = small_config();
    char dir[64], made[80];

    (void)state;
    make_dir(dir);
    snprintf(made, sizeof(made), "%s/made", dir);
    for (int i = 0; i < 4; i++) {
        const char *out = i % 2 ? made : dir;
        atomic_int cancelled = i / 2;
        const yard_synth_options options = { .n_threads = 2,
                                             .shard_bytes = 50000,
                                             .cancelled = &cancelled };
        const yard_notify notify = { .progress = cancel, .ctx = &cancelled };
        yard_error err = { 0 };
        char want[128];
        assert_int_equal(yard_synth_write(out, &c, &options, &notify, &err), YARD_EAGAIN);
        snprintf(want, sizeof(want), "%s: stopped after %s", out, i / 2 ? "0 of " : "");
        assert_memory_equal(err.message, want, strlen(want));
        assert_non_null(strstr(err.message, " bytes, which were removed"));
        assert_int_equal(count_files(dir), 0);
    }
    small_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(config_survives),
        cmocka_unit_test(architectures_survive),
        cmocka_unit_test(sizes_are_sane),
        cmocka_unit_test(bytes_depend_on_the_seed_alone),
        cmocka_unit_test(shards_end_in_time),
        cmocka_unit_test(refuses_a_used_directory),
        cmocka_unit_test(checks_space_first),
        cmocka_unit_test(failed_writes_leave_nothing),
        cmocka_unit_test(cancelled_writes_leave_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
