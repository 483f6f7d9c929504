/* y = x W^T (+ bias) with AMX: bf16 rows times panels of bf16, int8 or int4, summed in fp32. Integer weights are
 * widened to bf16, a part of a panel at a time, which pays from some tens of rows on.
 *
 * A row's result does not depend on the number of rows: its sum is divided among registers and memory in the same way. */
#ifndef ARMATURE_LINEAR_AMX_H
#define ARMATURE_LINEAR_AMX_H

#include "store_bf16.h"
#include "tile_amx.h"

#define PART_INPUTS 256 /* of a panel: 16 KB of bf16, which stay in L1; 192 and 384 are 10% slower, 512 15% (256 rows, Sapphire Rapids) */
#define PART_BLOCKS (PART_INPUTS / AMX_INPUTS)
#define PART_BYTES (PART_INPUTS / 2 * SUM_STRIDE)
#define BLOCK_ROWS 256  /* rows that are multiplied with a part while it is in L1. 128: 10% slower, 512: no faster */
#define MOST_PANELS 8  /* of a task: a part of the rows is read from L3 once for all of them, and their sums stay in L2 */

INLINE int64_t blocks_of(const linear_bf16_arguments *a) { return (a->inputs + AMX_INPUTS - 1) / AMX_INPUTS; }

/* Rows of a register: 16, or all if there are fewer. */
INLINE int register_rows(const linear_bf16_arguments *a) { return a->rows < AMX_ROWS ? (int)a->rows : AMX_ROWS; }

/* Registers of rows. */
INLINE int64_t copies_bf16(const linear_bf16_arguments *a) {
    const int64_t rows = register_rows(a);
    return (a->rows + rows - 1) / rows;
}

/* Where 32 inputs of the rows of a register, from 32 * `block` on, are in the copy. A part of all rows is contiguous:
 * rows at a distance of a power of two would share the same sets of the caches. */
INLINE uint8_t *copied_block(const linear_bf16_arguments *a, int64_t reg, int64_t block) {
    const int64_t part = block / PART_BLOCKS * PART_BLOCKS, left = blocks_of(a) - part, together = left < PART_BLOCKS ? left : PART_BLOCKS;
    return (uint8_t *)a->tiles + (part * copies_bf16(a) + reg * together + block - part) * register_rows(a) * 64;
}

/* The same of one row. */
INLINE uint16_t *copied_inputs(const linear_bf16_arguments *a, int64_t row, int64_t block) {
    const int64_t rows = register_rows(a);
    return (uint16_t *)(copied_block(a, row / rows, block) + row % rows * 64);
}

/* Copy the rows of a register to blocks [parts][registers][inputs / 32 of a part][16][32], padded with zeros. */
static void copy_bf16(const linear_bf16_arguments *a, int64_t reg) {
    const int64_t blocks = blocks_of(a), rows = register_rows(a), whole = a->inputs / AMX_INPUTS, row0 = reg * rows;
    for (int64_t k = 0; k < blocks; k++) {
        uint8_t *to = copied_block(a, reg, k);
        for (int64_t r = 0; r < rows; r++, to += 64) {
            const uint16_t *from = a->x + (row0 + r) * a->x_stride + k * AMX_INPUTS;
            if (row0 + r < a->rows && k < whole) {
                memcpy(to, from, 64);
                continue;
            }
            memset(to, 0, 64);
            if (row0 + r < a->rows) memcpy(to, from, (size_t)(a->inputs - k * AMX_INPUTS) * 2);
        }
    }
}

/* What a task multiplies: each `step`-th panel of [panel0, panel1), rows [row0, row1). */
typedef struct {
    int64_t panel0, panel1, step, row0, row1;
} amx_task;

INLINE int64_t amx_panel_bytes(const linear_bf16_arguments *a) {
    if (!a->bits) return (a->inputs + 1) / 2 * SUM_STRIDE;
    return layout_of(a->bits, a->header, a->group, (a->inputs + a->group - 1) / a->group).bytes;
}

