/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/cli.h"

#include <fcntl.h>
#include <sys/stat.h>

#include "base/ledger.h"
#include "offload/store.h"
#include "unit/check.h"
#include "unit/temp.h"

#define CONFIG                                                                                     \
    "{\"model_type\":\"llama\",\"vocab_size\":4,\"hidden_size\":2,\"intermediate_size\":1,"        \
    "\"num_hidden_layers\":1,\"num_attention_heads\":1,\"tie_word_embeddings\":true"

static temp_dir dir;
static char printed[1 << 14], complained[1 << 12];

static int set_up(void **state)
{
    temp_make(&dir);
    return 0;
}

static int tear_down(void **state)
{
    temp_remove(&dir);
    return 0;
}

static void read_back(const char *name, char *out, size_t capacity)
{
    char *path = temp_path(&dir, name);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    out[fread(out, 1, capacity - 1, file)] = 0;
    fclose(file);
    remove(path);
    free(path);
}

/* Standard stream fd goes to the file name until it is put back; returns what it was. */
static int redirect(int fd, const char *name)
{
    char *path = temp_path(&dir, name);
    int kept = dup(fd), file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(kept >= 0 && file >= 0 && dup2(file, fd) == fd);
    close(file);
    free(path);
    return kept;
}

static void put_back(int fd, int kept)
{
    dup2(kept, fd);
    close(kept);
}

static int inspect(const char *path)
{
    char command[] = "inspect", *copy = path ? strdup(path) : NULL;
    char *argv[] = {command, copy, NULL};
    fflush(stdout);
    int out = redirect(1, "out"), err = redirect(2, "err");
    int code = zs_cli_inspect(path ? 2 : 1, argv);
    fflush(stdout);
    put_back(1, out);
    put_back(2, err);
    read_back("out", printed, sizeof printed);
    read_back("err", complained, sizeof complained);
    free(copy);
    return code;
}

static int inspect_name(const char *name)
{
    char *path = temp_path(&dir, name);
    int code = inspect(path);
    free(path);
    return code;
}

static void holds(const char *text, const char *part)
{
    if (!strstr(text, part))
        fail_msg("no '%s' in:\n%s", part, text);
}

/* A safetensors file of BF16 tensors of these names and shapes. */
static void make_tensors(const char *name, const char *const *names, const char *const *shapes,
                         const int *numels, size_t count)
{
    char bytes[4096] = {0};
    int at = 8, data = 0;
    at += sprintf(bytes + at, "{\"__metadata__\":{\"made\":\"by\\u001b[31m\"}");
    for (size_t i = 0; i < count; i++, data += 2 * numels[i - 1])
        at += sprintf(bytes + at,
                      ",\"%s\":{\"dtype\":\"BF16\",\"shape\":[%s],\"data_offsets\":[%d,%d]}",
                      names[i], shapes[i], data, data + 2 * numels[i]);
    bytes[at++] = '}';
    bytes[0] = (char)((at - 8) & 0xff);
    bytes[1] = (char)((at - 8) >> 8);
    temp_write(&dir, name, bytes, (size_t)(at + data));
}

static void test_usage(void **state)
{
    assert_int_equal(inspect(NULL), ZS_EXIT_USAGE);
    holds(complained, "usage: zspill inspect PATH");
    assert_string_equal(printed, "");
    assert_int_equal(inspect("--help"), ZS_EXIT_OK);
    holds(printed, "usage: zspill inspect PATH");
    assert_int_equal(inspect_name("missing"), ZS_EXIT_FAILED);
    holds(complained, "missing: No such file");
}

static void test_tensors(void **state)
{
    static const char *const names[] = {"a", "b"}, *const shapes[] = {"2, 3", ""};
    static const int numels[] = {6, 1};
    make_tensors("x.safetensors", names, shapes, numels, 2);
    assert_int_equal(inspect_name("x.safetensors"), ZS_EXIT_OK);
    assert_string_equal(complained, "");
    holds(printed, "metadata     made = by?[31m\n");
    holds(printed, "tensors      2\n");
    holds(printed, "  BF16       7 elements, 14 B\n");
    holds(printed, "  a  BF16           12 B  [2, 3]\n");
    holds(printed, "  b  BF16            2 B  []\n");
    temp_write(&dir, "y.safetensors", "short", 5);
    assert_int_equal(inspect_name("y.safetensors"), ZS_EXIT_FAILED);
    holds(complained, "y.safetensors has 5 bytes");
}

