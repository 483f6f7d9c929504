/* Rows of activations in the driver: as bf16, and quantized into tiles by the library. */
#ifndef ARMATURE_ACTIVATIONS_H
#define ARMATURE_ACTIVATIONS_H

#include "proof.h"

typedef struct {
    uint16_t *x; /* [rows, size], row stride `stride` */
    int64_t rows, size, stride, group, groups, padded, height, shared;
    int8_t *tiles;
    float *scales;
    int32_t *sums;
    float *wide; /* x in fp32 */
} activations;

/* One group of a row as a plain loop sees it. */
typedef struct {
    int8_t codes[512];
    float scale;
    int32_t negated;
} plain_group;

/* The values: any; integers to 127 times a power of two, each group with a 127; all of them 127 or -127. */
enum { ANY, POWERS, EXTREME };

/* Groups of a row with the same scale: 1, and of groups of 32 also 2, 4 or 8. */
int64_t any_shared(int64_t group);
activations new_activations(int64_t rows, int64_t size, int64_t group, int kind);
/* Row `row` of `a` alone. */
activations one_row(const activations *a, int64_t row);
void free_activations(activations *a);
/* Quantize with the library into new tiles. */
void quantize_activations(activations *a);
plain_group plainly_quantized(const activations *a, int64_t row, int64_t g);
/* Read the same values from the library's tiles. */
plain_group from_tiles(const activations *a, int64_t row, int64_t g);

/* A sink for `size` inputs with its buffers: bf16 (kind 0), fp32 (1), or tiles. */
sink new_sink(activations *a, int64_t kind);
/* Compare what was written to it with expected [rows, size]. */
void check_sink(const activations *a, const double *expected);

#endif