/* Inputs [from, from + count) of a panel as bf16, either where they are or in `part`. */
INLINE const uint8_t *part_of(const linear_bf16_arguments *a, const uint8_t *panel, int64_t from, int64_t count, uint8_t *part) {
    if (!a->bits) {
        if (from + count <= a->inputs) return panel + from / 2 * SUM_STRIDE;
        const int64_t pairs = (a->inputs - from + 1) / 2; /* the last block is padded with zeros */
        memcpy(part, panel + from / 2 * SUM_STRIDE, (size_t)(pairs * SUM_STRIDE));
        memset(part + pairs * SUM_STRIDE, 0, (size_t)((count / 2 - pairs) * SUM_STRIDE));
        return part;
    }
    const int64_t groups = (a->inputs + a->group - 1) / a->group;
    if (a->bits == 8) widen_panel(8, SCALES, panel, a->group, groups, from, count, part);
    else if (a->header == SCALES_AND_MINIMUMS) widen_panel(4, SCALES_AND_MINIMUMS, panel, a->group, groups, from, count, part);
    else if (a->header == DOUBLE_QUANTIZED) widen_panel(4, DOUBLE_QUANTIZED, panel, a->group, groups, from, count, part);
    else widen_panel(4, SCALES, panel, a->group, groups, from, count, part);
    return part;
}

/* Multiply a part of a panel with all rows of a task. `ahead.x`: the next part of the first rows. */
INLINE void multiply_rows_amx(const linear_bf16_arguments *a, const amx_task *t, const uint8_t *weights, int64_t from, int64_t blocks, float *sums, prefetching ahead) {
    const int rows = register_rows(a), first = from == 0;
    for (int64_t row = t->row0; row < t->row1; row += 2 * AMX_ROWS, sums += 2 * AMX_ROWS * PANEL_OUTPUTS) {
        const uint8_t *x = copied_block(a, row / AMX_ROWS, from / AMX_INPUTS);
        if (t->row1 - row > AMX_ROWS) multiply_blocks(1, AMX_ROWS, x, weights, blocks, first, sums, ahead);
        else multiply_blocks(0, rows, x, weights, blocks, first, sums, ahead);
        ahead.weights += ahead.lines * blocks * 64, ahead.x += 2 * blocks * AMX_ROWS * 64;
    }
}

/* Where the n-th part of a task is, and the first of the next task, if that begins with the next panel. */
INLINE const uint8_t *weights_at(const linear_bf16_arguments *a, const amx_task *t, int64_t panels, int64_t n) {
    const int64_t bytes = amx_panel_bytes(a), padded = blocks_of(a) * AMX_INPUTS, from = n / panels * PART_INPUTS;
    if (from >= padded) return a->panels + t->panel1 * bytes;
    return a->panels + (t->panel0 + n % panels * t->step) * bytes + from * bytes / padded;
}

/* `stored`: store each panel when it is finished. */
static void run_amx(const linear_bf16_arguments *a, const amx_task *t, int stored, float (*sums)[BLOCK_ROWS * PANEL_OUTPUTS], uint8_t *part) {
    const int64_t bytes = amx_panel_bytes(a), padded = blocks_of(a) * AMX_INPUTS, panels = (t->panel1 - t->panel0 + t->step - 1) / t->step;
    const int64_t turns = (t->row1 - t->row0 + 2 * AMX_ROWS - 1) / (2 * AMX_ROWS);
    for (int64_t from = 0, n = 0; from < padded; from += PART_INPUTS) {
        const int64_t count = padded - from < PART_INPUTS ? padded - from : PART_INPUTS, blocks = count / AMX_INPUTS, last = from + count == padded;
        /* Each panel prefetches its share of the rows' next part. */
        const int64_t x_lines = last || turns <= 2 ? 0 : (2 * AMX_ROWS + panels - 1) / panels;
        const uint8_t *x = copied_block(a, t->row0 / AMX_ROWS, from / AMX_INPUTS) + copies_bf16(a) * blocks * AMX_ROWS * 64;
        for (int64_t i = 0; i < panels; i++, n++, x += x_lines * blocks * 64) {
            const int64_t panel = t->panel0 + i * t->step, size = count * bytes / padded;
            const uint8_t *weights = part_of(a, a->panels + panel * bytes, from, count, part);
            const prefetching ahead = {weights_at(a, t, panels, n + 1), x, (size + turns * blocks * 64 - 1) / (turns * blocks * 64), x_lines};
            multiply_rows_amx(a, t, weights, from, blocks, sums[i], ahead);
            if (last && stored) store_all(a, sums[i], t->row0, (int)(t->row1 - t->row0), panel * PANEL_OUTPUTS);
        }
    }
}

