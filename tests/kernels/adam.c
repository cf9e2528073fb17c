/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"

enum { MASTER, EXP_AVG, EXP_AVG_SQ, GRAD, WORKING, ARRAYS };
static const char *const array_names[] = {"master", "exp_avg", "exp_avg_sq", "grad", "working"};

typedef struct adam_case {
    zs_dtype dtype[ARRAYS];
    size_t n, shift;
    check_kind kind;
    int with_working, decoupled;
} adam_case;

static zs_adam_coef coef_for(const adam_case *c)
{
    zs_group_config group = {.lr = 1e-3,
                             .beta1 = 0.9,
                             .beta2 = 0.999,
                             .eps = 1e-8,
                             .weight_decay = 0.1,
                             .decoupled = c->decoupled};
    zs_adam_coef coef;
    zs_adam_coef_make(&coef, &group, 3, 0.37);
    return coef;
}

static void run(const zs_kernels *k, const adam_case *c, check_array arrays[ARRAYS])
{
    zs_adam_coef coef = coef_for(c);
    k->adam[c->dtype[GRAD]][c->dtype[WORKING]](
        c->n, arrays[MASTER].data, arrays[EXP_AVG].data, arrays[EXP_AVG_SQ].data, arrays[GRAD].data,
        c->with_working ? arrays[WORKING].data : NULL, &coef);
}

static void compare(const zs_kernels *k, const zs_kernels *reference, const adam_case *c)
{
    check_array got[ARRAYS], want[ARRAYS];
    char what[160];
    for (int a = 0; a < ARRAYS; a++) {
        /* Each array misses alignment in its own way. */
        size_t shift = c->shift ? (c->shift + 8 * (size_t)a) % 64 : 0;
        want[a] = check_array_make(shift, c->n * zs_dtype_size(c->dtype[a]));
        check_fill(&want[a], c->dtype[a], c->kind, 17 * c->n + (size_t)a);
        got[a] = check_array_copy(&want[a]);
    }
    /* Second moments are not negative, but for the bit patterns, where anything goes. */
    if (c->kind != BITS)
        for (size_t i = 0; i < c->n; i++)
            zs_store_fp32(want[EXP_AVG_SQ].data, i, fabsf(zs_load_fp32(want[EXP_AVG_SQ].data, i)));
    memcpy(got[EXP_AVG_SQ].data, want[EXP_AVG_SQ].data, want[EXP_AVG_SQ].bytes);

    run(reference, c, want);
    run(k, c, got);
    snprintf(what, sizeof what, "adam %s: grad %s working %s%s n %zu shift %zu %s %s", k->name,
             zs_dtype_name(c->dtype[GRAD]), zs_dtype_name(c->dtype[WORKING]),
             c->with_working ? "" : " (none)", c->n, c->shift, check_kind_names[c->kind],
             c->decoupled ? "decoupled" : "L2");
    for (int a = 0; a < ARRAYS; a++)
        check_same(what, array_names[a], c->dtype[a], &got[a], &want[a]);
    for (int a = 0; a < ARRAYS; a++) {
        free(got[a].base);
        free(want[a].base);
    }
}

static void compare_all(const zs_kernels *k, const zs_kernels *reference)
{
    for (size_t s = 0; s < ZS_COUNT(check_sizes); s++)
        for (unsigned variant = 0;
             variant < ZS_COUNT(check_shifts) * CHECK_KINDS * ZS_DTYPES * ZS_DTYPES * 4;
             variant++) {
            unsigned v = variant;
            adam_case c = {.n = check_sizes[s]};
            c.shift = check_shifts[v % ZS_COUNT(check_shifts)];
            v /= ZS_COUNT(check_shifts);
            c.kind = (check_kind)(v % CHECK_KINDS);
            v /= CHECK_KINDS;
            c.dtype[GRAD] = (zs_dtype)(v % ZS_DTYPES);
            v /= ZS_DTYPES;
            c.dtype[WORKING] = (zs_dtype)(v % ZS_DTYPES);
            v /= ZS_DTYPES;
            c.with_working = v % 2;
            c.decoupled = v / 2 % 2;
            /* Large arrays once for each pair of dtypes: what is left differs in the tails. */
            if (c.n > 4096 && (c.shift != 4 || c.kind != BITS))
                continue;
            compare(k, reference, &c);
        }
}

