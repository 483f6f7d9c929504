/* Shared by all kernels: the bf16 tile product that linear layers and attention are made of, and conversions.
 *
 * A *panel* holds PANEL_WIDTH outputs of a matrix: for each pair of inputs (k, k + 1) the pairs of all PANEL_WIDTH outputs lie together,
 * so that one 64-byte line feeds one VDPBF16PS (two products a lane, summed in fp32) and a panel streams from first to last byte.
 * A *tile* holds up to MAX_TILE_ROWS rows of activations, interleaved pair by pair in the same order.
 */
#ifndef ARMATURE_H
#define ARMATURE_H

#include <stddef.h>
#include <stdint.h>

#define PANEL_WIDTH 32   /* outputs: two 512-bit accumulators a row */
#define MAX_TILE_ROWS 12 /* 12 rows x 2 accumulators leave 8 of 32 registers for weights and activations */

#if defined(__x86_64__) && defined(__GNUC__)
#define ARMATURE_X86 1
#include <immintrin.h>
#define TARGET_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")))
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

static inline float bf16_to_float(uint16_t value) {
    union { uint32_t bits; float number; } cast = {(uint32_t)value << 16};
    return cast.number;
}

/* How many rows the tile has that starts `row` of `rows`: all tiles of a call are as equal as they can be. */
static inline int tile_rows(int row, int rows) {
    int left = rows - row, tiles = (left + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    return (left + tiles - 1) / tiles;
}

#endif
