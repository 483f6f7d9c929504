/* y = x W^T (+ bias) from quantised rows and packed int4 or int8 panels. The level multiplies a tile with a panel
 * (tile_*.h). This file has the order of tiles and panels, and the epilogue. */
#ifndef ARMATURE_LINEAR_INT_H
#define ARMATURE_LINEAR_INT_H

#include <omp.h>

#include "activate.h"
#include "division.h"
#include "level.h"

/* Compiled in the part INTEGERS alone, for other parts too: they are a quarter of the library. */
#define multiply_tile KERNEL(multiply_tile)
#define multiply_streams KERNEL(multiply_streams)

INLINE ptrdiff_t panel_bytes_int(const linear_int_arguments *a) { return layout_of(a->bits, a->header, a->group, a->padded / a->group).bytes; }

/* Rows [row, row + count) of the panel's outputs: sums [count, 32], overwritten, before the scales of the outputs if the
 * form has them. `ahead`: what to prefetch, or NULL: as many bytes as the panel has, in order, whatever is read
 * meanwhile. */
void multiply_tile(const linear_int_arguments *a, const uint8_t *panel, int64_t row, int count, const uint8_t *ahead, float *sums);

/* Bytes of headers to prefetch with group g, in whole cache lines. */
INLINE int asked_header(int header, int64_t g) {
    if (header == DOUBLE_QUANTIZED) return g == 0 ? 128 : g % 2 ? 0 : 64; /* the first are the scales of outputs */
    return header == SCALES_AND_MINIMUMS ? 128 : 64;
}

/* For `multiply_tile`: a case for each number of rows as a constant, and the other arguments of the level's
 * `multiply` before bits and header. */
#define FIRST_OF(COUNT, ...) COUNT
#define CASE(...)                                                                               \
    case FIRST_OF(__VA_ARGS__, ):                                                               \
        if (a->bits == 8) multiply(__VA_ARGS__, 8, SCALES, a, panel, row, ahead, sums);         \
        else if (a->header == SCALES_AND_MINIMUMS) multiply(__VA_ARGS__, 4, SCALES_AND_MINIMUMS, a, panel, row, ahead, sums); \
        else if (a->header == DOUBLE_QUANTIZED) multiply(__VA_ARGS__, 4, DOUBLE_QUANTIZED, a, panel, row, ahead, sums); \
        else multiply(__VA_ARGS__, 4, SCALES, a, panel, row, ahead, sums);                      \
        break;

/* Multiply the sums of `count` rows by the panel's scales of the outputs, if it has them. */
INLINE void scale_outputs(const linear_int_arguments *a, const uint8_t *panel, int count, float *sums) {
    if (a->header != DOUBLE_QUANTIZED) return;
    for (int i = 0; i < PANEL_OUTPUTS; i += LANES) {
        const vf scale = bf16_load((const uint16_t *)panel + i);
        for (int r = 0; r < count; r++) vf_store(sums + r * PANEL_OUTPUTS + i, vf_load(sums + r * PANEL_OUTPUTS + i) * scale);
    }
}

/* As `multiply_tile`, including the scales of the outputs. */
INLINE void multiply_panel(const linear_int_arguments *a, const uint8_t *panel, int64_t row, int count, const uint8_t *ahead, float *sums) {
    multiply_tile(a, panel, row, count, ahead, sums);
    scale_outputs(a, panel, count, sums);
}

#if STREAMS > 1
/* The same for one or two rows from row 0 on and STREAMS adjacent panels in turns: sums [STREAMS, count, 32]. */
void multiply_streams(const linear_int_arguments *a, const uint8_t *panels, int count, float *sums);
#endif

/* Sums of the largest task that keeps them on its stack. */
#define TASK_SUMS ((TILE_ROWS > STREAMS * STREAM_ROWS ? TILE_ROWS : STREAMS * STREAM_ROWS) * PANEL_OUTPUTS)

/* Whether these panels are multiplied by `multiply_streams`. */
INLINE int are_streams(const linear_int_arguments *a, int64_t panels) { return STREAMS > 1 && panels == STREAMS && a->rows <= STREAM_ROWS; }

