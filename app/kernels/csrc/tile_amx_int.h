/* A tile of 5 to 8 rows times an integer panel in groups of 32 with AMX's TDPBSSD, bit for bit what VPDPBUSD gives.
 *
 * Storing a register takes 16 cycles however many rows it has, so one holds the sums of two groups: the first eight rows
 * of activations have zeros in the place of the second group's inputs, and the others in the place of the first's.
 * Eight rows take 21 ns for 32 inputs and outputs instead of 31 (one Sapphire Rapids core, codes of four bits). */
#ifndef ARMATURE_TILE_AMX_INT_H
#define ARMATURE_TILE_AMX_INT_H

#include <stdlib.h>

#include "tile_amx.h"

#define LEAST_AMX_ROWS 5
#define MOST_AMX_ROWS 8  /* of a tile: half of a register */
#define MOST_SPREAD 64   /* rows of a product; with more, bf16 is faster */
#define PAIR_BYTES 1024  /* activations of two groups */

static __thread struct {
    uint8_t *rows;
    size_t size;
} spread;

INLINE int uses_amx(const linear_int_arguments *a) {
    return a->group == 32 && a->header != SCALES_AND_MINIMUMS && a->height >= LEAST_AMX_ROWS && a->height <= MOST_AMX_ROWS && a->rows <= MOST_SPREAD;
}

/* Bytes of a tile's spread rows. */
INLINE int64_t spread_bytes(const linear_int_arguments *a) { return (a->padded + 63) / 64 * PAIR_BYTES; }

/* Each thread copies all rows into its own buffer, which lasts as long as the thread. */
static void spread_rows(const linear_int_arguments *a) {
    const int64_t tiles = (a->rows + a->height - 1) / a->height, bytes = spread_bytes(a);
    if (!uses_amx(a)) return;
    if (spread.size < (size_t)(tiles * bytes)) {
        free(spread.rows);
        spread.size = (size_t)(tiles * bytes);
        spread.rows = aligned_alloc(64, spread.size);
        if (!spread.rows) abort(); /* a server without memory for some rows cannot answer anything */
    }
    memset(spread.rows, 0, (size_t)(tiles * bytes));
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t row = tile * a->height, left = a->rows - row, count = left < a->height ? left : a->height;
        const int8_t *from = a->tiles + row * a->padded;
        for (int64_t k = 0; k < a->padded; k += 4) {
            uint8_t *to = spread.rows + tile * bytes + k / 64 * PAIR_BYTES + k / 32 % 2 * MOST_AMX_ROWS * 64 + k % 64;
            for (int64_t r = 0; r < count; r++, from += 4) memcpy(to + r * 64, from, 4);
        }
    }
    tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.row_bytes[i] = 64, shapes.rows[i] = AMX_ROWS;
    use_shapes(&shapes);
}

static void release_rows(const linear_int_arguments *a) {
    if (uses_amx(a)) tile_release();
}

/* One group's codes of 16 outputs as signed bytes, a line for each four inputs. GF2P8AFFINEQB takes a half byte and
 * subtracts 8: with three bits left as they are, that inverts the fourth and repeats it. */
INLINE void signed_codes(int bits, const uint8_t *codes, uint8_t *to) {
    const __m512i low = _mm512_set1_epi64(0x0102040808080808), high = _mm512_set1_epi64(0x1020408080808080);
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        if (bits == 8) {
            _mm512_store_si512(to + i * 128, _mm512_loadu_si512(codes + i * 256));
            _mm512_store_si512(to + i * 128 + 64, _mm512_loadu_si512(codes + i * 256 + 128));
            continue;
        }
        const __m512i line = _mm512_loadu_si512(codes + i * 128);
        _mm512_store_si512(to + i * 128, _mm512_gf2p8affine_epi64_epi8(line, low, 0xf8));
        _mm512_store_si512(to + i * 128 + 64, _mm512_gf2p8affine_epi64_epi8(line, high, 0xf8));
    }
}

typedef struct {
    uint8_t codes[2][2][PAIR_BYTES]; /* [this pair or the next][half of the outputs] */
    int32_t sums[2][2][16 * 16];
} amx_room;

