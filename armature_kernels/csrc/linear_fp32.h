/* y = act(x W^T + bias) in fp32, by fp32 panels or by bf16 panels that are widened while they are read. This file has the
 * order of tiles and panels, and the epilogue; tile_fp32.h multiplies. */
#ifndef ARMATURE_LINEAR_FP32_H
#define ARMATURE_LINEAR_FP32_H

#include <omp.h>

#include "activate.h"
#include "division.h"
#include "tile_fp32.h"

#define AHEAD_FP32 4096        /* prefetch distance of one row in bytes */
#ifndef AHEAD_NARROW
#define AHEAD_NARROW AHEAD_FP32 /* the same for bf16 weights */
#endif
#define TURN_FP32 8            /* lines of 128 bytes of one panel before those of the next, if a row multiplies several in turns */
#define ASKING 8               /* products of tiles that share the prefetch of the next part of a panel */
#define TOGETHER_FP32 4        /* panels per task of many rows: their inputs below are read once for all */
#define ROWS_FP32 264          /* rows whose sums a task keeps: their inputs below fit half of a 512 KB L2 */
#define INPUTS_FP32 (3072 / LANES) /* of WIDE_OUTPUTS outputs: 24 KB of fp32, which stay in L1 for all tiles */

INLINE int64_t padded_inputs(const linear_fp32_arguments *a) { return (a->inputs + 1) / 2 * 2; }
INLINE ptrdiff_t panel_bytes_fp32(const linear_fp32_arguments *a) { return a->narrow_panels ? padded_inputs(a) * 64 : a->inputs * 128; }
INLINE int64_t tiles_of(const linear_fp32_arguments *a) { return (a->rows + WIDE_ROWS - 1) / WIDE_ROWS; }

/* First row of a tile: tiles are as equal as possible, the larger ones first. */
INLINE int64_t first_of_tile(const linear_fp32_arguments *a, int64_t tile) {
    const int64_t tiles = tiles_of(a), larger = a->rows % tiles;
    return tile * (a->rows / tiles) + (tile < larger ? tile : larger);
}

/* Inputs [from, to) of `count` rows to a tile, fp32; those beyond the inputs are zero. */
INLINE void interleave_part(const linear_fp32_arguments *a, int64_t row, int64_t count, int64_t from, int64_t to, float *tile) {
    float four[4][LANES];
    for (int64_t r = 0; r < count; r += 4)
        for (int64_t k = from; k < to; k += LANES) {
            const int64_t left = a->inputs - k;
            for (int64_t i = 0; i < 4; i++)
                vf_store(four[i], r + i < count && left > 0 ? row_load_part(!a->narrow_x, a->x, (row + r + i) * a->x_stride + k, left) : vf_all(0));
            for (int64_t part = 0; part < LANES && k + part < to; part += 4) {
                if (r + 4 <= count) {
                    turn_four(four[0] + part, sizeof four[0], to - k - part, (uint32_t *)tile + (k - from + part) * count + r, count);
                    continue;
                }
                for (int64_t j = part; j < part + 4 && k + j < to; j++)
                    for (int64_t i = 0; r + i < count; i++) tile[(k - from + j) * count + r + i] = four[i][j];
            }
        }
}

/* The end of the part of inputs that begins at `from`. */
INLINE int64_t end_of_part(const linear_fp32_arguments *a, int64_t from) {
    return from + INPUTS_FP32 < padded_inputs(a) ? from + INPUTS_FP32 : padded_inputs(a);
}

/* Where the tile that begins at `row` has its inputs from `from` on: the same inputs of all tiles are adjacent, since they
 * are read one after the other. */
INLINE float *part_of_tile(const linear_fp32_arguments *a, int64_t row, int64_t from) {
    return a->tiles + from * a->rows + row * (end_of_part(a, from) - from);
}

/* A single row is read where it is. */
INLINE int is_single(const linear_fp32_arguments *a) { return a->rows == 1 && !(a->narrow_panels && a->inputs % 2); }
INLINE int64_t parts_fp32(const linear_fp32_arguments *a) { return (padded_inputs(a) + INPUTS_FP32 - 1) / INPUTS_FP32; }
INLINE int64_t copies_fp32(const linear_fp32_arguments *a) { return is_single(a) ? 0 : tiles_of(a) * parts_fp32(a); }

