/* y = act(x W^T + bias) from bf16 rows and bf16 panels (tile_bf16.h describes them) with Arm's BF16 instructions. One row
 * uses BFDOT, two products of each output per instruction; more rows use BFMMLA, four products of two rows and two outputs.
 * Both sum in fp32, in different orders: with `fixed` one row uses BFMMLA as well. Verified by emulation; no speed has been
 * measured. */
#ifndef ARMATURE_LINEAR_BF16_ARM_H
#define ARMATURE_LINEAR_BF16_ARM_H

#include "linear_fp32.h"

#define MMLA_ROWS 12        /* 6 pairs of rows times 4 pairs of outputs: 24 accumulators of 32 registers */
#define MMLA_OUTPUTS 8      /* of a panel that are multiplied together */
#define FIT_MMLA (1 << 19)  /* bytes of panels per tile: half of a 1 MB L2 */
#define AHEAD_DOT 4096      /* prefetch distance in bytes */
#define QUADS_TOGETHER 64   /* groups of four inputs of a tile that a thread packs at a time */

INLINE int64_t quads_of(const linear_bf16_arguments *a) { return (a->inputs + 3) / 4; }
INLINE int64_t pairs_of(const linear_bf16_arguments *a) { return (a->inputs + 1) / 2; }

/* First row of a tile. All but the last have an even number of rows. */
INLINE int64_t first_of_mmla(const linear_bf16_arguments *a, int64_t tiles, int64_t tile) {
    const int64_t pairs = (a->rows + 1) / 2, larger = pairs % tiles, row = 2 * (tile * (pairs / tiles) + (tile < larger ? tile : larger));
    return row < a->rows ? row : a->rows;
}

INLINE int64_t mmla_tiles(const linear_bf16_arguments *a) { return (a->rows + MMLA_ROWS - 1) / MMLA_ROWS; }
INLINE int64_t mmla_parts(const linear_bf16_arguments *a) { return (quads_of(a) + QUADS_TOGETHER - 1) / QUADS_TOGETHER; }
INLINE int uses_dot(const linear_bf16_arguments *a) { return a->rows == 1 && !a->fixed; }
INLINE int64_t copies_bf16(const linear_bf16_arguments *a) { return uses_dot(a) ? 0 : mmla_tiles(a) * mmla_parts(a); }

/* Part i of rows to tiles: for each four inputs all pairs of rows, four inputs of each row. What does not exist is zero. */
static void copy_bf16(const linear_bf16_arguments *a, int64_t i) {
    const int64_t quads = quads_of(a), parts = mmla_parts(a), tiles = mmla_tiles(a);
    const int64_t row = first_of_mmla(a, tiles, i / parts), count = first_of_mmla(a, tiles, i / parts + 1) - row, padded = (count + 1) / 2 * 2;
    const int64_t from = i % parts * QUADS_TOGETHER, to = from + QUADS_TOGETHER < quads ? from + QUADS_TOGETHER : quads;
    uint16_t *tile = (uint16_t *)a->tiles + row * quads * 4;
    for (int64_t r = 0; r < padded; r++)
        for (int64_t q = from; q < to; q++) {
            const int64_t left = a->inputs - 4 * q;
            uint16_t four[4] = {0};
            if (r < count) memcpy(four, a->x + (row + r) * a->x_stride + 4 * q, (size_t)(left < 4 ? left : 4) * 2);
            memcpy(tile + (q * padded + r) * 4, four, 8);
        }
}

/* sums[row * 32 + output] for `count` pairs of rows and MMLA_OUTPUTS outputs from `panel` on. */
INLINE void multiply_mmla(int count, const uint16_t *tile, const uint8_t *panel, int64_t pairs, const uint8_t *ahead, float *sums) {
    float32x4_t acc[MMLA_ROWS / 2][4];
    for (int r = 0; r < count; r++)
        for (int i = 0; i < 4; i++) acc[r][i] = vdupq_n_f32(0);
    for (int64_t p = 0; p < pairs; p += 2, tile += 8 * count) {
        const uint32_t *line = (const uint32_t *)panel + p * PANEL_OUTPUTS;
        const uint32x4_t even[2] = {vld1q_u32(line), vld1q_u32(line + 4)}, zero = vdupq_n_u32(0);
        const int both = p + 1 < pairs;
        const uint32x4_t odd[2] = {both ? vld1q_u32(line + PANEL_OUTPUTS) : zero, both ? vld1q_u32(line + PANEL_OUTPUTS + 4) : zero};
        bfloat16x8_t w[4];
        if (ahead)
            for (int i = 0; i < 4; i++) __builtin_prefetch(ahead + p * 128 + i * 64);
        for (int i = 0; i < 2; i++) { /* the four inputs of two outputs */
            w[2 * i] = vreinterpretq_bf16_u32(vzip1q_u32(even[i], odd[i]));
            w[2 * i + 1] = vreinterpretq_bf16_u32(vzip2q_u32(even[i], odd[i]));
        }
#pragma GCC unroll 6
        for (int r = 0; r < count; r++) {
            const bfloat16x8_t x = vreinterpretq_bf16_u16(vld1q_u16(tile + 8 * r));
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) acc[r][i] = vbfmmlaq_f32(acc[r][i], x, w[i]);
        }
    }
    for (int r = 0; r < count; r++)
        for (int i = 0; i < 4; i++) {
            vst1_f32(sums + 2 * r * 32 + 2 * i, vget_low_f32(acc[r][i]));
            vst1_f32(sums + (2 * r + 1) * 32 + 2 * i, vget_high_f32(acc[r][i]));
        }
}

