/* Writing a synthetic checkpoint: shards in order, each filled by all threads, piece by piece. */
#include "model/synth.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "model/synth_parts.h"
#include "model/synth_values.h"

/* A piece is made and written by one thread; a batch is what one progress notice covers. */
enum { PIECE_BYTES = 1 << 20, BATCH_PIECES = 128 };

static const uint64_t default_shard_bytes = 4000000000u;

static const char index_name[] = "model.safetensors.index.json";
static const char config_name[] = "config.json";

typedef struct piece {
    const yard_synth_tensor *tensor;
    uint64_t first; /* element */
    size_t n;
} piece;

typedef struct writer {
    const char *dir;
    const yard_model_config *c;
    const yard_notify *notify;
    const atomic_int *cancelled; /* may be NULL */
    uint64_t seed;
    yard_synth_gaussian gaussian;
    yard_synth_plan plan;
    yard_pool *pool;
    uint8_t *buffers; /* [n_threads, PIECE_BYTES] */
    int dir_fd;
    bool made_dir;
    uint32_t n_files; /* shards begun */
    uint64_t done_bytes;
    /* of the shard being written */
    int fd;
    uint64_t data_at;
    piece pieces[BATCH_PIECES];
    _Atomic int error_code; /* errno of a failed write */
    yard_error *err;
} writer;

static void shard_name(const writer *w, uint32_t shard_idx, char name[64])
{
    snprintf(name, 64, "model-%05u-of-%06u.safetensors", shard_idx + 1, w->plan.n_shards);
}

static yard_status fail_write(const writer *w, const char *name, int code)
{
    return yard_fail(w->err, YARD_EIO,
                     "%s/%s: cannot write: %s; the checkpoint needs %" PRIu64 " bytes in all",
                     w->dir, name, strerror(code), w->plan.total_bytes);
}

static bool is_cancelled(const writer *w)
{
    return w->cancelled && atomic_load_explicit(w->cancelled, memory_order_relaxed);
}

static yard_status check_cancelled(const writer *w)
{
    if (!is_cancelled(w))
        return YARD_OK;
    return yard_fail(w->err, YARD_EAGAIN,
                     "%s: stopped after %" PRIu64 " of %" PRIu64 " bytes, which were removed",
                     w->dir, w->done_bytes, w->plan.total_bytes);
}

