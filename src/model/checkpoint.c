/* A directory of safetensors shards: mapped, indexed by name, checked against the index file. */
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/json_reader.h"
#include "model/safetensors.h"

static const char index_name[] = "model.safetensors.index.json";
static const char single_name[] = "model.safetensors";

/* DeepSeek-V3's index has 9 MB; 1 GB is a bound against reading nonsense. */
enum { MAX_INDEX_BYTES = 1 << 30, MIN_SLOTS = 64 };

typedef struct shard {
    char *name;
    void *bytes; /* the mapping; NULL before */
    size_t n_bytes;
} shard;

struct yard_checkpoint {
    shard *shards;
    uint32_t n_shards;
    yard_tensor *tensors; /* in the order of shards and of their data */
    uint32_t n_tensors, max_tensors;
    uint32_t *slots;  /* [n_slots] open addressing: tensor index + 1, 0 is free */
    uint32_t n_slots; /* a power of two, at least twice max_tensors */
};

static uint64_t hash_name(const char *name)
{
    uint64_t h = 0xcbf29ce484222325u; /* FNV-1a */

    for (; *name; name++)
        h = (h ^ (unsigned char)*name) * 0x100000001b3u;
    return h ^ h >> 32;
}

/* The slot that holds name, or the free one where it belongs. */
static uint32_t *find_slot(const yard_checkpoint *ckpt, const char *name)
{
    uint32_t i = (uint32_t)hash_name(name) & (ckpt->n_slots - 1);

    while (ckpt->slots[i] && strcmp(ckpt->tensors[ckpt->slots[i] - 1].name, name) != 0)
        i = (i + 1) & (ckpt->n_slots - 1);
    return &ckpt->slots[i];
}

static yard_status grow(yard_checkpoint *ckpt, yard_error *err)
{
    const uint32_t n_slots = ckpt->n_slots ? 2 * ckpt->n_slots : MIN_SLOTS;
    yard_tensor *tensors = calloc(n_slots / 2, sizeof(*tensors));
    uint32_t *slots = calloc(n_slots, sizeof(*slots));

    if (!tensors || !slots || n_slots > UINT32_MAX / 4) {
        free(tensors);
        free(slots);
        return yard_fail(err, YARD_ENOMEM, "checkpoint: no memory for %u tensors", n_slots / 2);
    }
    if (ckpt->n_tensors > 0)
        memcpy(tensors, ckpt->tensors, ckpt->n_tensors * sizeof(*tensors));
    free(ckpt->tensors);
    ckpt->tensors = tensors;
    free(ckpt->slots);
    ckpt->slots = slots;
    ckpt->n_slots = n_slots;
    ckpt->max_tensors = n_slots / 2;
    for (uint32_t i = 0; i < ckpt->n_tensors; i++)
        *find_slot(ckpt, ckpt->tensors[i].name) = i + 1;
    return YARD_OK;
}

static yard_status add_tensor(void *ctx, const yard_tensor *t, yard_error *err)
{
    yard_checkpoint *ckpt = ctx;
    const yard_tensor *other = yard_checkpoint_find(ckpt, t->name);
    yard_tensor *copy;
    char *name;

    if (other)
        return yard_fail(err, YARD_EFORMAT, "%s: tensor '%.200s': stored twice, also in %s",
                         t->file, t->name, other->file);
    assert(ckpt->tensors); /* since open */
    if (ckpt->n_tensors == ckpt->max_tensors) {
        const yard_status st = grow(ckpt, err);
        if (st)
            return st;
    }
    name = strdup(t->name);
    if (!name)
        return yard_fail(err, YARD_ENOMEM, "checkpoint: no memory for a tensor's name");
    copy = &ckpt->tensors[ckpt->n_tensors];
    *copy = *t;
    copy->name = name;
    *find_slot(ckpt, name) = ++ckpt->n_tensors;
    return YARD_OK;
}

static yard_status map_fd(shard *s, int fd, const char *path, yard_error *err)
{
    struct stat info;
    void *bytes;

    if (fstat(fd, &info) != 0)
        return yard_fail(err, YARD_EIO, "%s: cannot examine: %s", path, strerror(errno));
    if (!S_ISREG(info.st_mode))
        return yard_fail(err, YARD_EIO, "%s: want a regular file", path);
    if (info.st_size == 0)
        return yard_fail(err, YARD_EFORMAT, "%s: want a safetensors file, found 0 bytes", path);
    bytes = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (bytes == MAP_FAILED)
        return yard_fail(err, errno == ENOMEM ? YARD_ENOMEM : YARD_EIO,
                         "%s: cannot map %lld bytes: %s", path, (long long)info.st_size,
                         strerror(errno));
    s->bytes = bytes;
    s->n_bytes = (size_t)info.st_size;
    return YARD_OK;
}

