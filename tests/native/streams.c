/* Tests of several hidden states for each token: streams before and after a layer, and rows with the magnitude of others. */
#include "activations.h"

static const int64_t SIZES[] = {576, 33, 1, 1500, 64, 2048};

/* The sum over j of weights[n, j] * tanh(logits[j]). */
static double factor(const altup_arguments *a, int64_t row, int64_t n) {
    double sum = 0;
    for (int64_t j = 0; j < a->streams; j++) sum += a->weights[n * a->streams + j] * tanh(a->logits[row * a->streams + j]);
    return sum;
}

/* Element i of stream k of a row, from the streams before. */
static double altered(const altup_arguments *a, const float *before, int64_t row, int64_t k, int64_t i) {
    const float *x = before + row * a->stride + i;
    if (a->activated) return x[k * a->size] + (1 + factor(a, row, k)) * (a->scale * a->activated[row * a->size + i] - x[0]);
    double sum = x[k * a->size];
    for (int64_t j = 0; j < a->streams; j++) sum += factor(a, row, k * a->streams + j) * x[j * a->size];
    return sum;
}

static float *floats(int64_t count) {
    float *x = room(count * 4);
    for (int64_t i = 0; i < count; i++) x[i] = 3 * number();
    return x;
}

int64_t altered_streams(void) {
    for (int64_t i = 0; i < 24; i++) {
        activations rows = {.rows = between(1, 9), .size = SIZES[i % 6], .group = 64, .shared = 1};
        const int64_t streams = between(2, MOST_STREAMS), corrects = i / 6 % 2, width = streams * rows.size, stride = width + below(3);
        const int64_t count = (rows.rows - 1) * stride + width, factors = corrects ? streams : streams * streams;
        const sink out = new_sink(&rows, i % 4);
        float *x = floats(count), *logits = floats(rows.rows * streams), *weights = floats(factors * streams), *scales = floats(rows.size);
        float *activated = corrects ? floats(rows.rows * rows.size) : NULL, *before = memcpy(room(count * 4), x, (size_t)count * 4);
        double *expected = room(rows.rows * rows.size * 8);
        const altup_arguments a = {x, logits, weights, activated, scales, stride, rows.rows, rows.size, streams, 0.75, out};
        run(OP_ALTUP, &a);
        for (int64_t at = 0; at < count; at++) {
            const int64_t row = at / stride, k = at % stride / rows.size;
            const double wanted = at % stride < width ? altered(&a, before, row, k, at % stride % rows.size) : before[at];
            if (!close_to(x[at], wanted, 3e-4 + 1e-5 * fabs(wanted))) failed("row %d, stream %d: %g for %g", (int)row, (int)k, x[at], wanted);
            if (k == 0 && at % stride < rows.size) expected[row * rows.size + at % stride] = (double)x[at] * scales[at % stride];
        }
        if (corrects) check_sink(&rows, expected);
        free(x), free(logits), free(weights), free(scales), free(activated), free(before), free(expected), free_activations(&rows);
    }
    return 24;
}

static double mean_square(const void *x, int64_t wide, int64_t first, int64_t size) {
    double sum = 0;
    for (int64_t k = 0; k < size; k++) sum += (double)get_element(x, wide, first + k) * get_element(x, wide, first + k);
    return sum / (double)size;
}

/* Every third time a row is zero, and so keeps the least magnitude. */
int64_t matched_rows(void) {
    for (int64_t i = 0; i < 18; i++) {
        const int64_t rows = between(1, 9), size = SIZES[i % 6], wide = i % 2, add = i / 2 % 2;
        const int64_t strides[3] = {size + below(3), size + below(3), size + below(3)};
        float *like = floats((rows - 1) * strides[1] + size), *out = floats((rows - 1) * strides[2] + size);
        float *before = memcpy(room(((rows - 1) * strides[2] + size) * 4), out, (size_t)((rows - 1) * strides[2] + size) * 4);
        void *x = room(((rows - 1) * strides[0] + size) * (wide ? 4 : 2));
        for (int64_t at = 0; at < (rows - 1) * strides[0] + size; at++) set_element(x, wide, at, i % 3 == 2 ? 0 : i % 3 ? 1e-4f * number() : number());
        const match_arguments a = {x, like, out, strides[0], strides[1], strides[2], rows, size, wide, add, 1e-5};
        run(OP_MATCH, &a);
        for (int64_t row = 0; row < rows; row++) {
            const double own = mean_square(x, wide, row * strides[0], size), scale = sqrt(mean_square(like, 1, row * strides[1], size) / (own > 1e-5 ? own : 1e-5));
            for (int64_t k = 0; k < strides[2] && row * strides[2] + k < (rows - 1) * strides[2] + size; k++) {
                const double old = before[row * strides[2] + k], expected = k < size ? (add ? old : 0) + scale * get_element(x, wide, row * strides[0] + k) : old;
                if (!close_to(out[row * strides[2] + k], expected, 1e-5 + 1e-5 * fabs(expected))) failed("row %d, column %d: %g for %g", (int)row, (int)k, out[row * strides[2] + k], expected);
            }
        }
        free(like), free(out), free(before), free(x);
    }
    return 18;
}
