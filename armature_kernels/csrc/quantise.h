/* bf16 rows to quantised rows, for a product whose input does not come from another kernel. */
#ifndef ARMATURE_QUANTISE_H
#define ARMATURE_QUANTISE_H

#include "sink.h"

static void quantise(const void *arguments) {
    const quantise_arguments *a = arguments;
    float values[MOST_GROUP] __attribute__((aligned(64)));
#pragma omp for schedule(static)
    for (int64_t index = 0; index < a->rows * parts_of(&a->out, a->size); index++) {
        const part p = nth_part(&a->out, a->size, index);
        const uint16_t *x = a->x + p.row * a->stride + p.from;
        for (int64_t i = 0; i < p.count; i += LANES) vf_store(values + i, bf16_load_part(x + i, p.count - i));
        emit(&a->out, a->rows, a->size, p, values);
    }
}

#endif
