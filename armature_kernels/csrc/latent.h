/* The heads of multi-head latent attention as rows that OP_TURN reads: copies, and zeros behind values. */
#ifndef ARMATURE_LATENT_H
#define ARMATURE_LATENT_H

#include "simd.h"

/* A rotated part of a head, whose neighbours become the two halves if they are interleaved. */
INLINE void copy_rotated(const latent_arguments *a, const void *x, void *out) {
    const int64_t half = a->rotated / 2;
    if (!a->interleaved) {
        memcpy(out, x, (size_t)(a->rotated * (a->wide ? 4 : 2)));
        return;
    }
    for (int64_t i = 0; i < half; i++)
        for (int64_t k = 0; k < 2; k++) {
            if (a->wide) ((float *)out)[i + k * half] = ((const float *)x)[2 * i + k];
            else ((uint16_t *)out)[i + k * half] = ((const uint16_t *)x)[2 * i + k];
        }
}

static void latent(const void *arguments) {
    const latent_arguments *a = arguments;
    const int64_t bytes = a->wide ? 4 : 2, size = a->rotated + a->plain;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < a->rows * a->heads; i++) {
        const int64_t row = i / a->heads, head = i % a->heads;
        const char *query = (const char *)a->queries + (row * a->query_stride + head * size) * bytes;
        const char *other = (const char *)a->others + (row * a->other_stride + head * (a->plain + a->value)) * bytes;
        char *out = (char *)a->out + (row * 3 * a->heads + head) * size * bytes;
        copy_rotated(a, query + a->plain * bytes, out);
        memcpy(out + a->rotated * bytes, query, (size_t)(a->plain * bytes));
        out += a->heads * size * bytes;
        copy_rotated(a, (const char *)a->rotated_keys + row * a->key_stride * bytes, out);
        memcpy(out + a->rotated * bytes, other, (size_t)(a->plain * bytes));
        out += a->heads * size * bytes;
        memcpy(out, other + a->plain * bytes, (size_t)(a->value * bytes));
        memset(out + a->value * bytes, 0, (size_t)((size - a->value) * bytes));
    }
}

#endif