/* errno, or 0. */
static int write_at(int fd, const void *bytes, size_t n_bytes, uint64_t at)
{
    for (size_t done = 0; done < n_bytes;) {
        const ssize_t n =
            pwrite(fd, (const uint8_t *)bytes + done, n_bytes - done, (off_t)(at + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno;
        done += (size_t)n;
    }
    return 0;
}

static yard_status open_new(writer *w, const char *name)
{
    w->fd = openat(w->dir_fd, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    return w->fd < 0 ? fail_write(w, name, errno) : YARD_OK;
}

/* Errors of buffered writes may come only now. */
static yard_status close_new(writer *w, const char *name, yard_status st)
{
    const int code = close(w->fd) != 0 ? errno : 0;

    w->fd = -1;
    return !st && code ? fail_write(w, name, code) : st;
}

static yard_status write_json(writer *w, const char *name, const json_t *root)
{
    char *text = root ? json_dumps(root, JSON_INDENT(2) | JSON_REAL_PRECISION(15)) : NULL;
    yard_status st;
    int code;

    if (!text)
        return yard_fail(w->err, YARD_ENOMEM, "%s: no memory for its text", name);
    st = open_new(w, name);
    if (!st) {
        const size_t n_bytes = strlen(text);
        text[n_bytes] = '\n'; /* in place of the NUL: it is written by length */
        code = write_at(w->fd, text, n_bytes + 1, 0);
        st = close_new(w, name, code ? fail_write(w, name, code) : YARD_OK);
    }
    free(text);
    return st;
}

static json_t *header_entry(const yard_synth_tensor *t)
{
    static const char *const names[YARD_DTYPE_COUNT] = { "F32", "BF16", "F16", "F8_E4M3" };
    json_t *entry =
        json_pack("{s:s, s:[i], s:[I,I]}", "dtype", names[t->dtype], "shape", (int)t->shape[0],
                  "data_offsets", (json_int_t)t->begin, (json_int_t)(t->begin + t->n_bytes));

    if (entry && t->n_dims == 2 &&
        json_array_append_new(json_object_get(entry, "shape"), json_integer(t->shape[1]))) {
        json_decref(entry);
        return NULL;
    }
    return entry;
}

/* The header of the tensors [first, end); NULL when memory ran out. */
static char *make_header(const writer *w, uint32_t first, uint32_t end)
{
    json_t *header = json_pack("{s:{s:s}}", "__metadata__", "format", "pt");
    bool ok = header != NULL;
    char *text;

    for (uint32_t i = first; i < end && ok; i++)
        ok = json_object_set_new(header, w->plan.tensors[i].name,
                                 header_entry(&w->plan.tensors[i])) == 0;
    text = ok ? json_dumps(header, JSON_COMPACT) : NULL;
    json_decref(header);
    return text;
}

/* Padded with spaces, so that the data starts at a multiple of 8. */
static yard_status write_header(writer *w, const char *name, uint32_t first, uint32_t end)
{
    static const char spaces[] = "       ";
    char *text = make_header(w, first, end);
    uint8_t length[8];
    size_t n_text, n_bytes;
    int code;

    if (!text)
        return yard_fail(w->err, YARD_ENOMEM, "%s: no memory for its header", name);
    n_text = strlen(text);
    n_bytes = yard_align_up(n_text, 8);
    for (int i = 0; i < 8; i++)
        length[i] = (uint8_t)((uint64_t)n_bytes >> 8 * i);
    code = write_at(w->fd, length, sizeof(length), 0);
    if (!code)
        code = write_at(w->fd, text, n_text, sizeof(length));
    if (!code)
        code = write_at(w->fd, spaces, n_bytes - n_text, sizeof(length) + n_text);
    free(text);
    w->data_at = sizeof(length) + n_bytes;
    return code ? fail_write(w, name, code) : YARD_OK;
}

static void write_piece(void *ctx, uint32_t task_idx, uint32_t thread_idx)
{
    writer *w = ctx;
    const piece *p = &w->pieces[task_idx];
    const yard_synth_tensor *t = p->tensor;
    const size_t width = yard_dtype_bytes(t->dtype);
    uint8_t *buffer = w->buffers + (size_t)thread_idx * PIECE_BYTES;
    yard_synth_source source;
    int code;

    if (is_cancelled(w) || atomic_load_explicit(&w->error_code, memory_order_relaxed))
        return;
    yard_synth_source_init(&source, &w->gaussian, w->seed, t->name, t->dtype, t->mean, t->sigma);
    if (t->is_scale)
        yard_synth_fill_scales(&source, (float *)buffer, p->first, p->n, t->sigma, w->c->ue8m0);
    else
        yard_synth_fill(&source, buffer, p->first, p->n);
    code = write_at(w->fd, buffer, p->n * width, w->data_at + t->begin + p->first * width);
    if (code)
        atomic_store_explicit(&w->error_code, code, memory_order_relaxed);
}

static yard_status run_batch(writer *w, const char *name, uint32_t n_pieces)
{
    yard_status st;
    int code;

    yard_pool_run(w->pool, write_piece, w, n_pieces);
    code = atomic_load_explicit(&w->error_code, memory_order_relaxed);
    if (code)
        return fail_write(w, name, code);
    st = check_cancelled(w); /* some pieces may be missing */
    if (st)
        return st;
    for (uint32_t i = 0; i < n_pieces; i++)
        w->done_bytes += w->pieces[i].n * yard_dtype_bytes(w->pieces[i].tensor->dtype);
    yard_progress(w->notify, "write", w->done_bytes, w->plan.total_bytes);
    return YARD_OK;
}

static yard_status write_data(writer *w, const char *name, uint32_t first, uint32_t end)
{
    yard_status st = YARD_OK;
    uint32_t n = 0;

    for (uint32_t i = first; i < end && !st; i++) {
        const yard_synth_tensor *t = &w->plan.tensors[i];
        const size_t width = yard_dtype_bytes(t->dtype), most = PIECE_BYTES / width;
        const uint64_t n_elements = t->n_bytes / width;
        for (uint64_t at = 0; at < n_elements && !st; at += most) {
            const uint64_t left = n_elements - at;
            w->pieces[n++] = (piece){ t, at, left < most ? (size_t)left : most };
            if (n == BATCH_PIECES) {
                st = run_batch(w, name, n);
                n = 0;
            }
        }
    }
    return n && !st ? run_batch(w, name, n) : st;
}

static yard_status write_shard(writer *w, uint32_t shard_idx, uint32_t first, uint32_t end)
{
    char name[64];
    yard_status st;

    shard_name(w, shard_idx, name);
    st = open_new(w, name);
    if (st)
        return st;
    w->n_files = shard_idx + 1;
    st = write_header(w, name, first, end);
    if (!st)
        st = write_data(w, name, first, end);
    return close_new(w, name, st);
}

static yard_status write_shards(writer *w)
{
    yard_status st = YARD_OK;
    uint32_t first = 0;

    for (uint32_t shard_idx = 0; shard_idx < w->plan.n_shards && !st; shard_idx++) {
        uint32_t end = first;
        while (end < w->plan.n_tensors && w->plan.tensors[end].shard_idx == shard_idx)
            end++;
        st = write_shard(w, shard_idx, first, end);
        first = end;
    }
    return st;
}

static yard_status write_index(writer *w)
{
    json_t *map = json_object();
    json_t *root;
    bool ok = map != NULL;
    yard_status st;

    for (uint32_t i = 0; i < w->plan.n_tensors && ok; i++) {
        char name[64];
        shard_name(w, w->plan.tensors[i].shard_idx, name);
        ok = json_object_set_new(map, w->plan.tensors[i].name, json_string(name)) == 0;
    }
    if (!ok) {
        json_decref(map);
        map = NULL;
    }
    root = json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)w->plan.total_bytes,
                     "weight_map", map);
    st = write_json(w, index_name, root);
    json_decref(root);
    return st;
}

static yard_status write_config(writer *w)
{
    json_t *root = yard_synth_config_json(w->c);
    const yard_status st = write_json(w, config_name, root);

    json_decref(root);
    return st;
}

static yard_status check_empty(writer *w)
{
    const int fd = dup(w->dir_fd);
    DIR *list = fd < 0 ? NULL : fdopendir(fd);
    yard_status st = YARD_OK;

    if (!list) {
        st = yard_fail(w->err, YARD_EIO, "%s: cannot list: %s", w->dir, strerror(errno));
        if (fd >= 0)
            close(fd);
        return st;
    }
    for (const struct dirent *e; !st && (e = readdir(list));)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            st = yard_fail(w->err, YARD_EINVAL, "%s: want an empty directory, found '%s'", w->dir,
                           e->d_name);
    closedir(list);
    return st;
}

static yard_status open_dir(writer *w)
{
    if (mkdir(w->dir, 0777) == 0)
        w->made_dir = true;
    else if (errno != EEXIST)
        return yard_fail(w->err, YARD_EIO, "%s: cannot make the directory: %s", w->dir,
                         strerror(errno));
    w->dir_fd = open(w->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (w->dir_fd < 0)
        return yard_fail(w->err, YARD_EIO, "%s: cannot open the directory: %s", w->dir,
                         strerror(errno));
    return check_empty(w);
}

static yard_status check_space(const writer *w)
{
    struct statvfs info;
    uint64_t free_bytes;

    /* A file system that does not tell is found full, if it is, by writing. */
    if (fstatvfs(w->dir_fd, &info) != 0 || info.f_blocks == 0)
        return YARD_OK;
    free_bytes = (uint64_t)info.f_bavail * info.f_frsize;
    if (free_bytes < w->plan.total_bytes)
        return yard_fail(w->err, YARD_EIO,
                         "%s: want %" PRIu64 " bytes, the file system has %" PRIu64 " free", w->dir,
                         w->plan.total_bytes, free_bytes);
    return YARD_OK;
}

static yard_status start(writer *w, const yard_synth_options *options)
{
    const uint64_t shard_bytes = options->shard_bytes ? options->shard_bytes : default_shard_bytes;
    yard_status st = yard_synth_plan_make(&w->plan, w->c, shard_bytes, w->err);

    if (!st)
        st = yard_pool_create(&w->pool, options->n_threads, w->err);
    if (st)
        return st;
    w->buffers = yard_alloc((size_t)options->n_threads * PIECE_BYTES);
    if (!w->buffers)
        return yard_fail(w->err, YARD_ENOMEM, "synth: %u buffers of %d bytes", options->n_threads,
                         PIECE_BYTES);
    yard_synth_gaussian_init(&w->gaussian);
    st = open_dir(w);
    return st ? st : check_space(w);
}

/* Only what this call made: names were new, the directory was empty or new. */
static void remove_files(const writer *w, bool has_index)
{
    char name[64];

    for (uint32_t i = 0; i < w->n_files; i++) {
        shard_name(w, i, name);
        unlinkat(w->dir_fd, name, 0);
    }
    if (has_index) {
        unlinkat(w->dir_fd, index_name, 0);
        unlinkat(w->dir_fd, config_name, 0);
    }
    if (w->made_dir)
        rmdir(w->dir);
}

yard_status yard_synth_write(const char *dir, const yard_model_config *c,
                             const yard_synth_options *options, const yard_notify *notify,
                             yard_error *err)
{
    writer *w = yard_alloc(sizeof(*w));
    bool has_index = false;
    yard_status st;

    if (!w)
        return yard_fail(err, YARD_ENOMEM, "synth: %zu bytes", sizeof(*w));
    w->dir = dir;
    w->c = c;
    w->notify = notify;
    w->seed = options->seed;
    w->cancelled = options->cancelled;
    w->dir_fd = w->fd = -1;
    w->err = err;
    st = start(w, options);
    if (!st)
        st = write_shards(w);
    if (!st) {
        has_index = true;
        st = write_index(w);
    }
    if (!st)
        st = check_cancelled(w);
    /* Last: a directory without config.json is no model, whatever ended this program. */
    if (!st)
        st = write_config(w);
    if (st)
        remove_files(w, has_index);
    if (w->dir_fd >= 0)
        close(w->dir_fd);
    free(w->buffers);
    free(w->plan.tensors);
    yard_pool_destroy(w->pool);
    free(w);
    return st;
}
