/* The router of a mixture of experts, and the experts, in every form of their weights. */
#include "weights.h"

int64_t armature_experts_scratch(const experts_arguments *arguments);

void armature_pack_bf16(const uint16_t *weights, uint16_t *panels, int64_t outputs, int64_t inputs, int64_t first_output);
void armature_pack_fp32(const float *weights, float *panels, int64_t outputs, int64_t inputs, int64_t first_output);

/* ---- routes ---- */

static void one_route(int64_t i) {
    const int64_t groups = i % 3 == 2 ? between(2, 4) : 1, experts = groups * between(2, 9), rows = between(1, 9);
    const int64_t best_groups = between(1, groups), k = between(1, experts / groups * best_groups), stride = experts + below(3);
    float *logits = room(rows * stride * 4), *bias = i & 1 ? room(experts * 4) : NULL, *found = room(rows * k * 4);
    int64_t *ids = room(rows * k * 8);
    for (int64_t n = 0; n < rows * stride; n++) logits[n] = number() * 4;
    for (int64_t n = 0; bias && n < experts; n++) bias[n] = number();
    const route_arguments a = {
        .logits = logits, .bias = bias, .ids = ids, .weights = found, .stride = stride, .rows = rows, .experts = experts, .k = k,
        .scoring = i & 2 ? SCORE_SIGMOID : SCORE_SOFTMAX, .renormalise = i >> 2 & 1, .groups = groups, .best_groups = best_groups,
        .rating = groups == 1 ? GROUPS_ALL : i & 8 ? GROUPS_BY_TWO : GROUPS_BY_BEST, .scale = 1.5, .epsilon = 1e-20,
    };
    run(OP_ROUTE, &a);
    for (int64_t row = 0; row < rows; row++) {
        double scores[64], rated[64], total = 0, sum = 0, ratings[4];
        int open[64], kept[4] = {0};
        for (int64_t e = 0; e < experts; e++) total += exp(logits[row * stride + e]);
        for (int64_t e = 0; e < experts; e++) {
            const double x = exp(logits[row * stride + e]);
            scores[e] = a.scoring == SCORE_SIGMOID ? x / (1 + x) : x / total;
            rated[e] = scores[e] + (bias ? bias[e] : 0);
        }
        const int64_t size = experts / groups;
        for (int64_t g = 0; g < groups; g++) {
            double best = -1e30, second = -1e30;
            for (int64_t e = g * size; e < (g + 1) * size; e++) second = fmax(second, fmin(best, rated[e])), best = fmax(best, rated[e]);
            ratings[g] = a.rating == GROUPS_BY_TWO ? best + second : best;
        }
        for (int64_t n = 0; n < best_groups; n++) {
            int64_t best = -1;
            for (int64_t g = 0; g < groups; g++)
                if (!kept[g] && (best < 0 || ratings[g] > ratings[best])) best = g;
            kept[best] = 1;
        }
        for (int64_t e = 0; e < experts; e++) open[e] = kept[e / size];
        for (int64_t j = 0; j < k; j++) {
            int64_t best = -1;
            for (int64_t e = 0; e < experts; e++)
                if (open[e] && (best < 0 || rated[e] > rated[best])) best = e;
            const int64_t id = ids[row * k + j];
            if (id < 0 || id >= experts || !open[id] || !close_to(rated[id], rated[best], 1e-6)) {
                failed("row %d: expert %d is not the best but %d", (int)row, (int)id, (int)j);
                break;
            }
            open[id] = 0, sum += scores[id];
        }
        for (int64_t j = 0; j < k; j++) {
            const double expected = scores[ids[row * k + j]] / (a.renormalise ? sum : 1) * a.scale;
            if (!close_to(found[row * k + j], expected, 1e-5)) failed("row %d: weight %g for %g", (int)row, found[row * k + j], expected);
        }
    }
    free(logits), free(bias), free(found), free(ids);
}