INLINE void store_row(int activation, const linear_int_arguments *a, const float *sums, ptrdiff_t row, ptrdiff_t first, ptrdiff_t outputs) {
    for (ptrdiff_t i = 0; i < outputs; i += LANES) {
        vf x = vf_load(sums + i);
        if (a->bias) x += vf_load_part(a->bias + first + i, outputs - i);
        x = activated(activation, x);
        if (a->output == OUTPUT_BF16) {
            bf16_store_part((uint16_t *)a->y + row * a->y_stride + first + i, x, outputs - i);
            continue;
        }
        float *y = (float *)a->y + row * a->y_stride + first + i;
        if (a->output == OUTPUT_ADD_FP32) x += vf_load_part(y, outputs - i);
        vf_store_part(y, x, outputs - i);
    }
}

/* Panels that a thread claims at a time: about a megabyte, so that reading is continuous, but at least eight claims
 * per thread. */
INLINE int claim(const linear_int_arguments *a, const division *d) {
    int64_t chunk = (1 << 20) / (panel_bytes_int(a) * d->panels), most = d->panel_tasks / (8 * omp_get_num_threads());
    chunk = chunk < most ? chunk : most;
    return chunk < 1 || d->tile_tasks > 1 ? 1 : (int)chunk;
}

/* Bytes of panels per tile: half of a 1 MB L2; 3 to 7% faster than a quarter (Cascade Lake). */
#ifndef FIT_INT
#define FIT_INT (1 << 19)
#endif

/* Prefetch distance in bytes of a product of this many rows: measured against 1, 2, 4, 16 and 32 KB on Zen 5. The faster
 * the memory, the more it matters (at 80 GB/s four rows take 126 us instead of 165). */
#ifndef AHEAD
#define AHEAD(rows) 8192
#endif

/* Store the sums of `count` rows from `row` on and of a panel. */
INLINE void store_panel(const linear_int_arguments *a, const float *sums, int64_t row, int count, int64_t panel) {
    const int64_t first = panel * PANEL_OUTPUTS, outputs = a->outputs - first < PANEL_OUTPUTS ? a->outputs - first : PANEL_OUTPUTS;
#define STORE_ROWS(WHICH) \
    for (int r = 0; r < count; r++) store_row(WHICH, a, sums + r * PANEL_OUTPUTS, row + r, first, outputs)
    FOR_ACTIVATION(a->activation, STORE_ROWS)
}

/* A single pass prefetches its own panel. With several passes the first prefetches the next panel, so that memory is
 * busy meanwhile. sums: TASK_SUMS. */
INLINE void run_task(const linear_int_arguments *a, const division *d, int64_t task, float *sums) {
    const ptrdiff_t bytes = panel_bytes_int(a);
    const int64_t panel0 = task / d->tile_tasks * d->panels, tile0 = task % d->tile_tasks * d->tiles;
    const int64_t panel1 = panel0 + d->panels < d->num_panels ? panel0 + d->panels : d->num_panels;
    const int64_t tile1 = tile0 + d->tiles < d->num_tiles ? tile0 + d->tiles : d->num_tiles;
#if STREAMS > 1
    if (are_streams(a, panel1 - panel0)) {
        const int count = (int)a->rows;
        multiply_streams(a, a->panels + panel0 * bytes, count, sums);
        for (int p = 0; p < STREAMS; p++) store_panel(a, sums + p * count * PANEL_OUTPUTS, 0, count, panel0 + p);
        return;
    }
#endif
    for (int64_t tile = tile0; tile < tile1; tile++)
        for (int64_t panel = panel0; panel < panel1; panel++) {
            const uint8_t *weights = a->panels + panel * bytes;
            const int64_t row = tile * a->height, left = a->rows - row;
            const int count = (int)(left < a->height ? left : a->height);
            multiply_panel(a, weights, row, count, d->num_tiles == 1 ? weights + AHEAD(count) : tile == tile0 ? weights + d->panels * bytes : NULL, sums);
            store_panel(a, sums, row, count, panel);
        }
}

INLINE division divide_int(const linear_int_arguments *a) {
    const int64_t num_panels = (a->outputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS, num_tiles = (a->rows + a->height - 1) / a->height;
    return divide(num_panels, num_tiles, a->rows <= STREAM_ROWS ? streams_of(num_panels) : 1, FIT_INT / panel_bytes_int(a));
}

static void linear_int(const void *arguments) {
    const linear_int_arguments *a = arguments;
    if (a->rows < 1) return; /* a step that requests no rows */
    const division d = divide_int(a);
    const int chunk = claim(a, &d);
    float sums[TASK_SUMS] __attribute__((aligned(64)));
#pragma omp for schedule(dynamic, chunk)
    for (int64_t task = 0; task < d.panel_tasks * d.tile_tasks; task++) run_task(a, &d, task, sums);
}

#endif
