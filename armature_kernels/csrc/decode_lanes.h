/* Vector operations of decode attention for any vector width: loads, sums across lanes, softmax. */
#ifndef ARMATURE_DECODE_LANES_H
#define ARMATURE_DECODE_LANES_H

#include "attention.h"
#include "simd.h"

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

#define DECODE_BLOCK 32 /* tokens whose scores are computed at a time */

/* A head is processed in steps of STEP elements, as two vectors: for bf16 the even and the odd elements (widened by a
 * shift and a mask), for int8 the first and the second half. Queries have the same layout, and sums of values are
 * reordered at the end. fp32 is read as it is. With VDPBF16PS or BFDOT, keys stay pairs of bf16 in one vector. */
enum { FROM_BF16, FROM_INT8, FROM_PAIRS, FROM_FP32 };

#define STEP (2 * LANES)

INLINE int64_t bytes_of(int kind) { return kind == FROM_INT8 ? 1 : kind == FROM_FP32 ? 4 : 2; }
INLINE int vectors_of(int kind) { return kind == FROM_PAIRS ? 1 : 2; }

/* ---- sums across lanes, four or LANES at once ---- */

#if LANES == 16
#define EVEN 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30
#define ODD 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31
#elif LANES == 8
#define EVEN 0, 2, 8, 10, 4, 6, 12, 14
#define ODD 1, 3, 9, 11, 5, 7, 13, 15
#else
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#endif

INLINE vf add_neighbours(vf a, vf b) { return SHUFFLE(a, b, EVEN) + SHUFFLE(a, b, ODD); }

/* Each group of four lanes has the sums of those lanes of the four vectors. */
INLINE vf sum_fours(const vf *x) { return add_neighbours(add_neighbours(x[0], x[1]), add_neighbours(x[2], x[3])); }

/* From LANES / 4 of those, the sums of all LANES vectors in order. */
INLINE vf sum_lanes(const vf *x) {
#if LANES == 16
#define EVEN_FOURS 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define ODD_FOURS 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
    vf low = SHUFFLE(x[0], x[1], EVEN_FOURS) + SHUFFLE(x[0], x[1], ODD_FOURS), high = SHUFFLE(x[2], x[3], EVEN_FOURS) + SHUFFLE(x[2], x[3], ODD_FOURS);
    return SHUFFLE(low, high, EVEN_FOURS) + SHUFFLE(low, high, ODD_FOURS);
#elif LANES == 8
    return SHUFFLE(x[0], x[1], 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(x[0], x[1], 4, 5, 6, 7, 12, 13, 14, 15);
#else
    return x[0];
#endif
}

/* ---- softmax ---- */

/* e^x for x below SLACK, as vf_exp: 0 below -87; NaN stays NaN. */
INLINE vf exp_below(vf x) {
    const vf magic = vf_all(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    const vf shifted = unfused(x * 1.44269504088896341f) + magic, n = shifted - magic;
    const vf result = exp_rest(x, n) * (vf)(((vi)shifted - (vi)magic + 127) << 23);
    return (vf)((vi)result & ~(vi)(x < -87.0f));
}

/* ---- loads ---- */

/* Load STEP elements as two vectors, or as one vector of pairs. */
INLINE void widen(int kind, const uint8_t *p, vf *x) {
    if (kind == FROM_INT8) {
        bytes_load(p, x);
        return;
    }
    if (kind == FROM_FP32) {
        x[0] = vf_load((const float *)p), x[1] = vf_load((const float *)p + LANES); /* memcpy of both goes through memory */
        return;
    }
    vu both;
    memcpy(&both, p, sizeof both);
    if (kind == FROM_PAIRS) {
        x[0] = (vf)both;
        return;
    }
    x[0] = (vf)(both << 16), x[1] = (vf)(both & 0xffff0000u);
}

/* Load the last `left` elements of a head, a multiple of eight, followed by zeros. */
INLINE void widen_tail(int kind, const uint8_t *p, int64_t left, vf *x) {
    uint8_t part[4 * STEP] = {0};
    for (int64_t i = 0; i < left * bytes_of(kind); i += 8) memcpy(part + i, p + i, 8);
    widen(kind, part, x);
}

/* ---- rows of keys and values ---- */

/* One head's keys or values of a block: token t is at base + at[t]. */
typedef struct {
    const uint8_t *base;
    const int64_t *at;
    int64_t head_dim, bytes; /* elements of a head; bytes of a head in a row */
} block_rows;

/* All heads of a task, whose keys and values are adjacent: those of the first head, and `at` of a block and the next. */
typedef struct {
    const uint8_t *keys, *values;
    const int64_t *at;
    int64_t heads, bytes; /* bytes of a head in a row */
} task_rows;

#endif