/* A route by SCORE_SPARSEMIXER: the weight of an expert is its softmax over the near ones that are not yet taken. */
static void one_mixed_route(void) {
    const int64_t experts = between(2, 40), rows = between(1, 9), k = 2, stride = experts + below(3);
    float *logits = room(rows * stride * 4), *found = room(rows * k * 4);
    int64_t *ids = room(rows * k * 8);
    for (int64_t n = 0; n < rows * stride; n++) logits[n] = number() * 4 - 1;
    const route_arguments a = {
        .logits = logits, .ids = ids, .weights = found, .stride = stride, .rows = rows, .experts = experts, .k = k,
        .scoring = SCORE_SPARSEMIXER, .groups = 1, .best_groups = 1, .scale = 1.5, .jitter = 0.3,
    };
    run(OP_ROUTE, &a);
    for (int64_t row = 0; row < rows; row++) {
        const float *x = logits + row * stride;
        int taken[64] = {0};
        for (int64_t j = 0; j < k; j++) {
            int64_t best = -1;
            for (int64_t e = 0; e < experts; e++)
                if (!taken[e] && (best < 0 || x[e] > x[best])) best = e;
            double sum = 0;
            for (int64_t e = 0; e < experts; e++)
                if (!taken[e] && !((x[best] - x[e]) / fmaxf(fabsf(x[e]), x[best]) > 2 * 0.3f)) sum += exp((double)x[e] - x[best]);
            if (ids[row * k + j] != best) failed("row %d: expert %d for %d", (int)row, (int)ids[row * k + j], (int)best);
            if (!close_to(found[row * k + j], 1.5 / sum, 1e-5)) failed("row %d: weight %g for %g", (int)row, found[row * k + j], 1.5 / sum);
            taken[best] = 1;
        }
    }
    free(logits), free(found), free(ids);
}

int64_t routes(void) {
    for (int64_t i = 0; i < 60; i++) one_route(i);
    for (int64_t i = 0; i < 30; i++) one_mixed_route();
    return 90;
}

/* ---- experts ---- */

typedef struct {
    const char *says;
    int64_t form, header, narrow, needs; /* an operation that the level must have */
    double tolerance;                    /* of the largest size of a row's results (check_row) */
} expert_form;

static const expert_form EXPERT_FORMS[] = {
    {"int4", FORM_INT4, SCALES, 0, OP_LINEAR_INT, 0.25},
    {"int4 with minimums", FORM_INT4, SCALES_AND_MINIMUMS, 0, OP_LINEAR_INT, 0.25},
    {"int4 double quantized", FORM_INT4, DOUBLE_QUANTIZED, 0, OP_LINEAR_INT, 0.25},
    {"int8", FORM_INT8, SCALES, 0, OP_LINEAR_INT, 0.25},
    {"bf16", FORM_BF16_PANELS, 0, 0, OP_LINEAR_BF16, 0.05},
    {"bf16 in fp32", FORM_FP32_PANELS, 0, 1, OP_LINEAR_FP32, 2e-5},
    {"fp32", FORM_FP32_PANELS, 0, 0, OP_LINEAR_FP32, 2e-5},
};

/* One product of an expert: weights [outputs, inputs] as the library reads them, and its panels. */
typedef struct {
    float *plain, *bias;
    uint8_t *panels;
} plain_product;

