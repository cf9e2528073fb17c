/* SPDX-License-Identifier: Apache-2.0 */
#include "model/weights.h"

#include <dirent.h>
#include <math.h>
#include <pthread.h>
#include <sys/stat.h>

#include "base/util.h"
#include "unit/check.h"
#include "unit/temp.h"

#define CONFIG_OF(vocab, more)                                                                     \
    "{\"model_type\":\"qwen2\",\"vocab_size\":" vocab                                              \
    ",\"hidden_size\":20,\"intermediate_size\":28,"                                                \
    "\"num_hidden_layers\":2,\"num_attention_heads\":2,\"num_key_value_heads\":1,"                 \
    "\"rms_norm_eps\":1e-05,\"initializer_range\":0.041666666666666664," more "}"
#define CONFIG CONFIG_OF("211", "\"tie_word_embeddings\":true")

enum { WORLD_MAX = 4 };

static temp_dir dir;

/* One job: load (or initialize where load is NULL), then save (unless save is NULL). */
typedef struct job {
    int world, stage;
    zs_tier param_tier;
    const char *config, *load, *save, *source; /* paths */
    zs_dtype working, saved;
    uint64_t seed, shard_bytes;
    zs_comm *comms[WORLD_MAX];
    zs_status status[WORLD_MAX];
    char message[WORLD_MAX][1024];
} job;

typedef struct rank_job {
    job *j;
    int rank;
} rank_job;

static zs_status add_params(zs_engine *engine, zs_dtype dtype, const zs_weight *weights,
                            size_t count, zs_param *params)
{
    size_t first = 0;
    zs_unit unit;
    zs_group_config group;
    zs_group number;
    zs_group_config_init(&group);
    zs_status status = zs_group_add(engine, &group, &number);
    for (size_t i = 0; !status && i < count; i++) {
        zs_param_config config;
        zs_param_config_init(&config);
        config.name = weights[i].name;
        config.ndim = weights[i].ndim;
        config.shape = weights[i].shape;
        config.dtype = dtype;
        config.group = number;
        status = zs_param_add(engine, &config, &params[i]);
        if (!status && (i + 1 == count || weights[i + 1].unit != weights[i].unit)) {
            char name[32];
            snprintf(name, sizeof name, "unit %d", weights[i].unit);
            status = zs_unit_add(engine, name, params + first, i + 1 - first, &unit);
            first = i + 1;
        }
    }
    return status ? status : zs_engine_commit(engine);
}

static zs_status run(const job *j, zs_comm *comm)
{
    zs_model_config config;
    zs_engine_config engine_config;
    zs_engine *engine = NULL;
    zs_weight *weights = NULL;
    zs_param params[64];
    size_t count = 0;
    zs_engine_config_init(&engine_config);
    engine_config.zero_stage = j->stage;
    engine_config.param_tier = j->param_tier;
    engine_config.param_dir = dir.path;
    engine_config.threads = 1;
    zs_status status = zs_model_config_load(j->config, &config);
    if (!status)
        status = zs_model_weights(&config, &weights, &count);
    if (!status)
        status = zs_engine_open(&engine_config, comm, &engine);
    if (!status)
        status = add_params(engine, j->working, weights, count, params);
    if (!status && j->load)
        status = zs_weights_load(engine, j->load, weights, params, count);
    if (!status && !j->load)
        status = zs_weights_init(engine, &config, j->seed, weights, params, count);
    if (!status && j->save)
        status = zs_weights_save(engine, comm, j->save, j->source, j->saved, j->shard_bytes,
                                 weights, params, count);
    zs_engine_close(&engine);
    free(weights);
    return status;
}

static void *rank_main(void *arg)
{
    rank_job *r = arg;
    r->j->status[r->rank] = run(r->j, r->j->comms[r->rank]);
    snprintf(r->j->message[r->rank], sizeof r->j->message[0], "%s", zs_last_error());
    return NULL;
}

static void run_ranks(job *j)
{
    pthread_t threads[WORLD_MAX];
    rank_job ranks[WORLD_MAX];
    assert_int_equal(zs_comm_open_threads(j->world, 60, j->comms), ZS_OK);
    for (int r = 0; r < j->world; r++) {
        ranks[r] = (rank_job){j, r};
        assert_int_equal(pthread_create(&threads[r], NULL, rank_main, &ranks[r]), 0);
    }
    for (int r = 0; r < j->world; r++)
        pthread_join(threads[r], NULL);
    for (int r = 0; r < j->world; r++)
        zs_comm_close(&j->comms[r]);
}

