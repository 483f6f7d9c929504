/* y += B (A x) for the rows of a step that have a LoRA adapter. Each adapter's weights are read once per block of rows, and
 * adapters of other rows not at all. A row is summed in the order of inputs and ranks, whatever the other rows are. */
#ifndef ARMATURE_LORA_H
#define ARMATURE_LORA_H

#include <omp.h>

#include "ops.h"
#include "simd.h"

#define LORA_INPUTS 512      /* inputs of a block's rows that are widened at a time: 8 KB, which stay in L1 */
#define LORA_RANKS 8         /* ranks of a task: fewer share the widened inputs less, more leave threads idle */
#define LORA_PANEL_BYTES 16384 /* bytes of B of a task */
#define LORA_AHEAD 1024      /* prefetch distance in bytes */
#define LORA_OUTPUTS (LANES == 16 ? 32 : 16) /* outputs that are summed in registers */

INLINE int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE vf lora_load(int wide, const void *p, ptrdiff_t i) { return wide ? vf_load((const float *)p + i) : bf16_load((const uint16_t *)p + i); }

/* Inputs [from, from + count) of a row of quantised tiles (ops.h); both are multiples of 32. */
static void lora_codes(const lora_arguments *a, int64_t row, int64_t from, int64_t count, float *out) {
    const int64_t first = row / a->height * a->height, left = least_of(a->rows - first, a->height), groups = a->padded / a->group;
    const int64_t height = (left + TILE_ALIGN - 1) / TILE_ALIGN * TILE_ALIGN;
    const int8_t *codes = a->tiles + first * a->padded + (row - first) * BLOCK;
    const float *scales = a->scales + first * groups + (row - first);
    for (int64_t k = from; k < from + count; k += 32) {
        int8_t part[32] __attribute__((aligned(32)));
        for (int i = 0; i < 32; i += BLOCK) memcpy(part + i, codes + (k + i) * height, BLOCK);
        const vf scale = vf_all(scales[k / a->group * height]);
        for (int i = 0; i < 32; i += 2 * LANES) {
            vf x[2];
            bytes_load(part + i, x);
            vf_store(out + k - from + i, x[0] * scale), vf_store(out + k - from + i + LANES, x[1] * scale);
        }
    }
}

/* Inputs [from, from + count) of a row as fp32, zero beyond its end; count is a multiple of 32 for tiles, else of 16. */
static void lora_inputs(const lora_arguments *a, int64_t row, int64_t from, int64_t count, float *out) {
    if (a->tiles) {
        lora_codes(a, row, from, count, out);
        return;
    }
    const void *x = element_of(a->wide_x, a->x, row * a->x_stride + from);
    for (int64_t k = 0; k < count; k += LANES) {
        const int64_t left = a->inputs - from - k;
        vf_store(out + k, left > 0 ? row_load_part(a->wide_x, x, k, left) : vf_all(0));
    }
}

/* Add the products of four ranks with `count` inputs of the rows. */
INLINE void shrink_inputs(int wide, int rows, const void *weights, const float *x, int64_t count, vf (*sums)[LORA_ROWS]) {
    vf kept[4][LORA_ROWS];
    for (int i = 0; i < 4; i++)
        for (int r = 0; r < rows; r++) kept[i][r] = sums[i][r];
    for (int64_t k = 0; k < count; k += 16) {
        const char *ahead = (const char *)weights + k * (wide ? 16 : 8) + LORA_AHEAD;
        for (int line = 0; line < (wide ? 4 : 2); line++) __builtin_prefetch(ahead + 64 * line);
        for (int j = 0; j < 16; j += LANES)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const vf w = lora_load(wide, weights, k * 4 + i * 16 + j);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) kept[i][r] += w * vf_load(x + r * LORA_INPUTS + k + j);
            }
    }
    for (int i = 0; i < 4; i++)
        for (int r = 0; r < rows; r++) sums[i][r] = kept[i][r];
}

/* Multiply the rows of a block by the ranks of a part from `rank` on. */
static void shrink_block(const lora_arguments *a, const lora_block *b, int64_t part, int64_t rank) {
    const lora_part *p = a->parts + b->slot * a->num_parts + part;
    const int64_t quads = (least_of(p->rank - rank, LORA_RANKS) + 3) / 4, padded = (a->inputs + 15) / 16 * 16, step = a->tiles ? 32 : 16;
    float x[LORA_ROWS * LORA_INPUTS] __attribute__((aligned(64)));
    vf sums[LORA_RANKS][LORA_ROWS] = {0};
    for (int64_t from = 0; from < padded; from += LORA_INPUTS) {
        const int64_t count = least_of(padded - from, LORA_INPUTS), widened = (count + step - 1) / step * step;
        for (int64_t r = 0; r < b->count; r++) lora_inputs(a, b->rows[r], from, widened, x + r * LORA_INPUTS);
        for (int64_t q = 0; q < quads; q++) {
            const void *weights = element_of(a->wide_weights, p->a, (rank + 4 * q) * padded + from * 4);
#define SHRINK(WIDE, ROWS) case ROWS: shrink_inputs(WIDE, ROWS, weights, x, count, sums + 4 * q); break;
            if (a->wide_weights) switch (b->count) { SHRINK(1, 1) SHRINK(1, 2) SHRINK(1, 3) SHRINK(1, 4) }
            else switch (b->count) { SHRINK(0, 1) SHRINK(0, 2) SHRINK(0, 3) SHRINK(0, 4) }
        }
    }
    for (int64_t r = 0; r < b->count; r++) {
        float *target = a->shrunk + (b->rows[r] * a->num_parts + part) * a->max_rank + rank;
        for (int64_t i = 0; i < 4 * quads; i++) target[i] = vf_sum(sums[i][r]);
    }
}

