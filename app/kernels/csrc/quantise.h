/* bf16 rows to quantised rows, for a product whose input no other kernel has finished. */
#ifndef ARMATURE_QUANTISE_H
#define ARMATURE_QUANTISE_H

#include "sink.h"

static void quantise(const void *arguments) {
    const quantise_arguments *a = arguments;
    float values[MOST_ROW];
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a->rows; row++) {
        for (int64_t i = 0; i < a->size; i += LANES) vf_store(values + i, bf16_load_part(a->x + row * a->stride + i, a->size - i));
        emit(&a->out, row, a->rows, values, a->size);
    }
}

#endif