static yard_status map_shard(shard *s, const char *dir, bool from_index, yard_error *err)
{
    char path[4096];
    yard_status st;
    int fd;

    if (snprintf(path, sizeof(path), "%s/%s", dir, s->name) >= (int)sizeof(path))
        return yard_fail(err, YARD_EINVAL, "%.200s: path too long", s->name);
    /* O_NONBLOCK: opening a pipe must not wait for a writer before it is refused. */
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && from_index && errno == ENOENT)
        return yard_fail(err, YARD_EFORMAT, "%s: names shard '%.200s', which is not there",
                         index_name, s->name);
    if (fd < 0 && !from_index && errno == ENOENT)
        return yard_fail(err, YARD_EIO, "%s: want %s or %s, found neither", dir, index_name,
                         single_name);
    if (fd < 0)
        return yard_fail(err, YARD_EIO, "%s: cannot open: %s", path, strerror(errno));
    st = map_fd(s, fd, path, err);
    close(fd); /* the mapping keeps the file */
    return st;
}

static yard_status add_shard(yard_checkpoint *ckpt, const char *name, yard_error *err)
{
    /* Room for twice as many whenever the count reaches a power of two. */
    if ((ckpt->n_shards & (ckpt->n_shards - 1)) == 0) {
        const size_t room = ckpt->n_shards ? 2 * (size_t)ckpt->n_shards : 1;
        shard *larger = realloc(ckpt->shards, room * sizeof(*larger));
        if (!larger)
            return yard_fail(err, YARD_ENOMEM, "checkpoint: no memory for %zu shards", room);
        ckpt->shards = larger;
    }
    ckpt->shards[ckpt->n_shards] = (shard){ .name = strdup(name) };
    if (!ckpt->shards[ckpt->n_shards].name)
        return yard_fail(err, YARD_ENOMEM, "checkpoint: no memory for a shard's name");
    ckpt->n_shards++;
    return YARD_OK;
}

