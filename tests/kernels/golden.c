/* SPDX-License-Identifier: Apache-2.0 */
/* Adam at every level against values that other projects print (optim_golden/adamw_golden.json). */
#include <jansson.h>

#include "check.h"
#include "tests/data.h"

enum { SKIP = 77, MOST = 64 };

typedef struct golden_run {
    const zs_kernels *kernels;
    zs_group_config group;
    float w[MOST], m[MOST], v[MOST], grad[MOST];
    size_t n;
    uint64_t step;
} golden_run;

static double number(const json_t *entry, const char *key)
{
    return json_number_value(json_object_get(entry, key));
}

static double item(const json_t *list, size_t i)
{
    return json_number_value(json_array_get(list, i));
}

static golden_run run_start(const zs_kernels *k, const json_t *entry, const char *weights)
{
    const json_t *betas = json_object_get(entry, "betas"), *init = json_object_get(entry, weights);
    golden_run run = {.kernels = k,
                      .group = {.lr = number(entry, "lr"),
                                .beta1 = item(betas, 0),
                                .beta2 = item(betas, 1),
                                .eps = number(entry, "eps"),
                                .weight_decay = number(entry, "weight_decay"),
                                .decoupled = 1},
                      .n = json_array_size(init)};
    check_that(run.n > 0 && run.n <= MOST, "golden: number of weights");
    for (size_t i = 0; i < run.n && i < MOST; i++)
        run.w[i] = (float)item(init, i);
    return run;
}

static void run_step(golden_run *run)
{
    zs_adam_coef coef;
    zs_adam_coef_make(&coef, &run->group, ++run->step, 1.0);
    run->kernels->adam[ZS_FP32][ZS_FP32](run->n, run->w, run->m, run->v, run->grad, NULL, &coef);
}

static void run_compare(const golden_run *run, const char *name, const json_t *expected,
                        double relative, double absolute)
{
    check_that(json_array_size(expected) == run->n, "golden: number of expected values");
    for (size_t i = 0; i < run->n; i++) {
        double want = item(expected, i);
        if (fabs(run->w[i] - want) <= absolute + relative * fabs(want))
            continue;
        printf("FAIL golden %s, level %s, step %llu: weight %zu is %.9g, want %.9g\n", name,
               run->kernels->name, (unsigned long long)run->step, i, run->w[i], want);
        check_failures++;
    }
}

/* loss = sum((w.x + b - y)^2) */
static void linear_regression(const zs_kernels *k, const json_t *entry)
{
    const json_t *xs = json_object_get(entry, "xs"), *ys = json_object_get(entry, "ys");
    golden_run run = run_start(k, entry, "init");
    for (int step = (int)number(entry, "steps"); step > 0; step--) {
        double grad[3] = {0};
        for (size_t r = 0; r < json_array_size(xs); r++) {
            double x0 = item(json_array_get(xs, r), 0), x1 = item(json_array_get(xs, r), 1);
            double error = run.w[0] * x0 + run.w[1] * x1 + run.w[2] - item(ys, r);
            grad[0] += 2 * error * x0;
            grad[1] += 2 * error * x1;
            grad[2] += 2 * error;
        }
        for (int i = 0; i < 3; i++)
            run.grad[i] = (float)grad[i];
        run_step(&run);
    }
    run_compare(&run, "candle_adamw_linear_regression", json_object_get(entry, "expected_w_b_4dp"),
                0, 6e-5);
}

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

/* Linear(2, 3), sigmoid, Linear(3, 1), sigmoid; loss = sum of the outputs. */
static void two_layers(const zs_kernels *k, const json_t *entry)
{
    const json_t *input = json_object_get(entry, "input"), *at;
    const json_t *tolerance = json_object_get(entry, "upstream_tol");
    const char *index;
    golden_run run = run_start(k, entry, "init");
    for (int step = 0; step <= 1000; step++) {
        double grad[13] = {0};
        for (size_t r = 0; r < json_array_size(input); r++) {
            double x[2] = {item(json_array_get(input, r), 0), item(json_array_get(input, r), 1)};
            double hidden[3], sum = run.w[12];
            for (int h = 0; h < 3; h++) {
                hidden[h] = sigmoid(run.w[2 * h] * x[0] + run.w[2 * h + 1] * x[1] + run.w[6 + h]);
                sum += run.w[9 + h] * hidden[h];
            }
            double out = sigmoid(sum), d_sum = out * (1 - out);
            grad[12] += d_sum;
            for (int h = 0; h < 3; h++) {
                double d_hidden = d_sum * run.w[9 + h] * hidden[h] * (1 - hidden[h]);
                grad[9 + h] += d_sum * hidden[h];
                grad[6 + h] += d_hidden;
                grad[2 * h] += d_hidden * x[0];
                grad[2 * h + 1] += d_hidden * x[1];
            }
        }
        for (int i = 0; i < 13; i++)
            run.grad[i] = (float)grad[i];
        run_step(&run);
        json_t *expected = json_object_get(entry, "expected_after_step_index");
        json_object_foreach(expected, index, at)
        {
            if (atoi(index) == step)
                run_compare(&run, "torch_cpp_baseline_adam_wd0", at, number(tolerance, "rtol"),
                            number(tolerance, "atol"));
        }
    }
}

/* Gradients 0.2 i at step i for all but the last six, which get 2. */
static void fifty_steps(const zs_kernels *k, const json_t *entry)
{
    golden_run run = run_start(k, entry, "param");
    for (int step = 1; step <= 50; step++) {
        for (size_t i = 0; i < run.n; i++)
            run.grad[i] = i + 6 < run.n ? 0.2f * (float)step : 2;
        run_step(&run);
    }
    run_compare(&run, "burn_adamw_50_steps", json_object_get(entry, "expected"), 0,
                number(entry, "upstream_tol_abs"));
}

int main(void)
{
    char *path = data_path("optim_golden/adamw_golden.json");
    json_error_t error;
    if (!path) {
        puts("skipped: no optim_golden in the folder of ZSPILL_TEST_DATA");
        return SKIP;
    }
    json_t *all = json_load_file(path, 0, &error);
    if (!all)
        printf("FAIL %s: line %d: %s\n", path, error.line, error.text);
    free(path);
    if (!all)
        return 1;
    for (const char *const *name = zs_kernels_names(); *name; name++) {
        const zs_kernels *k = zs_kernels_find(*name);
        if (!k)
            continue;
        linear_regression(k, json_object_get(all, "candle_adamw_linear_regression"));
        two_layers(k, json_object_get(all, "torch_cpp_baseline_adam_wd0"));
        fifty_steps(k, json_object_get(all, "burn_adamw_50_steps"));
    }
    json_decref(all);
    return check_finish();
}
