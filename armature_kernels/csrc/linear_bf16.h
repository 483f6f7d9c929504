/* y = x W^T (+ bias) in bf16 with fp32 sums, from panels: the same packed weights are used for one row and for five
 * hundred. */
#ifndef ARMATURE_LINEAR_BF16_H
#define ARMATURE_LINEAR_BF16_H

#include "store_bf16.h"
#include "tile_bf16.h"

#define MANY_BF16 (FEW_TILES * BF16_ROWS) /* rows beyond which tiles are multiplied with several panels; not measured yet */
#define FIT_BF16 (1 << 19) /* bytes of panels per tile: half of a 1 MB L2; alternatives are not measured yet */
#define AHEAD_BF16 2048 /* prefetch distance in bytes: measured against 1024 and 4096 at 1 to 32 rows */

/* First row of a tile: tiles are as equal as possible, the larger ones first. */
INLINE int64_t first_row(const linear_bf16_arguments *a, int64_t tile) {
    const int64_t tiles = (a->rows + BF16_ROWS - 1) / BF16_ROWS, larger = a->rows % tiles;
    return tile * (a->rows / tiles) + (tile < larger ? tile : larger);
}

INLINE int64_t pairs_of(const linear_bf16_arguments *a) { return (a->inputs + 1) / 2; }
INLINE int is_lone(const linear_bf16_arguments *a) { return a->rows == 1 && a->inputs % 2 == 0; } /* a single row is its own tile */
INLINE int64_t copies_bf16(const linear_bf16_arguments *a) { return is_lone(a) ? 0 : (a->rows + BF16_ROWS - 1) / BF16_ROWS; }

/* Interleave the rows of a tile pair by pair, so that it is read from the first to the last byte. */
static void copy_bf16(const linear_bf16_arguments *a, int64_t tile) {
    const int64_t pairs = pairs_of(a), whole = a->inputs / 8 * 4, row = first_row(a, tile), count = first_row(a, tile + 1) - row;
    const uint16_t *source = a->x + row * a->x_stride;
    uint32_t *target = a->tiles + row * pairs;
    for (int64_t r = 0; r < count; r++) {
        int64_t p = 0;
        if (r % 4 == 0 && r + 4 <= count)
            for (int64_t q = 0; q < whole; q += 4) turn_four(source + r * a->x_stride + 2 * q, a->x_stride * 2, 4, target + q * count + r, count);
        if (r / 4 * 4 + 4 <= count) p = whole; /* done with its group of four */
        for (; p < a->inputs / 2; p++) memcpy(target + p * count + r, source + r * a->x_stride + 2 * p, 4);
        if (a->inputs & 1) target[(pairs - 1) * count + r] = source[r * a->x_stride + a->inputs - 1];
    }
}

/* Few rows: a panel with all tiles. */
static void few_rows(const linear_bf16_arguments *a, int64_t panel) {
    const uint32_t *tiles = is_lone(a) ? (const uint32_t *)a->x : a->tiles;
    const int64_t pairs = pairs_of(a), bytes = pairs * PANEL_OUTPUTS * 4;
    const uint8_t *weights = a->panels + panel * bytes;
    float sums[BF16_ROWS * PANEL_OUTPUTS] __attribute__((aligned(64)));
    for (int64_t row = 0, pass = 0, count; row < a->rows; row += count, pass++) {
        count = tile_rows(row, a->rows);
        /* A single pass prefetches its own panel. With several passes each of the first two prefetches half of
         * the next panel, so that memory is busy while they compute; the others find it in the cache. */
        const uint8_t *ahead = count == a->rows ? weights + AHEAD_BF16 : pass < 2 ? weights + bytes + pass * bytes / 2 : NULL;
        const ptrdiff_t stride = count == a->rows ? 128 : 64;
        if (a->fixed && count == 1) tile_product_1(tiles + row * pairs, weights, pairs, ahead, stride, sums);
        else tile_product((int)count, tiles + row * pairs, weights, pairs, ahead, stride, sums);
        store_all(a, sums, row, (int)count, panel * PANEL_OUTPUTS);
    }
}

/* Many rows: a tile, which stays in L1, is multiplied with several panels, which stay in L2. */
static void many_rows(const linear_bf16_arguments *a, const division *d, int64_t task) {
    const int64_t pairs = pairs_of(a), bytes = pairs * PANEL_OUTPUTS * 4;
    const int64_t panel0 = task / d->tile_tasks * d->panels, tile0 = task % d->tile_tasks * d->tiles;
    const int64_t panel1 = panel0 + d->panels < d->num_panels ? panel0 + d->panels : d->num_panels;
    float sums[BF16_ROWS * PANEL_OUTPUTS] __attribute__((aligned(64)));
    for (int64_t tile = tile0; tile < tile0 + d->tiles && tile < d->num_tiles; tile++) {
        const int64_t row = first_row(a, tile), count = first_row(a, tile + 1) - row;
        for (int64_t panel = panel0; panel < panel1; panel++) {
            tile_product((int)count, a->tiles + row * pairs, a->panels + panel * bytes, pairs, NULL, 0, sums);
            store_all(a, sums, row, (int)count, panel * PANEL_OUTPUTS);
        }
    }
}

/* A task of few rows is one panel. */
INLINE division divide_bf16(const linear_bf16_arguments *a) {
    return divide((a->outputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS, (a->rows + BF16_ROWS - 1) / BF16_ROWS, 1, FIT_BF16 / (pairs_of(a) * PANEL_OUTPUTS * 4));
}

INLINE void begin_bf16(const linear_bf16_arguments *a) { (void)a; }
INLINE void end_bf16(void) {}

static void task_bf16(const linear_bf16_arguments *a, const division *d, int64_t task) {
    if (a->rows > MANY_BF16) many_rows(a, d, task);
    else few_rows(a, task);
}

static void linear_bf16(const void *arguments) {
    const linear_bf16_arguments *a = arguments;
    if (a->rows < 1) return;
    if (copies_bf16(a)) {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < copies_bf16(a); i++) copy_bf16(a, i);
    }
    const division d = divide_bf16(a);
    const int chunk = a->rows > MANY_BF16 ? 1 : panels_together(d.num_panels, pairs_of(a));
#pragma omp for schedule(dynamic, chunk)
    for (int64_t task = 0; task < d.panel_tasks * d.tile_tasks; task++) task_bf16(a, &d, task);
}

#endif