static yard_status load_shards(yard_checkpoint *ckpt, const char *dir, bool from_index,
                               yard_error *err)
{
    yard_status st = YARD_OK;

    for (uint32_t i = 0; i < ckpt->n_shards && !st; i++) {
        shard *s = &ckpt->shards[i];
        st = map_shard(s, dir, from_index, err);
        if (!st)
            st = yard_safetensors_parse(s->bytes, s->n_bytes, s->name, add_tensor, ckpt, err);
    }
    return st;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Shards lie beside the index: a name that leads elsewhere is an attack or a mistake. */
static yard_status check_shard_name(const char *tensor, const json_t *value, yard_error *err)
{
    const char *name = json_string_value(value);

    if (!name)
        return yard_fail(err, YARD_EFORMAT, "%s: tensor '%.200s': want the name of a shard",
                         index_name, tensor);
    if (!*name || strchr(name, '/') || !strcmp(name, ".") || !strcmp(name, ".."))
        return yard_fail(err, YARD_EFORMAT,
                         "%s: tensor '%.200s': want a file name without a folder, found '%.200s'",
                         index_name, tensor, name);
    return YARD_OK;
}

/* The distinct shard names of the map, in the order of their names. */
static yard_status list_shards(yard_checkpoint *ckpt, json_t *map, yard_error *err)
{
    const size_t n = json_object_size(map);
    const char **names = malloc((n + 1) * sizeof(*names));
    yard_status st = YARD_OK;
    size_t n_names = 0;

    if (!names)
        return yard_fail(err, YARD_ENOMEM, "%s: no memory for %zu names", index_name, n);
    for (void *i = json_object_iter(map); i && !st; i = json_object_iter_next(map, i)) {
        st = check_shard_name(json_object_iter_key(i), json_object_iter_value(i), err);
        names[n_names++] = json_string_value(json_object_iter_value(i));
    }
    if (!st)
        qsort(names, n_names, sizeof(*names), by_name);
    for (size_t i = 0; i < n_names && !st; i++)
        if (i == 0 || strcmp(names[i], names[i - 1]) != 0)
            st = add_shard(ckpt, names[i], err);
    free(names);
    return st;
}

/* Index and shards must agree both ways. */
static yard_status check_index(const yard_checkpoint *ckpt, json_t *map, yard_error *err)
{
    assert(ckpt->tensors); /* since open */
    for (void *i = json_object_iter(map); i; i = json_object_iter_next(map, i)) {
        const char *name = json_object_iter_key(i);
        const char *file = json_string_value(json_object_iter_value(i));
        const yard_tensor *t = yard_checkpoint_find(ckpt, name);
        const char *found = t ? t->file : "it nowhere";
        assert(file && found); /* list_shards and the parser saw to it */
        if (strcmp(found, file) != 0)
            return yard_fail(err, YARD_EFORMAT, "%s: tensor '%.200s': want it in %s, found %s",
                             index_name, name, file, found);
    }
    for (uint32_t i = 0; i < ckpt->n_tensors; i++)
        if (!json_object_get(map, ckpt->tensors[i].name))
            return yard_fail(err, YARD_EFORMAT, "%s: tensor '%.200s' is not in %s",
                             ckpt->tensors[i].file, ckpt->tensors[i].name, index_name);
    return YARD_OK;
}

static yard_status load_index(yard_checkpoint *ckpt, const char *dir, const char *text,
                              size_t n_bytes, yard_error *err)
{
    json_t *root = NULL, *map;
    yard_status st = yard_json_parse_object(&root, text, n_bytes, index_name, err);

    if (st)
        return st;
    map = json_object_get(root, "weight_map");
    if (!json_is_object(map))
        st = yard_fail(err, YARD_EFORMAT, "%s: weight_map: want an object", index_name);
    if (!st)
        st = list_shards(ckpt, map, err);
    if (!st)
        st = load_shards(ckpt, dir, true, err);
    if (!st)
        st = check_index(ckpt, map, err);
    json_decref(root);
    return st;
}

yard_status yard_checkpoint_open(yard_checkpoint **out, const char *dir, const yard_notify *notify,
                                 yard_error *err)
{
    yard_checkpoint *ckpt = calloc(1, sizeof(*ckpt));
    char *text = NULL;
    size_t n_bytes;
    bool absent;
    yard_status st;

    (void)notify; /* mapping and reading headers takes milliseconds */
    if (!ckpt)
        return yard_fail(err, YARD_ENOMEM, "checkpoint: %zu bytes", sizeof(*ckpt));
    st = grow(ckpt, err);
    if (!st)
        st = yard_json_read_file(&text, &n_bytes, dir, index_name, MAX_INDEX_BYTES, &absent, err);
    if (st)
        goto out;
    if (absent) {
        st = add_shard(ckpt, single_name, err);
        if (!st)
            st = load_shards(ckpt, dir, false, err);
    } else {
        st = load_index(ckpt, dir, text, n_bytes, err);
    }
    if (st)
        goto out;
    *out = ckpt;
    ckpt = NULL;
out:
    free(text);
    yard_checkpoint_close(ckpt);
    return st;
}

void yard_checkpoint_close(yard_checkpoint *ckpt)
{
    if (!ckpt)
        return;
    for (uint32_t i = 0; i < ckpt->n_tensors; i++)
        free((char *)ckpt->tensors[i].name);
    for (uint32_t i = 0; i < ckpt->n_shards; i++) {
        if (ckpt->shards[i].bytes)
            munmap(ckpt->shards[i].bytes, ckpt->shards[i].n_bytes);
        free(ckpt->shards[i].name);
    }
    free(ckpt->shards);
    free(ckpt->tensors);
    free(ckpt->slots);
    free(ckpt);
}

uint32_t yard_checkpoint_tensor_count(const yard_checkpoint *ckpt)
{
    return ckpt->n_tensors;
}

const yard_tensor *yard_checkpoint_tensor(const yard_checkpoint *ckpt, uint32_t tensor_idx)
{
    return &ckpt->tensors[tensor_idx];
}

const yard_tensor *yard_checkpoint_find(const yard_checkpoint *ckpt, const char *name)
{
    const uint32_t slot = *find_slot(ckpt, name);

    return slot ? &ckpt->tensors[slot - 1] : NULL;
}
