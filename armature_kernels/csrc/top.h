/* The top elements of each row of logits that a product has written, as pick.h takes them from a product of integers.
 * For forms whose product has no such epilogue: writing and reading logits is little beside reading the weights. Rows
 * are divided into the same parts for any number of threads, so that a result depends only on its row. */
#ifndef ARMATURE_TOP_H
#define ARMATURE_TOP_H

#include "pick.h"

/* Look at panels [first, last) of a row. */
INLINE void top_part(const top_arguments *a, const pick_arguments *p, seen *s, int64_t row, int64_t first, int64_t last) {
    float x[PANEL_OUTPUTS] __attribute__((aligned(64)));
    start_row(p, s);
    for (int64_t at = first * PANEL_OUTPUTS; at < last * PANEL_OUTPUTS && at < a->outputs; at += PANEL_OUTPUTS) {
        const int64_t left = a->outputs - at, count = left < PANEL_OUTPUTS ? left : PANEL_OUTPUTS;
        if (!panel_is_needed(p, row, 1, at / PANEL_OUTPUTS)) continue;
        for (int64_t i = 0; i < PANEL_OUTPUTS; i += LANES) vf_store(x + i, i < count ? vf_load_part(a->logits + row * a->stride + at + i, count - i) : vf_all(0));
        look(p, s, x, at, count, allowed_outputs(p, row, at / PANEL_OUTPUTS));
    }
}

static void top(const void *arguments) {
    const top_arguments *a = arguments;
    const pick_arguments p = {
        .product = {.rows = a->rows, .outputs = a->outputs}, .values = a->values, .ids = a->ids, .logsumexp = a->logsumexp, .scratch = a->scratch, .allowed = a->allowed, .k = a->k,
        .allowed_stride = a->allowed_stride, .softcap = a->softcap,
    };
    const int64_t num_panels = (a->outputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS, panels = (num_panels + PICK_TASKS - 1) / PICK_TASKS;
    const int64_t tasks = (num_panels + panels - 1) / panels;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < a->rows * tasks; i++) {
        const int64_t row = i / tasks, task = i % tasks;
        top_part(a, &p, (seen *)place_of(&p, task, row), row, task * panels, (task + 1) * panels);
    }
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a->rows; row++) merge(&p, row, tasks);
}

#endif