/* Part i of the copy of all rows to tiles. */
static void copy_fp32(const linear_fp32_arguments *a, int64_t i) {
    const int64_t parts = parts_fp32(a), row = first_of_tile(a, i / parts), count = first_of_tile(a, i / parts + 1) - row, from = i % parts * INPUTS_FP32;
    interleave_part(a, row, count, from, end_of_part(a, from), part_of_tile(a, row, from));
}

/* Store a row's sums of the outputs from `first` on, as the arguments require. */
INLINE void store_fp32(int activation, const linear_fp32_arguments *a, const float *sums, int64_t row, int64_t first) {
    const int64_t outputs = a->outputs - first < PANEL_OUTPUTS ? a->outputs - first : PANEL_OUTPUTS, wide = a->output != OUTPUT_BF16;
    void *y = element_of(wide, a->y, row * a->y_stride + first);
    for (int64_t i = 0; i < outputs; i += LANES) {
        vf x = vf_load(sums + i);
        if (a->bias) x += vf_load_part(a->bias + first + i, outputs - i);
        x = activated(activation, x);
        if (a->output == OUTPUT_ADD_FP32) x += vf_load_part((const float *)y + i, outputs - i);
        row_store_part(wide, y, i, x, outputs - i);
    }
}

/* Store `rows` rows from `row` on; sums of rows are `stride` floats apart. */
static void store_rows_fp32(const linear_fp32_arguments *a, const float *sums, int64_t stride, int64_t row, int64_t rows, int64_t first) {
#define STORE_FP32(WHICH) \
    for (int64_t r = 0; r < rows; r++) store_fp32(WHICH, a, sums + r * stride, row + r, first)
    FOR_ACTIVATION(a->activation, STORE_FP32)
}

/* Panels that a thread claims at a time: about a megabyte, so that reading is continuous, but at least eight claims per
 * thread. */
INLINE int claim_fp32(const linear_fp32_arguments *a, const division *d) {
    int64_t chunk = (1 << 20) / (panel_bytes_fp32(a) * d->panels), most = d->panel_tasks / (8 * omp_get_num_threads());
    if (chunk > most) chunk = most;
    return chunk < 1 ? 1 : (int)chunk;
}

/* One row times `count` adjacent panels, from `panel` on. */
INLINE void one_row_fp32(const linear_fp32_arguments *a, int64_t panel, int count) {
    const ptrdiff_t bytes = panel_bytes_fp32(a);
    const uint8_t *weights = a->panels + panel * bytes;
    const int64_t turn = count > 1 ? TURN_FP32 : a->inputs;
    float sums[STREAMS * PANEL_OUTPUTS] __attribute__((aligned(64)));
#define ONE_ROW(NARROW, NARROW_X, AHEAD_ONE) \
    multiply_one_row(NARROW, NARROW_X, a->x, weights, count, bytes, turn, a->inputs, count > 1 ? STREAM_AHEAD : AHEAD_ONE, sums)
    if (a->narrow_panels && a->narrow_x) ONE_ROW(1, 1, AHEAD_NARROW);
    else if (a->narrow_panels) ONE_ROW(1, 0, AHEAD_NARROW);
    else if (a->narrow_x) ONE_ROW(0, 1, AHEAD_FP32);
    else ONE_ROW(0, 0, AHEAD_FP32);
    for (int p = 0; p < count; p++) store_rows_fp32(a, sums + p * PANEL_OUTPUTS, PANEL_OUTPUTS, 0, 1, (panel + p) * PANEL_OUTPUTS);
}

/* Inputs [from, to) of tiles [tile0, tile1) times panels [panel0, panel1): the part of a panel that is multiplied at a
 * time stays in L1 for all tiles. Meanwhile the first tiles prefetch the next part, so that memory is busy while they
 * compute. Widening a part of bf16 once for all tiles was tried: 512 rows gain 4 to 7%, 32 rows lose a fifth. sums
 * [panels][rows of these tiles][32]. */