static void run_ok(job *j)
{
    run_ranks(j);
    for (int r = 0; r < j->world; r++)
        if (j->status[r])
            fail_msg("rank %d: %s", r, j->message[r]);
}

static void run_fails(job *j, zs_status expected, const char *part)
{
    run_ranks(j);
    for (int r = 0; r < j->world; r++)
        if (j->status[r] != expected || !strstr(j->message[r], part))
            fail_msg("rank %d: %s: %s\nnot: ...%s...", r, zs_status_name(j->status[r]),
                     j->message[r], part);
}

static char *config_path, *source, *first_path, *second_path;

static int set_up(void **state)
{
    temp_make(&dir);
    source = temp_path(&dir, "source");
    mkdir(source, 0777);
    config_path = temp_path(&dir, "source/config.json");
    first_path = temp_path(&dir, "first");
    second_path = temp_path(&dir, "deep/er/second");
    temp_write(&dir, "source/config.json", CONFIG, strlen(CONFIG));
    return 0;
}

static int tear_down(void **state)
{
    temp_remove(&dir);
    free(source);
    free(config_path);
    free(first_path);
    free(second_path);
    return 0;
}

static job make_job(int world, int stage, const char *load, const char *save)
{
    return (job){.world = world,
                 .stage = stage,
                 .config = config_path,
                 .load = load,
                 .save = save,
                 .source = source,
                 .seed = 7};
}

/* The bytes of DIR/name, malloc'ed. */
static char *read_file(const char *where, const char *name, size_t *bytes)
{
    char path[600];
    struct stat info;
    snprintf(path, sizeof path, "%s/%s", where, name);
    FILE *file = fopen(path, "rb");
    if (!file)
        fail_msg("no %s", path);
    assert_int_equal(fstat(fileno(file), &info), 0);
    *bytes = (size_t)info.st_size;
    char *data = calloc(1, *bytes + 1);
    assert_int_equal(fread(data, 1, *bytes, file), *bytes);
    fclose(file);
    return data;
}

static int same_file(const char *a, const char *b, const char *name)
{
    size_t x_bytes, y_bytes;
    char *x = read_file(a, name, &x_bytes), *y = read_file(b, name, &y_bytes);
    int same = x_bytes == y_bytes && !memcmp(x, y, x_bytes);
    free(x);
    free(y);
    return same;
}

static int exists(const char *where, const char *name)
{
    char path[600];
    snprintf(path, sizeof path, "%s/%s", where, name);
    return access(path, F_OK) == 0;
}

/* ---- */

static void test_init(void **state)
{
    job j = make_job(1, 0, NULL, first_path);
    run_ok(&j);
    zs_st *st;
    assert_int_equal(zs_st_open(first_path, &st), ZS_OK);
    assert_int_equal(zs_st_count(st), 1 + 2 * 12 + 1);
    assert_null(zs_st_find(st, "lm_head.weight"));
    const zs_st_tensor *t = zs_st_find(st, "model.embed_tokens.weight");
    float values[211 * 20];
    double sum = 0, squares = 0, fourth = 0;
    const int n = (int)ZS_COUNT(values);
    assert_int_equal(t->dtype, ZS_ST_F32);
    assert_int_equal(zs_st_read(st, t, 0, t->numel, values), ZS_OK);
    for (int i = 0; i < n; i++) {
        double v = values[i] / 0.041666666666666664;
        sum += v;
        squares += v * v;
        fourth += v * v * v * v;
    }
    /* Mean, variance and kurtosis of a standard normal, within about four standard errors. */
    assert_true(fabs(sum / n) < 4 / sqrt(n));
    assert_true(fabs(squares / n - 1) < 4 * sqrt(2.0 / n));
    assert_true(fabs(fourth / n - 3) < 4 * sqrt(96.0 / n));
    t = zs_st_find(st, "model.layers.1.input_layernorm.weight");
    assert_int_equal(zs_st_read(st, t, 0, t->numel, values), ZS_OK);
    for (uint64_t i = 0; i < t->numel; i++)
        assert_true(values[i] == 1);
    t = zs_st_find(st, "model.layers.1.self_attn.k_proj.bias");
    assert_int_equal(zs_st_read(st, t, 0, t->numel, values), ZS_OK);
    for (uint64_t i = 0; i < t->numel; i++)
        assert_true(values[i] == 0);
    zs_st_close(&st);
    /* The same values for another world, stage and tier, others for another seed. */
    for (int stage = 0; stage <= 3; stage++) {
        j = make_job(1 + stage, stage, NULL, second_path);
        if (stage == 3)
            j.param_tier = ZS_TIER_NVME;
        run_ok(&j);
        assert_true(same_file(first_path, second_path, "model.safetensors"));
    }
    j.seed = 8;
    run_ok(&j);
    assert_false(same_file(first_path, second_path, "model.safetensors"));
}

