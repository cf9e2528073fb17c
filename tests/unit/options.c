/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/options.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { WORDS = 32 };

/* The words of line, cut at blanks, behind "train". */
static zs_status parse(const char *line, zs_options *out)
{
    char copy[1024], *argv[WORDS] = {"train"};
    int argc = 1;
    snprintf(copy, sizeof(copy), "%s", line);
    for (char *word = strtok(copy, " "); word && argc < WORDS; word = strtok(NULL, " "))
        argv[argc++] = word;
    return zs_options_parse(argc, argv, out);
}

static void refuse(const char *line, const char *message)
{
    zs_options options;
    assert_int_equal(parse(line, &options), ZS_ERR_ARG);
    if (!strstr(zs_last_error(), message))
        fail_msg("'%s' gives '%s', not '%s'", line, zs_last_error(), message);
}

#define RUN "--model m --data d --out o "

static void test_defaults(void **state)
{
    zs_options o;
    (void)state;
    assert_int_equal(parse(RUN, &o), ZS_OK);
    assert_string_equal(o.model, "m");
    assert_null(o.init);
    assert_int_equal(o.ranks, 0);
    assert_int_equal(o.zero_stage, 0);
    assert_int_equal(o.optimizer.tier, ZS_TIER_DEVICE);
    assert_int_equal(o.grad_accum, 1);
    assert_int_equal(o.steps, -1);
    assert_int_equal(o.epochs, 1);
    assert_true(o.beta2 == 0.999 && o.clip == 1.0);
    assert_int_equal(o.shuffle, 1);
    assert_int_equal(o.resume, 0);
    zs_options_free(&o);
}

static int64_t commits(const char *line)
{
    zs_options o;
    char whole[256];
    snprintf(whole, sizeof(whole), RUN "%s", line);
    assert_int_equal(parse(whole, &o), ZS_OK);
    zs_options_free(&o);
    return o.commit_every;
}

static void test_durability(void **state)
{
    (void)state;
    assert_int_equal(commits(""), 0);
    assert_int_equal(commits("--offload-optimizer host"), 0);
    assert_int_equal(commits("--offload-optimizer nvme:d"), 1);
    assert_int_equal(commits("--offload-optimizer nvme:d --durability exit"), 0);
    assert_int_equal(commits("--offload-optimizer nvme:d --save-every 0"), 0);
    assert_int_equal(commits("--durability step"), 1);
    assert_int_equal(commits("--durability every=7"), 7);
    assert_int_equal(commits("--durability=every=7"), 7);
    assert_int_equal(commits("--save-every 9"), 9);
    refuse(RUN "--slots 1 --durability every=3", "--slots 1 needs --durability exit");
    refuse(RUN "--slots 1 --offload-optimizer nvme:d", "--slots 1 needs --durability exit");
    refuse(RUN "--slots 3", "--slots 3 is out of range");
    refuse(RUN "--keep 15", "--keep 15 is out of range: 0 to 14");
    refuse(RUN "--durability exit --slots 1 --keep 1", "--keep 1 needs --slots 2");
    refuse(RUN "--resume-commit 3", "--resume-commit needs --resume");
    refuse(RUN "--durability often", "--durability 'often' is none of step|every=N|exit");
    refuse(RUN "--durability every=0", "--durability 0 is out of range: 1 to ");
    refuse(RUN "--durability every=x", "--durability 'x' is not a whole number");
    refuse(RUN "--durability step --save-every 2", "--durability and --save-every contradict");
}

static void test_every_kind(void **state)
{
    zs_options o;
    (void)state;
    assert_int_equal(parse("--init=c.json --data d --out o --zero_stage 3 --offload-params nvme:/p "
                           "--offload-optimizer=host --buffer-bytes 3MiB --max-live-params 77 "
                           "--dtype bf16 --steps 9 --lr 1e-3 --seed 123456789012 --shuffle off "
                           "--resume --ranks 4 --schedule cosine --warmup 9",
                           &o),
                     ZS_OK);
    assert_string_equal(o.init, "c.json");
    assert_int_equal(o.params.tier, ZS_TIER_NVME);
    assert_string_equal(o.params.dir, "/p");
    assert_int_equal(o.optimizer.tier, ZS_TIER_HOST);
    assert_int_equal(o.buffer_bytes, 3 << 20);
    assert_int_equal(o.max_live_params, 77);
    assert_int_equal(o.dtype, ZS_BF16);
    assert_true(o.lr == 1e-3);
    assert_true(o.seed == 123456789012);
    assert_int_equal(o.shuffle, 0);
    assert_int_equal(o.resume, 1);
    assert_int_equal(o.schedule, ZS_SCHEDULE_COSINE);
    assert_int_equal(o.epochs, -1);
    zs_options_free(&o);
}

static void test_last_wins(void **state)
{
    zs_options o;
    (void)state;
    assert_int_equal(
        parse(RUN "--lr 1 --offload-optimizer nvme:a --offload-optimizer none --lr 2", &o), ZS_OK);
    assert_true(o.lr == 2);
    assert_null(o.optimizer.dir);
    zs_options_free(&o);
}