INLINE void multiply_part(int narrow, const linear_fp32_arguments *a, int64_t tile0, int64_t tile1, int64_t panel0, int64_t panel1, int64_t from, int64_t to,
                          float *sums) {
    const int64_t row0 = first_of_tile(a, tile0), rows = first_of_tile(a, tile1) - row0, products = (tile1 - tile0) * (PANEL_OUTPUTS / WIDE_OUTPUTS);
    const ptrdiff_t line = narrow ? 64 : 128, bytes = panel_bytes_fp32(a), asking = products < ASKING ? products : ASKING, step = (128 + asking - 1) / asking;
    for (int64_t panel = panel0; panel < panel1; panel++) {
        const uint8_t *weights = a->panels + panel * bytes + from * line;
        const uint8_t *next = panel + 1 < panel1 ? weights + bytes : to < a->inputs ? a->panels + panel0 * bytes + to * line : a->panels + panel1 * bytes;
        int64_t product = 0;
        for (int64_t output = 0; output < PANEL_OUTPUTS; output += WIDE_OUTPUTS) {
            float *own = sums + (panel - panel0) * rows * PANEL_OUTPUTS + output;
            for (int64_t tile = tile0, row = row0, count; tile < tile1; tile++, row += count, product++) {
                count = first_of_tile(a, tile + 1) - row;
                const uint8_t *ahead = product < asking ? next + product * step * ((to - from) * line / 128) : NULL;
                multiply_wide_tile((int)count, narrow, from == 0, part_of_tile(a, row, from), weights + output * 4, to - from, ahead, step,
                                   own + (row - row0) * PANEL_OUTPUTS);
            }
        }
    }
}

/* Several rows. */
static void rows_fp32(const linear_fp32_arguments *a, const division *d, int64_t task) {
    float sums[TOGETHER_FP32 * ROWS_FP32 * PANEL_OUTPUTS] __attribute__((aligned(64)));
    const int64_t panel0 = task / d->tile_tasks * d->panels, panel1 = panel0 + d->panels < d->num_panels ? panel0 + d->panels : d->num_panels;
    const int64_t first = task % d->tile_tasks * d->tiles, last = first + d->tiles < d->num_tiles ? first + d->tiles : d->num_tiles;
    const int64_t inputs = a->narrow_panels ? padded_inputs(a) : a->inputs, most = ROWS_FP32 / WIDE_ROWS, groups = (last - first + most - 1) / most;
    const int64_t together = groups ? (last - first + groups - 1) / groups : 1;
    for (int64_t tile0 = first; tile0 < last; tile0 += together) {
        const int64_t tile1 = tile0 + together < last ? tile0 + together : last, row = first_of_tile(a, tile0), rows = first_of_tile(a, tile1) - row;
        for (int64_t from = 0; from < inputs; from += INPUTS_FP32) {
            const int64_t to = from + INPUTS_FP32 < inputs ? from + INPUTS_FP32 : inputs;
            if (a->narrow_panels) multiply_part(1, a, tile0, tile1, panel0, panel1, from, to, sums);
            else multiply_part(0, a, tile0, tile1, panel0, panel1, from, to, sums);
        }
        for (int64_t panel = panel0; panel < panel1; panel++)
            store_rows_fp32(a, sums + (panel - panel0) * rows * PANEL_OUTPUTS, PANEL_OUTPUTS, row, rows, panel * PANEL_OUTPUTS);
    }
}

INLINE division divide_fp32(const linear_fp32_arguments *a) {
    const int64_t num_panels = (a->outputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS;
    return divide(num_panels, tiles_of(a), is_single(a) ? streams_of(num_panels) : 1, TOGETHER_FP32);
}

static void task_fp32(const linear_fp32_arguments *a, const division *d, int64_t task) {
    if (!is_single(a)) {
        rows_fp32(a, d, task);
        return;
    }
    const int64_t first = task * d->panels, end = first + d->panels < d->num_panels ? first + d->panels : d->num_panels;
    if (STREAMS > 1 && end - first == STREAMS) one_row_fp32(a, first, STREAMS);
    else
        for (int64_t panel = first; panel < end; panel++) one_row_fp32(a, panel, 1);
}

static void linear_fp32(const void *arguments) {
    const linear_fp32_arguments *a = arguments;
    if (a->rows < 1) return; /* a step that requests no rows */
    if (copies_fp32(a)) {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < copies_fp32(a); i++) copy_fp32(a, i);
    }
    const division d = divide_fp32(a);
    const int chunk = d.num_tiles <= FEW_TILES ? claim_fp32(a, &d) : 1;
#pragma omp for schedule(dynamic, chunk)
    for (int64_t task = 0; task < d.panel_tasks * d.tile_tasks; task++) task_fp32(a, &d, task);
}

#endif
