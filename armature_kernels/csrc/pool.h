/* Pooling of texts: sums or means over the rows of each text, in their order, so that a text's vector does not depend on its
 * neighbours or on the number of threads; and rows of unit length. */
#ifndef ARMATURE_POOL_H
#define ARMATURE_POOL_H

#include "layer_norm.h"

#define POOL_SUMS 4 /* vectors of sums that a thread keeps in registers while it walks down the rows */

static void pool_columns(const pool_arguments *a, int64_t text, int64_t column, int64_t columns) {
    const int64_t from = a->starts ? a->starts[text] + (a->skipped ? a->skipped[text] : 0) : text, end = a->starts ? a->starts[text + 1] : text + 1;
    const float factor = a->mean && end > from ? 1.0f / (float)(end - from) : 1.0f;
    vf sums[POOL_SUMS];
    for (int k = 0; k < POOL_SUMS; k++) sums[k] = vf_all(0);
    const float *x = a->x + from * a->stride + column;
    if (columns == POOL_SUMS * LANES)
        for (int64_t row = from; row < end; row++, x += a->stride)
            for (int k = 0; k < POOL_SUMS; k++) sums[k] += vf_load(x + k * LANES);
    else
        for (int64_t row = from; row < end; row++, x += a->stride)
            for (int k = 0; k * LANES < columns; k++) sums[k] += vf_load_part(x + k * LANES, columns - k * LANES);
    for (int k = 0; k * LANES < columns; k++) vf_store_part(a->out + text * a->size + column + k * LANES, sums[k] * factor, columns - k * LANES);
}

/* Divide a row by its length; a row without length stays 0. */
static void unit_row(float *row, int64_t size) {
    const float length = float_sqrt(sum_of(row, size, 0, 1)), divisor = length > 1e-12f ? length : length == length ? 1e-12f : length;
    for (int64_t i = 0; i < size; i += LANES) vf_store_part(row + i, vf_load_part(row + i, size - i) / vf_all(divisor), size - i);
}

static void pool(const void *arguments) {
    const pool_arguments *a = arguments;
    const int64_t each = POOL_SUMS * LANES, parts = (a->size + each - 1) / each;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < a->texts * parts; i++) {
        const int64_t column = i % parts * each;
        pool_columns(a, i / parts, column, a->size - column < each ? a->size - column : each);
    }
    if (!a->unit) return;
#pragma omp for schedule(static)
    for (int64_t text = 0; text < a->texts; text++) unit_row(a->out + text * a->size, a->size);
}

#endif