static void test_round_trip(void **state)
{
    job j = make_job(1, 0, NULL, first_path);
    run_ok(&j);
    for (int stage = 0; stage <= 3; stage++) {
        j = make_job(4 - stage, stage, first_path, second_path);
        run_ok(&j);
        assert_true(same_file(first_path, second_path, "model.safetensors"));
    }
    /* Saved in bf16, read back into fp32: the same bits, widened. */
    char *third_path = temp_path(&dir, "third"), *fourth_path = temp_path(&dir, "fourth");
    j = make_job(2, 3, first_path, third_path);
    j.saved = ZS_BF16;
    run_ok(&j);
    j = make_job(3, 2, third_path, fourth_path);
    run_ok(&j);
    zs_st *narrow, *wide, *exact;
    assert_int_equal(zs_st_open(third_path, &narrow), ZS_OK);
    assert_int_equal(zs_st_open(fourth_path, &wide), ZS_OK);
    assert_int_equal(zs_st_open(first_path, &exact), ZS_OK);
    for (size_t i = 0; i < zs_st_count(narrow); i++) {
        const zs_st_tensor *t = zs_st_at(narrow, i);
        uint16_t *a = malloc(t->bytes);
        uint32_t *b = malloc(2 * t->bytes);
        float *c = malloc(2 * t->bytes);
        assert_int_equal(t->dtype, ZS_ST_BF16);
        assert_int_equal(zs_st_read(narrow, t, 0, t->numel, a), ZS_OK);
        assert_int_equal(zs_st_read(wide, zs_st_find(wide, t->name), 0, t->numel, b), ZS_OK);
        assert_int_equal(zs_st_read(exact, zs_st_find(exact, t->name), 0, t->numel, c), ZS_OK);
        for (uint64_t k = 0; k < t->numel; k++) {
            float w;
            memcpy(&w, &b[k], sizeof w);
            assert_int_equal(b[k], (uint32_t)a[k] << 16);
            assert_true(fabsf(w - c[k]) <= fabsf(c[k]) / 256);
        }
        free(a);
        free(b);
        free(c);
    }
    zs_st_close(&narrow);
    zs_st_close(&wide);
    zs_st_close(&exact);
    free(third_path);
    free(fourth_path);
}

static int files_like(const char *where, const char *text)
{
    int count = 0;
    DIR *listing = opendir(where);
    for (struct dirent *entry; (entry = readdir(listing));)
        count += strstr(entry->d_name, text) != NULL;
    closedir(listing);
    return count;
}

/* Above the limit weights become several files, in order, none over it but for lone tensors; what
 * was saved before goes, whichever way round. */
static void test_shards(void **state)
{
    enum { LIMIT = 8000 };
    zs_st *st;
    uint64_t bytes = 0;
    const char *path;
    char *third_path = temp_path(&dir, "third");
    job j = make_job(2, 1, NULL, first_path);
    run_ok(&j);
    j = make_job(3, 3, first_path, second_path);
    run_ok(&j);
    j.shard_bytes = LIMIT;
    run_ok(&j);
    assert_false(exists(second_path, "model.safetensors"));
    assert_int_equal(files_like(second_path, ".tmp"), 0);
    assert_int_equal(zs_st_open(second_path, &st), ZS_OK);
    const int files = files_like(second_path, "model-0");
    assert_true(files > 3);
    for (int i = 0; i < files; i++) {
        char name[64];
        uint64_t held = 0;
        int tensors = 0;
        snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", i + 1, files);
        path = zs_st_file(st, i, &bytes);
        assert_non_null(path);
        assert_string_equal(strrchr(path, '/') + 1, name);
        for (size_t t = 0; t < zs_st_count(st); t++)
            if (zs_st_at(st, t)->file == i) {
                held += zs_st_at(st, t)->bytes;
                tensors++;
            }
        assert_true(held <= LIMIT || tensors == 1);
    }
    zs_st_close(&st);
    /* The same weights, read back from the shards, and by other ranks. */
    j = make_job(4, 2, second_path, third_path);
    run_ok(&j);
    assert_true(same_file(first_path, third_path, "model.safetensors"));
    /* Cut otherwise over the same directory, then whole again. */
    j = make_job(2, 2, first_path, second_path);
    j.shard_bytes = 2 * LIMIT;
    run_ok(&j);
    assert_true(files_like(second_path, "model-0") < files);
    assert_int_equal(zs_st_open(second_path, &st), ZS_OK);
    zs_st_close(&st);
    j.shard_bytes = 0;
    run_ok(&j);
    assert_true(same_file(first_path, second_path, "model.safetensors"));
    assert_int_equal(files_like(second_path, "model"), 1);
    free(third_path);
}