/* The reference itself, against torch's formulas in double. */
static void reference_is_adam(void)
{
    for (int decoupled = 0; decoupled < 2; decoupled++)
        for (int steps = 1; steps <= 1000; steps *= 10) {
            zs_group_config g = {.lr = 0.01,
                                 .beta1 = 0.8,
                                 .beta2 = 0.99,
                                 .eps = 1e-6,
                                 .weight_decay = 0.2,
                                 .decoupled = decoupled};
            float w = 0.5f, m = 0, v = 0;
            double dw = 0.5, dm = 0, dv = 0;
            for (int t = 1; t <= steps; t++) {
                float grad = (float)sin(t) * 4;
                zs_adam_coef coef;
                zs_adam_coef_make(&coef, &g, (uint64_t)t, 0.25);
                zs_kernels_find("c")->adam[ZS_FP32][ZS_FP32](1, &w, &m, &v, &grad, NULL, &coef);
                double dg = grad * 0.25;
                if (decoupled)
                    dw -= g.lr * g.weight_decay * dw;
                else
                    dg += g.weight_decay * dw;
                dm = g.beta1 * dm + (1 - g.beta1) * dg;
                dv = g.beta2 * dv + (1 - g.beta2) * dg * dg;
                double denominator = sqrt(dv) / sqrt(1 - pow(g.beta2, t)) + g.eps;
                dw -= g.lr / (1 - pow(g.beta1, t)) * dm / denominator;
            }
            if (fabs(w - dw) <= 2e-6 && fabs(m - dm) <= 1e-6 && fabs(v - dv) <= 1e-6)
                continue;
            printf("FAIL adam c against double: %s, %d steps: w %.9g (%.9g) m %.9g (%.9g) v %.9g "
                   "(%.9g)\n",
                   decoupled ? "decoupled" : "L2", steps, w, dw, m, dm, v, dv);
            check_failures++;
        }
}

static void bench(const zs_kernels *k, zs_dtype grad, zs_dtype working, int with_working)
{
    adam_case c = {
        {ZS_FP32, ZS_FP32, ZS_FP32, grad, working}, BENCH_NUMEL, 0, RANDOM, with_working, 1};
    check_array arrays[ARRAYS];
    double seconds[BENCH_ROUNDS], bytes = 24 + (double)zs_dtype_size(grad);
    char what[64];
    for (int a = 0; a < ARRAYS; a++) {
        arrays[a] = check_array_make(0, c.n * zs_dtype_size(c.dtype[a]));
        check_fill(&arrays[a], c.dtype[a], RANDOM, (uint64_t)a);
    }
    memset(arrays[EXP_AVG_SQ].data, 0, arrays[EXP_AVG_SQ].bytes);
    run(k, &c, arrays);
    for (int r = 0; r < BENCH_ROUNDS; r++) {
        double start = zs_now();
        run(k, &c, arrays);
        seconds[r] = zs_now() - start;
    }
    if (with_working)
        bytes += (double)zs_dtype_size(working);
    snprintf(what, sizeof what, "adam grad %s working %s", zs_dtype_name(grad),
             with_working ? zs_dtype_name(working) : "none");
    bench_print(k->name, what, bytes, seconds);
    for (int a = 0; a < ARRAYS; a++)
        free(arrays[a].base);
}

static void bench_all(void)
{
    const zs_kernels *k;
    for (size_t i = 0; (k = check_level(i)); i++) {
        bench(k, ZS_FP32, ZS_FP32, 0);
        for (int d = 0; d < ZS_DTYPES; d++)
            bench(k, (zs_dtype)d, (zs_dtype)d, 1);
    }
}

int main(int argc, char **argv)
{
    reference_is_adam();
    check_each_level(compare_all);
    if (argc > 1 && strcmp(argv[1], "--bench") == 0)
        bench_all();
    return check_finish();
}