INLINE void pair_codes(int bits, const panel_layout *layout, const uint8_t *codes, int groups, amx_room *room, int at, const uint8_t *ahead) {
    for (int g = 0; g < groups; g++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) signed_codes(bits, codes + g * layout->next_codes + half * 64, room->codes[at][half] + g * 512);
    if (ahead)
        for (int64_t i = 0; i < 2 * layout->next_codes; i += 64) _mm_prefetch((const char *)ahead + i, PREFETCH_TO);
}

/* Add the exact sums of `groups` groups (1 or 2), times both scales, to `held`. `scales`: of the first group's rows. */
INLINE void take_pair(int header, const panel_layout *layout, const uint8_t *weight_scales, const float *scales, int count, int groups, const amx_room *room, int at,
                      __m512 (*held)[2]) {
    for (int g = 0; g < groups; g++) {
        const __m512 scale[2] = {group_scales(header, weight_scales + g * layout->next_scales, 0), group_scales(header, weight_scales + g * layout->next_scales, 1)};
        const int32_t *low = room->sums[at][0] + g * MOST_AMX_ROWS * 16, *high = room->sums[at][1] + g * MOST_AMX_ROWS * 16;
#pragma GCC unroll 8
        for (int r = 0; r < MOST_AMX_ROWS; r++) {
            const __m512 own = _mm512_set1_ps(r < count ? scales[g * count + r] : 0);
            held[r][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(low + r * 16)), _mm512_mul_ps(scale[0], own), held[r][0]);
            held[r][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(high + r * 16)), _mm512_mul_ps(scale[1], own), held[r][1]);
        }
    }
}

/* As `multiply_groups` (tile_avx512.h). While the registers multiply one pair of groups, the sums of the last are taken
 * and the codes of the next prepared. */
INLINE void multiply_amx(int bits, int header, const linear_int_arguments *a, const uint8_t *panel, int64_t row, int count, const uint8_t *ahead, float *sums) {
    const int64_t groups = a->padded / 32;
    const panel_layout layout = layout_of(bits, header, 32, groups);
    const uint8_t *x = spread.rows + row / a->height * spread_bytes(a), *weight_scales = panel + layout.scales, *codes = panel + layout.codes;
    const float *scales = a->scales + row * groups;
    amx_room room __attribute__((aligned(64)));
    __m512 held[MOST_AMX_ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < MOST_AMX_ROWS; r++) held[r][0] = held[r][1] = _mm512_setzero_ps();
    pair_codes(bits, &layout, codes, groups < 2 ? (int)groups : 2, &room, 0, ahead);
    for (int64_t g = 0; g < groups; g += 2, x += PAIR_BYTES) {
        const int at = (int)(g / 2 % 2);
        const int64_t next = groups - g - 2;
        tile_load(4, x, 64);
        tile_zero(0);
        tile_load(6, room.codes[at][0], 64);
        tile_multiply_int8(0, 4, 6);
        tile_zero(1);
        tile_load(7, room.codes[at][1], 64);
        tile_multiply_int8(1, 4, 7);
        if (next > 0) pair_codes(bits, &layout, codes + (g + 2) * layout.next_codes, next < 2 ? 1 : 2, &room, 1 - at, ahead ? ahead + (g + 2) * layout.next_codes : NULL);
        if (g > 0) take_pair(header, &layout, weight_scales + (g - 2) * layout.next_scales, scales + (g - 2) * count, count, 2, &room, 1 - at, held);
        tile_store(0, room.sums[at][0], 64);
        tile_store(1, room.sums[at][1], 64);
    }
    const int64_t last = (groups - 1) / 2 * 2;
    take_pair(header, &layout, weight_scales + last * layout.next_scales, scales + last * count, count, (int)(groups - last), &room, (int)(last / 2 % 2), held);
    for (int r = 0; r < count; r++)
        for (int i = 0; i < 2; i++) _mm512_store_ps(sums + r * PANEL_OUTPUTS + i * 16, held[r][i]);
}

static int multiply_tile_amx(const linear_int_arguments *a, const uint8_t *panel, int64_t row, int count, const uint8_t *ahead, float *sums) {
    if (!uses_amx(a)) return 0;
    if (a->bits == 8) multiply_amx(8, SCALES, a, panel, row, count, ahead, sums);
    else if (a->header == DOUBLE_QUANTIZED) multiply_amx(4, DOUBLE_QUANTIZED, a, panel, row, count, ahead, sums);
    else multiply_amx(4, SCALES, a, panel, row, count, ahead, sums);
    return 1;
}

#endif