/* Add LORA_OUTPUTS outputs of a panel to the rows of a block, of which `left` exist. */
INLINE void expand_outputs(int wide, int rows, const lora_arguments *a, const lora_block *b, const float *const *shrunk, const void *weights, int64_t rank,
                           int64_t output, int64_t left) {
    vf sums[LORA_ROWS][LORA_OUTPUTS / LANES];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < LORA_OUTPUTS / LANES; j++) sums[r][j] = vf_all(0);
    for (int64_t k = 0; k < rank; k++) {
        __builtin_prefetch((const char *)element_of(wide, weights, k * PANEL_OUTPUTS) + LORA_AHEAD);
        if (wide) __builtin_prefetch((const char *)element_of(wide, weights, k * PANEL_OUTPUTS) + LORA_AHEAD + 64);
#pragma GCC unroll 4
        for (int j = 0; j < LORA_OUTPUTS / LANES; j++) {
            const vf w = lora_load(wide, weights, k * PANEL_OUTPUTS + j * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sums[r][j] += w * shrunk[r][k];
        }
    }
    for (int r = 0; r < rows; r++) {
        void *y = element_of(a->wide_y, a->y, b->rows[r] * a->y_stride + output);
        for (int j = 0; j < LORA_OUTPUTS / LANES && j * LANES < left; j++)
            row_store_part(a->wide_y, y, j * LANES, row_load_part(a->wide_y, y, j * LANES, left - j * LANES) + sums[r][j], left - j * LANES);
    }
}

/* Add a panel of a part to the rows of a block. */
static void expand_panel(const lora_arguments *a, const lora_block *b, int64_t part, int64_t panel) {
    const lora_part *p = a->parts + b->slot * a->num_parts + part;
    const float *shrunk[LORA_ROWS];
    for (int64_t r = 0; r < b->count; r++) shrunk[r] = a->shrunk + (b->rows[r] * a->num_parts + part) * a->max_rank;
    for (int64_t from = 0; from < PANEL_OUTPUTS; from += LORA_OUTPUTS) {
        const void *weights = element_of(a->wide_weights, p->b, panel * PANEL_OUTPUTS * p->rank + from);
        const int64_t output = panel * PANEL_OUTPUTS + from, left = a->outputs[part] - output, first = a->first_outputs[part] + output;
        if (left <= 0) return;
#define EXPAND(WIDE, ROWS) case ROWS: expand_outputs(WIDE, ROWS, a, b, shrunk, weights, p->rank, first, left); break;
        if (a->wide_weights) switch (b->count) { EXPAND(1, 1) EXPAND(1, 2) EXPAND(1, 3) EXPAND(1, 4) }
        else switch (b->count) { EXPAND(0, 1) EXPAND(0, 2) EXPAND(0, 3) EXPAND(0, 4) }
    }
}

/* Tasks of adjacent blocks that a thread claims at a time. */
INLINE int lora_claim(int64_t tasks) {
    const int64_t claim = tasks / (8 * omp_get_num_threads());
    return claim < 1 ? 1 : claim > 16 ? 16 : (int)claim;
}

static void lora(const void *arguments) {
    const lora_arguments *a = arguments;
    const int64_t num_blocks = a->step->num_blocks, chunks = (a->max_rank + LORA_RANKS - 1) / LORA_RANKS;
    if (!num_blocks) return; /* no row of the step has an adapter */
    const int64_t shrinks = num_blocks * a->num_parts * chunks;
    const int few = lora_claim(shrinks);
#pragma omp for schedule(dynamic, few)
    for (int64_t i = 0; i < shrinks; i++) {
        const lora_block *b = a->step->blocks + i % num_blocks;
        const int64_t part = i / num_blocks % a->num_parts, rank = i / num_blocks / a->num_parts * LORA_RANKS;
        if (rank < a->parts[b->slot * a->num_parts + part].rank) shrink_block(a, b, part, rank);
    }
    int64_t panels = 0, together = LORA_PANEL_BYTES / (PANEL_OUTPUTS * 2 * a->max_rank);
    if (together < 1) together = 1;
    for (int64_t part = 0; part < a->num_parts; part++) panels += (a->outputs[part] + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS;
    const int64_t expands = (panels + together - 1) / together * num_blocks;
    const int many = lora_claim(expands);
#pragma omp for schedule(dynamic, many)
    for (int64_t i = 0; i < expands; i++) {
        const lora_block *b = a->step->blocks + i % num_blocks;
        int64_t first = i / num_blocks * together, last = least_of(first + together, panels), begin = 0;
        for (int64_t part = 0; part < a->num_parts && begin < last; part++) {
            const int64_t count = (a->outputs[part] + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS;
            if (a->parts[b->slot * a->num_parts + part].rank)
                for (int64_t panel = first > begin ? first : begin; panel < least_of(last, begin + count); panel++) expand_panel(a, b, part, panel - begin);
            begin += count;
        }
    }
}

#endif