static void test_companions(void **state)
{
    size_t bytes;
    temp_write(&dir, "source/tokenizer.json", "{}", 2);
    temp_write(&dir, "source/chat_template.jinja", "x", 1);
    temp_write(&dir, "source/generation_config.json", "{ }", 3);
    temp_write(&dir, "source/README.md", "x", 1);
    job j = make_job(2, 1, NULL, second_path);
    run_ok(&j);
    assert_true(same_file(source, second_path, "tokenizer.json"));
    assert_true(same_file(source, second_path, "chat_template.jinja"));
    assert_true(same_file(source, second_path, "generation_config.json"));
    assert_false(exists(second_path, "README.md"));
    assert_false(exists(second_path, "model.safetensors.tmp"));
    /* The dtype key is added where there is none, and set under the name it has. */
    char *text = read_file(second_path, "config.json", &bytes);
    assert_non_null(strstr(text, "\"torch_dtype\": \"float32\""));
    assert_non_null(strstr(text, "\"initializer_range\": 0.041666666666666664"));
    assert_int_equal(text[bytes - 1], '\n');
    free(text);
    temp_write(&dir, "source/config.json", CONFIG_OF("211", "\"dtype\":\"float32\""),
               strlen(CONFIG_OF("211", "\"dtype\":\"float32\"")));
    j.saved = ZS_BF16;
    run_ok(&j);
    text = read_file(second_path, "config.json", &bytes);
    assert_non_null(strstr(text, "\"dtype\": \"bfloat16\""));
    assert_null(strstr(text, "torch_dtype"));
    free(text);
    assert_true(exists(second_path, "model.safetensors"));
    /* Onto itself, and from a file alone. */
    j = make_job(2, 2, second_path, second_path);
    j.config = j.source = config_path;
    run_ok(&j);
    j.source = second_path;
    run_ok(&j);
    text = read_file(second_path, "config.json", &bytes);
    assert_non_null(strstr(text, "\"dtype\": \"float32\""));
    free(text);
    assert_true(same_file(source, second_path, "tokenizer.json"));
}

static void test_bad_loads(void **state)
{
    job j = make_job(1, 0, NULL, first_path);
    run_ok(&j);
    j = make_job(2, 3, first_path, NULL);
    temp_write(&dir, "source/config.json", CONFIG_OF("212", "\"tie_word_embeddings\":true"),
               strlen(CONFIG_OF("212", "\"tie_word_embeddings\":true")));
    run_fails(&j, ZS_ERR_MISMATCH,
              "tensor \"model.embed_tokens.weight\" has shape [211, 20], but config.json asks for "
              "[212, 20]");
    temp_write(&dir, "source/config.json", CONFIG_OF("211", "\"tie_word_embeddings\":false"),
               strlen(CONFIG_OF("211", "\"tie_word_embeddings\":false")));
    run_fails(&j, ZS_ERR_MISMATCH,
              "tensor \"lm_head.weight\" is missing (if the head is the embedding, config.json "
              "must say \"tie_word_embeddings\": true)");
    /* An untied model's head is ignored where the configuration ties it. */
    job untied = make_job(1, 0, NULL, second_path);
    run_ok(&untied);
    temp_write(&dir, "source/config.json", CONFIG, strlen(CONFIG));
    job tied = make_job(2, 1, second_path, NULL);
    run_ok(&tied);
    /* One layer more in the files than in the model. */
    temp_write(&dir, "source/config.json",
               CONFIG_OF("211", "\"tie_word_embeddings\":true,\"head_dim\":10"),
               strlen(CONFIG_OF("211", "\"tie_word_embeddings\":true,\"head_dim\":10")));
    char *text, *layers;
    size_t bytes;
    text = read_file(source, "config.json", &bytes);
    layers = strstr(text, "\"num_hidden_layers\":2");
    layers[20] = '1';
    temp_write(&dir, "source/config.json", text, bytes);
    free(text);
    run_fails(&j, ZS_ERR_MISMATCH, "is no weight of the model that config.json describes");
    j.load = source;
    run_fails(&j, ZS_ERR_IO, "has neither model.safetensors nor model.safetensors.index.json");
}

