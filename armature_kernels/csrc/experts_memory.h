/* What the experts of a step are divided into, and where the memory of a pass lies (experts.h). */
#ifndef ARMATURE_EXPERTS_MEMORY_H
#define ARMATURE_EXPERTS_MEMORY_H

#include "division.h"
#include "level.h"

#define MOST_PASS_BYTES (96 << 20) /* of scratch: prompts are computed in several passes if they need more */
#define MOST_COPY_ROWS 16          /* a product of bf16 copies its rows in blocks of this many (OP_LINEAR_BF16) */

/* One product of the rows of one expert. `form` as in `expert_weights`; that of integers becomes FORM_BF16_PANELS if there
 * are many rows. `gated`: its tasks write what the next product reads. */
typedef struct {
    int64_t form, gated, tasks, first_copy, first_task; /* numbered through all experts */
    division divided;
    union {
        linear_int_arguments integer;
        linear_bf16_arguments bf16;
        linear_fp32_arguments fp32;
    } a;
} expert_product;

/* An expert that has rows: they are [first, first + rows) of all buffers. */
typedef struct {
    int64_t expert, first, rows, copy_row;
    expert_product products[2]; /* gate and up, down */
} expert_rows;

/* Counts of a pass. `chunk`: tasks that a thread claims at a time. */
typedef struct {
    int64_t num_experts, num_copies[2], num_tasks[2], chunk[2];
} expert_pass;

/* Rows of a pass, and addresses. `rows_of` [pass * k] is the row in the buffers for each of a row's experts, and
 * `source_of` the row of x for each row in the buffers. The input of a product is `codes`, `scales` and `sums` for
 * integers, or `plain` and `tiles` for floats. */
typedef struct {
    int64_t pass_rows, most_rows;
    expert_pass *pass;
    expert_rows *experts;
    int64_t *counts, *rows_of, *expert_of, *source_of;
    int8_t *codes;
    float *scales;
    int32_t *sums;
    uint8_t *plain, *tiles;
    float *results;
    int64_t bytes;
} expert_memory;

static inline int64_t expert_groups(const expert_weights *w) { return (w->inputs + w->group - 1) / w->group; }
static inline int is_integer(const expert_weights *w) { return w->form == FORM_INT4 || w->form == FORM_INT8; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static inline uint8_t *part_of_scratch(uint8_t *scratch, int64_t *at, int64_t bytes) {
    uint8_t *part = scratch + *at;
    *at += (bytes + 63) / 64 * 64;
    return part;
}

/* The memory of passes of `pass_rows` rows. */
static inline expert_memory memory_of_pass(const experts_arguments *a, int64_t align, int64_t pass_rows) {
    const expert_weights *both[2] = {&a->gate_up, &a->down};
    const int64_t all = pass_rows * a->k, used = all < a->experts ? all : a->experts;
    expert_memory m = {.pass_rows = pass_rows, .most_rows = all + used * (align - 1)};
    int64_t codes = 0, groups = 0, floats = 0;
    for (int i = 0; i < 2; i++) {
        const expert_weights *w = both[i];
        if (is_integer(w)) codes = larger(codes, m.most_rows * expert_groups(w) * w->group), groups = larger(groups, m.most_rows * expert_groups(w));
        if (is_integer(w) && !w->wide_from) continue;
        const int64_t wide = w->form == FORM_FP32_PANELS ? 4 : 2;
        /* Rows and their copies; or both are copies, of the rows of one product and of the next (linear_amx.h). */
        floats = larger(floats, (m.most_rows + used * (MOST_COPY_ROWS - 1)) * ((w->inputs + 31) / 32 * 32) * wide);
    }
    uint8_t *s = a->scratch;
    m.pass = (expert_pass *)part_of_scratch(s, &m.bytes, sizeof *m.pass);
    m.experts = (expert_rows *)part_of_scratch(s, &m.bytes, used * (int64_t)sizeof *m.experts);
    m.counts = (int64_t *)part_of_scratch(s, &m.bytes, a->experts * 8);
    m.rows_of = (int64_t *)part_of_scratch(s, &m.bytes, all * 8);
    m.expert_of = (int64_t *)part_of_scratch(s, &m.bytes, all * 8);
    m.source_of = (int64_t *)part_of_scratch(s, &m.bytes, m.most_rows * 8);
    m.codes = (int8_t *)part_of_scratch(s, &m.bytes, codes);
    m.scales = (float *)part_of_scratch(s, &m.bytes, groups * 4);
    m.sums = (int32_t *)part_of_scratch(s, &m.bytes, groups * 4);
    m.plain = part_of_scratch(s, &m.bytes, floats);
    m.tiles = part_of_scratch(s, &m.bytes, floats);
    m.results = (float *)part_of_scratch(s, &m.bytes, m.most_rows * larger(a->gate_up.outputs, a->down.outputs) * 4);
    return m;
}

/* The memory of the passes of all rows: as many rows at a time as MOST_PASS_BYTES hold, but one at least. */
static inline expert_memory memory_of_experts(const experts_arguments *a, int64_t align) {
    const int64_t enough = a->experts, fixed = memory_of_pass(a, align, enough).bytes; /* rows for each expert to have some */
    const int64_t one = larger(1, memory_of_pass(a, align, enough + 1).bytes - fixed), fit = enough + (MOST_PASS_BYTES - fixed) / one;
    const int64_t passes = (a->rows + larger(1, fit) - 1) / larger(1, fit);
    return memory_of_pass(a, align, larger(1, passes ? (a->rows + passes - 1) / passes : 1));
}

#endif