static uint8_t *float_panels(const float *plain, int64_t outputs, int64_t inputs, int64_t wide) {
    const int64_t padded = wide ? inputs : (inputs + 1) / 2 * 2, bytes = (outputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS * padded * PANEL_OUTPUTS * (wide ? 4 : 2);
    uint8_t *panels = memset(room(bytes), 0, (size_t)bytes);
    if (wide) {
        armature_pack_fp32(plain, (float *)panels, outputs, inputs, 0);
        return panels;
    }
    uint16_t *narrow = room(outputs * inputs * 2);
    for (int64_t i = 0; i < outputs * inputs; i++) set_element(narrow, 0, i, plain[i]);
    armature_pack_bf16(narrow, (uint16_t *)panels, outputs, inputs, 0);
    free(narrow);
    return panels;
}

static plain_product new_product(const expert_form *f, int64_t outputs, int64_t inputs, int64_t group, int with_bias) {
    plain_product p = {room(outputs * inputs * 4), with_bias ? room(outputs * 4) : NULL, NULL};
    for (int64_t o = 0; with_bias && o < outputs; o++) p.bias[o] = number();
    if (f->needs != OP_LINEAR_INT) {
        for (int64_t i = 0; i < outputs * inputs; i++) p.plain[i] = float_of_bf16(bf16_of_float(number() / 4));
        p.panels = float_panels(p.plain, outputs, inputs, f->form == FORM_FP32_PANELS && !f->narrow);
        return p;
    }
    weights w = new_weights(outputs, inputs, group, f->form == FORM_INT8 ? 8 : 4, f->header, ANY);
    for (int64_t o = 0; o < outputs; o++)
        for (int64_t k = 0; k < inputs; k++)
            p.plain[o * inputs + k] = (float)code_of(&w, o, k) * scale_of(&w, o, k / group) + minimum_of(&w, o, k / group);
    p.panels = w.panels, w.panels = NULL;
    free_weights(&w);
    return p;
}

static void free_product(plain_product *p) { free(p->plain), free(p->bias), free(p->panels); }

/* y [outputs] = W x, with bias. `sizes`: the root of the sum of squares of what is added up, given that of each input: what
 * rounding inputs to a few bits changes is a part of it, even where terms cancel out. */
static void multiply_plain(const plain_product *p, int64_t outputs, int64_t inputs, const double *x, const double *x_sizes, double *y, double *sizes) {
    for (int64_t o = 0; o < outputs; o++) {
        double squares = p->bias ? (double)p->bias[o] * p->bias[o] : 0;
        y[o] = p->bias ? p->bias[o] : 0;
        for (int64_t k = 0; k < inputs; k++) {
            const double weight = p->plain[o * inputs + k];
            y[o] += weight * x[k], squares += weight * x_sizes[k] * weight * x_sizes[k];
        }
        sizes[o] = sqrt(squares);
    }
}

enum { MOST_INNER = 100, MOST_HIDDEN = 200, SOME_EXPERTS = 5 };

static void check_row(const experts_arguments *a, const expert_form *f, plain_product (*p)[2], int64_t row, const float *before) {
    const int64_t inner = a->down.inputs, size = a->down.outputs;
    double x[MOST_HIDDEN], x_sizes[MOST_HIDDEN], both[2 * MOST_INNER], both_sizes[2 * MOST_INNER], one[MOST_HIDDEN], one_sizes[MOST_HIDDEN];
    double expected[MOST_HIDDEN], sizes[MOST_HIDDEN], largest = 0;
    for (int64_t k = 0; k < size; k++) {
        x[k] = get_element(a->x, a->wide, row * a->x_stride + k), x_sizes[k] = fabs(x[k]);
        expected[k] = before[row * a->hidden_stride + k], sizes[k] = fabs(expected[k]);
    }
    for (int64_t j = 0; j < a->k; j++) {
        plain_product *e = p[a->ids[row * a->k + j]];
        multiply_plain(e, 2 * inner, size, x, x_sizes, both, both_sizes);
        for (int64_t k = 0; k < inner; k++) both[k] = both[k] / (1 + exp(-both[k])) * both[inner + k], both_sizes[k] *= both_sizes[inner + k]; /* SiLU */
        multiply_plain(e + 1, size, inner, both, both_sizes, one, one_sizes);
        for (int64_t k = 0; k < size; k++) {
            const double weight = a->weights[row * a->k + j];
            expected[k] += weight * one[k], sizes[k] += fabs(weight) * one_sizes[k];
        }
    }
    for (int64_t k = 0; k < size; k++) largest = fmax(largest, sizes[k]);
    for (int64_t k = 0; k < size; k++) {
        const float found = a->hidden[row * a->hidden_stride + k];
        if (close_to(found, expected[k], f->tolerance * largest)) continue;
        failed("%s, row %d of %d, output %d of %d, %d inside: %g for %g", f->says, (int)row, (int)a->rows, (int)k, (int)size, (int)inner, found, expected[k]);
        return;
    }
}

static void one_mixture(const expert_form *f, int64_t i) {
    const int64_t hidden = i % 3 ? between(1, MOST_HIDDEN) : 64, inner = i % 2 ? between(1, MOST_INNER) : 32 * between(1, 3), count = between(1, SOME_EXPERTS);
    const int64_t k = between(1, count), rows = i % 4 == 3 ? between(60, 90) : between(1, 12), group = 32 * between(1, 2), wide = f->needs == OP_LINEAR_FP32 ? !f->narrow : below(2);
    const int64_t x_stride = hidden + below(3), hidden_stride = hidden + below(3);
    plain_product p[SOME_EXPERTS][2];
    const uint8_t *panels[2][SOME_EXPERTS];
    const float *biases[2][SOME_EXPERTS];
    const int with_bias = i % 5 == 1;
    for (int64_t e = 0; e < count; e++) {
        p[e][0] = new_product(f, 2 * inner, hidden, group, with_bias), p[e][1] = new_product(f, hidden, inner, group, with_bias);
        for (int which = 0; which < 2; which++) panels[which][e] = p[e][which].panels, biases[which][e] = p[e][which].bias;
    }
    expert_weights w[2];
    for (int which = 0; which < 2; which++)
        w[which] = (expert_weights){
            .panels = panels[which], .biases = with_bias ? biases[which] : NULL, .outputs = which ? hidden : 2 * inner, .inputs = which ? inner : hidden, .form = f->form,
            .group = f->needs == OP_LINEAR_INT ? group : 0, .header = f->header, .wide_from = f->needs == OP_LINEAR_INT ? armature_tiles(3) : 0, .narrow_panels = f->narrow, .shared = any_shared(group),
        };
    void *x = room(((rows - 1) * x_stride + hidden) * (wide ? 4 : 2));
    float *found = room(((rows - 1) * hidden_stride + hidden) * 4), *before = room(((rows - 1) * hidden_stride + hidden) * 4), *factors = room(rows * k * 4);
    int64_t *ids = room(rows * k * 8);
    for (int64_t n = 0; n < (rows - 1) * x_stride + hidden; n++) set_element(x, wide, n, number());
    for (int64_t n = 0; n < (rows - 1) * hidden_stride + hidden; n++) found[n] = before[n] = number();
    for (int64_t row = 0; row < rows; row++) {
        const int64_t first = below(count); /* neighbours, so that no expert occurs twice */
        for (int64_t j = 0; j < k; j++) ids[row * k + j] = (first + j) % count, factors[row * k + j] = number();
    }
    experts_arguments a = {x, found, ids, factors, NULL, w[0], w[1], x_stride, hidden_stride, rows, count, k, wide, SILU};
    a.scratch = room(armature_experts_scratch(&a));
    run(OP_EXPERTS, &a);
    for (int64_t row = 0; row < rows; row++) check_row(&a, f, p, row, before);
    for (int64_t e = 0; e < count; e++) free_product(&p[e][0]), free_product(&p[e][1]);
    free(x), free(found), free(before), free(factors), free(ids), free(a.scratch);
}

int64_t mixtures(void) {
    int64_t done = 0;
    for (size_t f = 0; f < sizeof EXPERT_FORMS / sizeof *EXPERT_FORMS; f++) {
        if (!armature_has(EXPERT_FORMS[f].needs)) continue;
        for (int64_t i = 0; i < 10; i++, done++) one_mixture(EXPERT_FORMS + f, i);
    }
    return done;
}