static void test_bad_values(void **state)
{
    (void)state;
    refuse(RUN "--ranks 0", "--ranks 0 is out of range: 1 to 64");
    refuse(RUN "--ranks 65", "--ranks 65 is out of range: 1 to 64");
    refuse(RUN "--threads 65", "--threads 65 is out of range: 0 to 64");
    refuse(RUN "--ranks two", "--ranks 'two' is not a whole number");
    refuse(RUN "--ranks 2x", "--ranks '2x' is not a whole number");
    refuse(RUN "--zero-stage 4", "--zero-stage 4 is out of range: 0 to 3");
    refuse(RUN "--seed 99999999999999999999", "out of range");
    refuse(RUN "--lr abc", "--lr 'abc' is not a number");
    refuse(RUN "--lr nan", "--lr nan is out of range");
    refuse(RUN "--lr -1", "--lr -1 is out of range");
    refuse(RUN "--beta1 1", "0 to 1 (exclusive)");
    refuse(RUN "--timeout 0", "--timeout 0 is out of range");
    refuse(RUN "--dtype fp64", "--dtype 'fp64' is none of fp32|bf16");
    refuse(RUN "--offload-optimizer disk", "is none of none|host|nvme:DIR");
    refuse(RUN "--offload-optimizer nvme:", "names no directory: write nvme:DIR");
    refuse(RUN "--offload-optimizer nvme", "names no directory: write nvme:DIR");
    refuse(RUN "--buffer-bytes 9XB", "is not a whole number of bytes");
    refuse(RUN "--steps", "--steps needs a value: N");
    refuse("model", "argument 'model' is not an option");
}

static void test_unknown(void **state)
{
    (void)state;
    refuse(RUN "--zero-stag 3", "unknown option '--zero-stag': did you mean '--zero-stage'?");
    refuse(RUN "--lrr 3", "did you mean '--lr'?");
    refuse(RUN "--offload 3", "did you mean '--offload-optimizer'?");
    refuse(RUN "--qqqqqqqq 3", "unknown option '--qqqqqqqq': `zspill train --help` lists them");
}

static void test_contradictions(void **state)
{
    (void)state;
    refuse(RUN "--init c", "--model and --init contradict each other");
    refuse("--data d --out o", "no model: give --model DIR, or --init CONFIG");
    refuse("--model m --out o", "no data: give --data FILE");
    refuse("--model m --data d", "nowhere to write to: give --out DIR");
    refuse(RUN "--steps 3 --epochs 1", "--steps and --epochs contradict each other");
    refuse(RUN "--offload-params host", "--offload-params needs --zero-stage 3, not 0");
    refuse(RUN "--offload-params nvme:x --zero-stage 2", "needs --zero-stage 3, not 2");
    refuse(RUN "--max-live-params 9 --zero-stage 1", "--max-live-params needs --zero-stage 3");
    refuse(RUN "--reduce boundary --zero-stage 2", "--reduce boundary needs --zero-stage 0 or 1");
    refuse(RUN "--reduce boundary --zero-stage 3", "--reduce boundary needs --zero-stage 0 or 1");
    refuse(RUN "--warmup 11 --steps 10", "--warmup 11 is longer than --steps 10");
    refuse(RUN "--eval-every 5", "--eval-every needs --eval-data");
    refuse("--model m --steps 0", "--steps 0 only evaluates: give --eval-data too");
    refuse("--model m --steps 0 --eval-data e --resume", "--steps 0 takes no --resume");
}

static void with_file(const char *json, const char *line, void (*check)(const char *line))
{
    char path[] = "/tmp/zspill-options-XXXXXX", full[512];
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, json, strlen(json)), (ssize_t)strlen(json));
    close(fd);
    snprintf(full, sizeof(full), "%s --config %s", line, path);
    check(full);
    unlink(path);
}

static void check_merged(const char *line)
{
    zs_options o;
    assert_int_equal(parse(line, &o), ZS_OK);
    assert_int_equal(o.zero_stage, 2);
    assert_int_equal(o.ranks, 3);
    assert_true(o.lr == 0.125);
    assert_true(o.eps == 0.0);
    assert_int_equal(o.shuffle, 0);
    assert_int_equal(o.resume, 1);
    assert_string_equal(o.optimizer.dir, "/x");
    zs_options_free(&o);
}

static void check_unknown(const char *line)
{
    refuse(line, "unknown option 'zero_stagee': did you mean 'zero-stage'?");
    refuse(line, "--config /tmp/zspill-options-");
}

static void check_range(const char *line)
{
    refuse(line, "--ranks 70 is out of range: 1 to 64");
}

static void check_type(const char *line)
{
    refuse(line, "'lr' must be a number, a string, true or false");
}

static void check_syntax(const char *line)
{
    refuse(line, "line 1");
}

static void check_twice(const char *line)
{
    refuse(line, "'zero-stage' is there twice, with dash and underscore");
}

static void check_object(const char *line)
{
    refuse(line, "must hold a JSON object");
}

static void test_config_file(void **state)
{
    (void)state;
    with_file("{\"zero_stage\": 1, \"ranks\": 3, \"lr\": 0.125, \"eps\": 0, \"shuffle\": false, "
              "\"resume\": true, \"offload-optimizer\": \"nvme:/x\"}",
              RUN "--zero-stage 2", check_merged);
    with_file("{\"zero_stagee\": 1}", RUN, check_unknown);
    with_file("{\"ranks\": 70}", RUN, check_range);
    with_file("{\"lr\": [1]}", RUN, check_type);
    with_file("{\"lr\": ", RUN, check_syntax);
    with_file("{\"zero_stage\": 1, \"zero-stage\": 2}", RUN, check_twice);
    with_file("[]", RUN, check_object);
    refuse(RUN "--config /does/not/exist", "/does/not/exist");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),       cmocka_unit_test(test_durability),
        cmocka_unit_test(test_every_kind),     cmocka_unit_test(test_last_wins),
        cmocka_unit_test(test_bad_values),     cmocka_unit_test(test_unknown),
        cmocka_unit_test(test_contradictions), cmocka_unit_test(test_config_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