/* Tiles of the division are blocks of BLOCK_ROWS rows. */
INLINE division divide_bf16(const linear_bf16_arguments *a) {
    division d = {.num_panels = (a->outputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS, .num_tiles = (a->rows + BLOCK_ROWS - 1) / BLOCK_ROWS, .tiles = 1};
    const int64_t panels = a->rows <= 4 * AMX_ROWS ? 1 : d.num_panels * d.num_tiles / (8 * omp_get_num_threads());
    d.panels = panels < 1 ? 1 : panels < MOST_PANELS ? panels : MOST_PANELS;
    d.panel_tasks = (d.num_panels + d.panels - 1) / d.panels;
    d.tile_tasks = d.num_tiles;
    return d;
}

/* Set up the registers for the tasks of a product. */
INLINE void begin_bf16(const linear_bf16_arguments *a) { use_rows(register_rows(a)); }
INLINE void end_bf16(void) { tile_release(); }

static void task_bf16(const linear_bf16_arguments *a, const division *d, int64_t task) {
    const int64_t panel0 = task % d->panel_tasks * d->panels, row0 = task / d->panel_tasks * BLOCK_ROWS;
    const amx_task t = {panel0, panel0 + d->panels < d->num_panels ? panel0 + d->panels : d->num_panels, 1, row0, row0 + BLOCK_ROWS < a->rows ? row0 + BLOCK_ROWS : a->rows};
    float sums[MOST_PANELS][BLOCK_ROWS * PANEL_OUTPUTS] __attribute__((aligned(64)));
    uint8_t part[PART_BYTES] __attribute__((aligned(64)));
    run_amx(a, &t, 1, sums, part);
}

/* ---- a product of gates and ups whose result is the next product's input (experts.h) ---- */

#define GATED_PRODUCT 1

/* Write a part of a row into the copy: `count` inputs from `from` on, a multiple of 32. */
INLINE void copy_part(const linear_bf16_arguments *a, int64_t row, int64_t from, int64_t count, const float *values) {
    for (int64_t n = 0; n < count; n += AMX_INPUTS) {
        uint16_t *to = copied_inputs(a, row, (from + n) / AMX_INPUTS);
        if (count - n < AMX_INPUTS) memset(to, 0, 64);
        for (int64_t i = 0; i < AMX_INPUTS && n + i < count; i += LANES) bf16_store_part(to + i, vf_load(values + n + i), count - n - i);
    }
}

/* Copies that `gather_rows` makes: the rows of a register at a time, so that memory is written in order. */
INLINE int64_t gathers_of(const linear_bf16_arguments *a) { return (a->rows + AMX_ROWS - 1) / AMX_ROWS; }

/* Copy rows `from` [rows] of x, in bf16 or fp32 (`wide`), whose rows are `stride` apart, times their `scales`, if given. */
static void gather_rows(const linear_bf16_arguments *a, int64_t wide, const void *x, int64_t stride, const int64_t *from, const float *scales, int64_t gather) {
    const int64_t row0 = gather * AMX_ROWS, row1 = row0 + AMX_ROWS < a->rows ? row0 + AMX_ROWS : a->rows;
    for (int64_t block = 0; block < blocks_of(a); block++)
        for (int64_t row = row0; row < row1; row++) {
            const int64_t count = a->inputs - block * AMX_INPUTS < AMX_INPUTS ? a->inputs - block * AMX_INPUTS : AMX_INPUTS;
            const void *inputs = element_of(wide, x, from[row] * stride + block * AMX_INPUTS);
            float values[AMX_INPUTS] __attribute__((aligned(64)));
            const float scale = scales ? scales[from[row]] : 1.0f;
            for (int64_t i = 0; i < count; i += LANES) vf_store(values + i, row_load_part(wide, inputs, i, count - i) * scale);
            copy_part(a, row, block * AMX_INPUTS, count, values);
        }
}

/* Whether `task_gated` can run: the gate and the up of an input of the next product are 32 * n outputs apart. */
INLINE int can_gate(const linear_bf16_arguments *a) { return a->outputs % (2 * PANEL_OUTPUTS) == 0; }
INLINE int64_t gated_tasks(const linear_bf16_arguments *a) { return a->outputs / (2 * PANEL_OUTPUTS) * ((a->rows + BLOCK_ROWS - 1) / BLOCK_ROWS); }

INLINE void store_gated(int activation, const linear_bf16_arguments *a, const linear_bf16_arguments *next, const amx_task *t, const float *gates, const float *ups) {
    const float *gate_bias = a->bias ? a->bias + t->panel0 * PANEL_OUTPUTS : NULL, *up_bias = a->bias ? gate_bias + t->step * PANEL_OUTPUTS : NULL;
    for (int64_t row = t->row0; row < t->row1; row++, gates += PANEL_OUTPUTS, ups += PANEL_OUTPUTS) {
        uint16_t *to = copied_inputs(next, row, t->panel0);
        for (int i = 0; i < PANEL_OUTPUTS; i += LANES) {
            vf gate = vf_load(gates + i), up = vf_load(ups + i);
            if (a->bias) gate += vf_load(gate_bias + i), up += vf_load(up_bias + i);
            bf16_store_part(to + i, gated(activation, gate, up), LANES);
        }
    }
}

/* act(gate) * up of 32 inputs of the next product, written to its copy. */
static void task_gated(const linear_bf16_arguments *a, const linear_bf16_arguments *next, int64_t activation, int64_t task) {
    const int64_t half = a->outputs / (2 * PANEL_OUTPUTS), panel = task % half, row0 = task / half * BLOCK_ROWS;
    const amx_task t = {panel, panel + half + 1, half, row0, row0 + BLOCK_ROWS < a->rows ? row0 + BLOCK_ROWS : a->rows};
    float sums[2][BLOCK_ROWS * PANEL_OUTPUTS] __attribute__((aligned(64)));
    uint8_t part[PART_BYTES] __attribute__((aligned(64)));
    run_amx(a, &t, 0, sums, part);
#define STORE_GATED(WHICH) store_gated(WHICH, a, next, &t, sums[0], sums[1])
    FOR_GATE(activation, STORE_GATED)
}

static void linear_bf16(const void *arguments) {
    const linear_bf16_arguments *a = arguments;
    if (a->rows < 1) return;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < copies_bf16(a); i++) copy_bf16(a, i);
    const division d = divide_bf16(a);
    const int chunk = d.num_tiles > 1 || d.panels > 1 ? 1 : panels_together(d.num_panels, (amx_panel_bytes(a) + SUM_STRIDE - 1) / SUM_STRIDE);
    begin_bf16(a);
#pragma omp for schedule(dynamic, chunk)
    for (int64_t task = 0; task < d.panel_tasks * d.tile_tasks; task++) task_bf16(a, &d, task);
    end_bf16();
}

#endif