static void test_other_dtypes(void **state)
{
    static const char start[] = "{\"model.embed_tokens.weight\":{\"dtype\":\"F64\",\"shape\":[211,"
                                "20],\"data_offsets\":[0,33760]}}";
    size_t bytes = 8 + strlen(start) + 33760;
    char *data = calloc(1, bytes);
    data[0] = (char)strlen(start);
    memcpy(data + 8, start, strlen(start));
    temp_write(&dir, "source/model.safetensors", data, bytes);
    free(data);
    job j = make_job(2, 1, source, NULL);
    run_fails(&j, ZS_ERR_UNSUPPORTED,
              "tensor \"model.embed_tokens.weight\" has dtype F64; weights are read from F32, BF16 "
              "and F16");
}

static void test_bad_saves(void **state)
{
    temp_write(&dir, "file", "x", 1);
    char *under = temp_path(&dir, "file/under");
    job j = make_job(3, 2, NULL, under);
    run_ranks(&j);
    assert_int_equal(j.status[0], ZS_ERR_IO);
    assert_non_null(strstr(j.message[0], "file/under cannot be made or written: Not a directory"));
    for (int r = 1; r < 3; r++) {
        assert_int_equal(j.status[r], ZS_ERR_COMM);
        assert_non_null(strstr(j.message[r], "rank 0 failed to save the model to "));
    }
    free(under);
    /* A directory where the weights belong: nothing half-written stays. */
    char *in_the_way = temp_path(&dir, "first/model.safetensors/x");
    char *made = temp_path(&dir, "first");
    mkdir(made, 0777);
    free(made);
    made = temp_path(&dir, "first/model.safetensors");
    mkdir(made, 0777);
    mkdir(in_the_way, 0777);
    j = make_job(2, 1, NULL, first_path);
    run_ranks(&j);
    assert_int_equal(j.status[0], ZS_ERR_IO);
    assert_non_null(strstr(j.message[0], "cannot rename"));
    assert_int_equal(j.status[1], ZS_ERR_COMM);
    assert_false(exists(first_path, "model.safetensors.tmp"));
    free(made);
    free(in_the_way);
    /* The same in the way of one of several files: the others go, too. */
    in_the_way = temp_path(&dir, "deep/er/second/model-00002-of-00003.safetensors/x");
    j = make_job(2, 1, NULL, second_path);
    j.shard_bytes = 16000;
    run_ok(&j);
    assert_true(exists(second_path, "model-00003-of-00003.safetensors"));
    made = temp_path(&dir, "deep/er/second/model-00002-of-00003.safetensors");
    unlink(made);
    mkdir(made, 0777);
    mkdir(in_the_way, 0777);
    run_ranks(&j);
    assert_int_equal(j.status[0], ZS_ERR_IO);
    assert_non_null(strstr(j.message[0], "cannot rename"));
    assert_int_equal(files_like(second_path, "model"), 1); /* the directory */
    rmdir(in_the_way);
    rmdir(made);
    free(made);
    free(in_the_way);
    /* What an interrupted save left goes with the next one. */
    temp_write(&dir, "deep/er/second/model-00002-of-00009.safetensors.tmp", "x", 1);
    temp_write(&dir, "deep/er/second/model-00002-of-00009.safetensors.txt", "x", 1);
    run_ok(&j);
    assert_int_equal(files_like(second_path, "00009"), 1);
    assert_int_equal(files_like(second_path, "00003"), 3);
    /* A source whose config.json went away. */
    char *nowhere = temp_path(&dir, "nowhere");
    char *never = temp_path(&dir, "never");
    j = make_job(2, 1, NULL, never);
    j.source = nowhere;
    run_ranks(&j);
    assert_int_equal(j.status[0], ZS_ERR_IO);
    assert_non_null(strstr(j.message[0], "nowhere: No such file"));
    assert_false(exists(never, ""));
    free(never);
    free(nowhere);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_init, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_round_trip, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_shards, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_companions, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_bad_loads, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_other_dtypes, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_bad_saves, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