static void test_model(void **state)
{
    static const char *const names[] = {"model.embed_tokens.weight",
                                        "model.layers.0.input_layernorm.weight",
                                        "model.layers.0.self_attn.q_proj.weight",
                                        "model.layers.0.self_attn.k_proj.weight",
                                        "model.layers.0.self_attn.v_proj.weight",
                                        "model.layers.0.self_attn.o_proj.weight",
                                        "model.layers.0.post_attention_layernorm.weight",
                                        "model.layers.0.mlp.gate_proj.weight",
                                        "model.layers.0.mlp.up_proj.weight",
                                        "model.layers.0.mlp.down_proj.weight",
                                        "model.norm.weight",
                                        "lm_head.weight",
                                        "stranger"};
    const char *shapes[] = {"4,2", "2",   "2,2", "2,2", "2,2", "2,2", "2",
                            "1,2", "1,2", "2,1", "2",   "4,2", "1"};
    static const int numels[] = {8, 2, 4, 4, 4, 4, 2, 2, 2, 2, 2, 8, 1};
    temp_write(&dir, "config.json", CONFIG "}", strlen(CONFIG "}"));
    make_tensors("model.safetensors", names, shapes, numels, 12);
    assert_int_equal(inspect(dir.path), ZS_EXIT_OK);
    assert_string_equal(complained, "");
    holds(printed, "architecture llama\n");
    holds(printed, "parameters   36\n");
    holds(printed, "embeddings tied\n");
    holds(printed, "weights      all 11 are there");
    /* An untied model needs its head; strangers and other shapes are named. */
    temp_write(&dir, "config.json", CONFIG "}", strlen(CONFIG "}"));
    make_tensors("model.safetensors", names, shapes, numels, 13);
    assert_int_equal(inspect(dir.path), ZS_EXIT_FAILED);
    holds(complained, "tensor \"stranger\" is no weight of the model");
    shapes[7] = "2,1";
    make_tensors("model.safetensors", names, shapes, numels, 12);
    assert_int_equal(inspect(dir.path), ZS_EXIT_FAILED);
    holds(complained, "gate_proj.weight\" has shape [2, 1], but config.json asks for [1, 2]");
    make_tensors("model.safetensors", names, shapes, numels, 3);
    assert_int_equal(inspect(dir.path), ZS_EXIT_FAILED);
    holds(complained, "tensor \"model.layers.0.self_attn.k_proj.weight\" is missing");
    temp_write(&dir, "config.json", "{\"model_type\":\"gpt2\"}", 21);
    assert_int_equal(inspect(dir.path), ZS_EXIT_FAILED);
    holds(complained, "model_type = \"gpt2\" is not supported");
    holds(printed, "tensors      3\n");
}

static void commit(zs_store *store, uint64_t step)
{
    zs_superblock super = {
        .step = step, .sequence = step, .world = 2, .rank = 1, .chunk_numel = 4096};
    super.shards = calloc(1, sizeof *super.shards);
    super.shards[0].numel = 5000;
    super.shard_count = 1;
    super.slots = calloc(2, sizeof *super.slots);
    super.chunk_count = 2;
    assert_int_equal(zs_store_publish(store, &super), ZS_OK);
}

static void test_checkpoint(void **state)
{
    const zs_store_shard shard = {.numel = 5000};
    zs_store_geometry geometry;
    zs_store store;
    zs_io *io;
    zs_device *device;
    zs_ledger *ledger;
    assert_int_equal(zs_ledger_open(&ledger), ZS_OK);
    assert_int_equal(zs_device_open_host(&device), ZS_OK);
    assert_int_equal(zs_io_open(ZS_IO_POSIX, 0, NULL, &io), ZS_OK);
    assert_int_equal(zs_store_geometry_make(1, 2, 2, 4096, &shard, 1, &geometry), ZS_OK);
    assert_int_equal(zs_store_lock(dir.path, 1, 1, NULL, &store), ZS_OK);
    assert_int_equal(zs_store_allocate(&store, &geometry, io, device, ledger), ZS_OK);
    /* While another process holds it, too. */
    assert_int_equal(inspect(dir.path), ZS_EXIT_OK);
    holds(printed, "nothing is committed yet");
    commit(&store, 7);
    commit(&store, 8);
    assert_int_equal(inspect(dir.path), ZS_EXIT_OK);
    assert_string_equal(complained, "");
    holds(printed, "zspill-rank00001.state");
    holds(printed, "rank 1 of 2");
    holds(printed, "1 shards, 5000 elements, 2 chunks of at most 4096\n");
    holds(printed, "step 7, sequence 7");
    holds(printed, "step 8, sequence 8, 0 bytes of engine state (in force)\n");
    zs_store_close(&store);
    assert_int_equal(inspect_name("zspill-rank00001.state"), ZS_EXIT_OK);
    holds(printed, "(in force)");
    char *path = temp_path(&dir, "zspill-rank00001.state");
    assert_int_equal(truncate(path, 100), 0);
    assert_int_equal(inspect(dir.path), ZS_EXIT_FAILED);
    holds(complained, "it was truncated");
    free(path);
    zs_store_geometry_free(&geometry);
    zs_io_close(&io);
    zs_device_close(&device);
    zs_ledger_close(&ledger);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_usage, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_tensors, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_model, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_checkpoint, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