#define MMLA_CASE(COUNT) case COUNT: multiply_mmla(COUNT, tile, panel, pairs, ahead, sums); break;

/* A tile of up to MMLA_ROWS rows times a whole panel. */
INLINE void multiply_mmla_tile(int rows, const uint16_t *tile, const uint8_t *panel, int64_t pairs, const uint8_t *ahead, float *sums) {
    for (int output = 0; output < PANEL_OUTPUTS; output += MMLA_OUTPUTS, panel += MMLA_OUTPUTS * 4, sums += MMLA_OUTPUTS, ahead = NULL)
        switch ((rows + 1) / 2) {
            MMLA_CASE(1) MMLA_CASE(2) MMLA_CASE(3) MMLA_CASE(4) MMLA_CASE(5) MMLA_CASE(6)
        }
}

/* One row times a panel. */
INLINE void multiply_dot(const linear_bf16_arguments *a, const uint8_t *panel, float *sums) {
    float32x4_t acc[8];
    for (int i = 0; i < 8; i++) acc[i] = vdupq_n_f32(0);
    for (int64_t k = 0; k < a->inputs; k += 2, panel += 128) {
        uint32_t pair = 0;
        memcpy(&pair, a->x + k, k + 1 < a->inputs ? 4 : 2);
        const bfloat16x8_t x = vreinterpretq_bf16_u32(vdupq_n_u32(pair));
        __builtin_prefetch(panel + AHEAD_DOT), __builtin_prefetch(panel + AHEAD_DOT + 64);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) acc[i] = vbfdotq_f32(acc[i], vreinterpretq_bf16_u32(vld1q_u32((const uint32_t *)panel + 4 * i)), x);
    }
    for (int i = 0; i < 8; i++) vst1q_f32(sums + 4 * i, acc[i]);
}

/* What the epilogue needs, which is that of fp32. */
INLINE linear_fp32_arguments epilogue_of(const linear_bf16_arguments *a) {
    return (linear_fp32_arguments){.bias = a->bias, .y = a->y, .y_stride = a->y_stride, .outputs = a->outputs, .output = a->output, .activation = a->activation};
}

static void one_row_dot(const linear_bf16_arguments *a, int64_t panel) {
    const linear_fp32_arguments epilogue = epilogue_of(a);
    float sums[PANEL_OUTPUTS] __attribute__((aligned(64)));
    multiply_dot(a, a->panels + panel * pairs_of(a) * 128, sums);
    store_rows_fp32(&epilogue, sums, PANEL_OUTPUTS, 0, 1, panel * PANEL_OUTPUTS);
}

static void rows_mmla(const linear_bf16_arguments *a, const division *d, int64_t task) {
    const linear_fp32_arguments epilogue = epilogue_of(a);
    const int64_t bytes = pairs_of(a) * 128, tiles = d->num_tiles;
    const int64_t panel0 = task / d->tile_tasks * d->panels, panel1 = panel0 + d->panels < d->num_panels ? panel0 + d->panels : d->num_panels;
    const int64_t tile0 = task % d->tile_tasks * d->tiles, tile1 = tile0 + d->tiles < tiles ? tile0 + d->tiles : tiles;
    float sums[MMLA_ROWS * PANEL_OUTPUTS] __attribute__((aligned(64)));
    for (int64_t tile = tile0; tile < tile1; tile++) {
        const int64_t row = first_of_mmla(a, tiles, tile), count = first_of_mmla(a, tiles, tile + 1) - row;
        for (int64_t panel = panel0; panel < panel1; panel++) {
            const uint8_t *weights = a->panels + panel * bytes, *ahead = tile == tile0 && tiles <= FEW_TILES ? weights + AHEAD_DOT : NULL;
            multiply_mmla_tile((int)count, (const uint16_t *)a->tiles + row * quads_of(a) * 4, weights, pairs_of(a), ahead, sums);
            store_rows_fp32(&epilogue, sums, PANEL_OUTPUTS, row, count, panel * PANEL_OUTPUTS);
        }
    }
}

/* A task of a single row is one panel. */
INLINE division divide_bf16(const linear_bf16_arguments *a) {
    return divide((a->outputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS, mmla_tiles(a), 1, FIT_MMLA / (pairs_of(a) * 128));
}

INLINE void begin_bf16(const linear_bf16_arguments *a) { (void)a; }
INLINE void end_bf16(void) {}

static void task_bf16(const linear_bf16_arguments *a, const division *d, int64_t task) {
    if (uses_dot(a)) one_row_dot(a, task);
    else rows_mmla(a, d, task);
}

static void linear_bf16(const void *arguments) {
    const linear_bf16_arguments *a = arguments;
    if (a->rows < 1) return;
    if (copies_bf16(a)) {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < copies_bf16(a); i++) copy_bf16(a, i);
    }
    const division d = divide_bf16(a);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < d.panel_tasks * d.tile_tasks; task++) task_bf16(a, &d, task);
}

#endif
