/* Tests of the top outputs of a product, against the whole product sorted. */
#include "weights.h"

typedef struct {
    activations a;
    weights w;
    float *bias, *logits; /* the whole product by the library, with bias */
    int64_t k;
    double softcap;
} picked;

static linear_int_arguments product_of(const picked *p) {
    return (linear_int_arguments){
        p->w.panels, p->bias, p->a.tiles, p->a.scales, p->a.sums, p->logits, p->w.outputs, p->a.rows, p->a.padded, p->w.outputs, p->a.group, p->a.height, p->w.bits, p->w.header, OUTPUT_FP32, .shared = p->a.shared,
    };
}

static picked new_picked(int64_t i) {
    const int64_t outputs = i % 4 ? between(1, 300) : between(2048, 4500), inputs = i % 2 ? 64 : 576, bits = i % 3 ? 4 : 8;
    picked p = {.a = new_activations(between(1, 20), inputs, 64, ANY), .w = new_weights(outputs, inputs, 64, bits, i % 3 == 1, ANY), .softcap = i % 5 ? 0 : 3.5};
    p.k = i % 3 ? between(1, outputs < 64 ? outputs : 64) : 1;
    p.bias = i % 2 ? room(outputs * 4) : NULL;
    for (int64_t o = 0; p.bias && o < outputs; o++) p.bias[o] = number();
    if (i % 6 == 2) memset(p.a.x, 0, (size_t)inputs * 2); /* its outputs are all equal, except for the bias */
    if (i % 4 == 1) p.a.x[below(p.a.rows) * p.a.stride + below(inputs)] = bf16_of_float(NAN);
    quantize_activations(&p.a);
    p.logits = room(p.a.rows * outputs * 4);
    const linear_int_arguments product = product_of(&p);
    run(OP_LINEAR_INT, &product);
    return p;
}

static double capped(const picked *p, float logit) { return p->softcap > 0 ? p->softcap * tanh(logit / p->softcap) : logit; }

static double logsumexp_of(const picked *p, int64_t row) {
    double largest = -INFINITY, sum = 0;
    for (int64_t o = 0; o < p->w.outputs; o++) largest = fmax(largest, capped(p, p->logits[row * p->w.outputs + o]));
    for (int64_t o = 0; o < p->w.outputs; o++) sum += exp(capped(p, p->logits[row * p->w.outputs + o]) - largest);
    return largest + log(sum);
}

/* Each value belongs to its id, and no omitted value is larger; without a cap, bit for bit and ordered by id. */
static void check_row(const picked *p, int64_t row, const float *values, const int64_t *ids) {
    float *left = memcpy(room(p->w.outputs * 4), p->logits + row * p->w.outputs, (size_t)p->w.outputs * 4);
    int64_t best = 0;
    for (int64_t o = 0; o < p->w.outputs; o++)
        if (left[o] != left[o]) {
            if (values[0] == values[0]) failed("row %d has NaN and %g as its best", (int)row, values[0]);
            free(left);
            return;
        }
    for (int64_t i = 0; i < p->k; i++) {
        for (int64_t o = best = 0; o < p->w.outputs; o++) best = left[o] > left[best] ? o : best;
        const int64_t id = p->softcap > 0 && ids[i] >= 0 && ids[i] < p->w.outputs ? ids[i] : best;
        if (ids[i] != id || !close_to(values[i], capped(p, left[id]), p->softcap > 0 ? 1e-5 : 0) || capped(p, left[best]) - capped(p, left[id]) > 1e-5)
            failed("row %d of %d, place %d of %d: output %d with %.9g for %d with %.9g", (int)row, (int)p->a.rows, (int)i, (int)p->k, (int)ids[i], values[i], (int)best, capped(p, left[best]));
        left[id] = -INFINITY;
    }
    free(left);
}

/* Masks of every row, at least `k` outputs each: whole words are forbidden now and then. */
static uint32_t *new_masks(const picked *p, pick_arguments *arguments) {
    const int64_t words = (p->w.outputs + 31) / 32;
    uint32_t *allowed = room(p->a.rows * words * 4);
    for (int64_t at = 0; at < p->a.rows * words; at++) allowed[at] = below(3) ? 0 : (uint32_t)below(1 << 30) * 7;
    for (int64_t row = 0; row < p->a.rows; row++)
        for (int64_t o = 0; o < p->k; o++) allowed[row * words + o / 32] |= UINT32_C(1) << o % 32;
    arguments->allowed = allowed, arguments->allowed_stride = words;
    return allowed;
}

static void forbid(picked *p, int64_t row, const uint32_t *allowed) {
    const int64_t words = (p->w.outputs + 31) / 32;
    for (int64_t o = 0; o < p->w.outputs; o++)
        if (!(allowed[row * words + o / 32] >> o % 32 & 1)) p->logits[row * p->w.outputs + o] = -INFINITY;
}

int64_t picks(void) {
    for (int64_t i = 0; i < 24; i++) {
        picked p = new_picked(i);
        float *values = room(p.a.rows * p.k * 4), *sums = i % 2 ? NULL : room(p.a.rows * 4);
        int64_t *ids = room(p.a.rows * p.k * 8);
        void *scratch = room(PICK_TASKS * p.a.rows * (8 * p.k + 16));
        pick_arguments arguments = {product_of(&p), values, ids, sums, scratch, NULL, p.k, 0, p.softcap};
        arguments.product.y = NULL;
        uint32_t *allowed = i % 4 == 3 ? new_masks(&p, &arguments) : NULL;
        run(OP_PICK, &arguments);
        for (int64_t row = 0; row < p.a.rows; row++) {
            if (allowed) forbid(&p, row, allowed);
            check_row(&p, row, values + row * p.k, ids + row * p.k);
            if (!allowed && sums && !close_to(sums[row], logsumexp_of(&p, row), 1e-4)) failed("row %d: logsumexp is %g for %g", (int)row, sums[row], logsumexp_of(&p, row));
        }
        free(values), free(sums), free(ids), free(scratch), free(allowed), free(p.bias), free(p.logits), free_activations(&p.a), free_weights(&p.w);
    }
    return 24;
}
