/* The top outputs of each row directly from the output product: a tile's logits are compared while they are in L1 and
 * never written. Outputs are divided into the same tasks for any number of threads and merged in order, so that a
 * result depends only on its row. */
#ifndef ARMATURE_PICK_H
#define ARMATURE_PICK_H

#include "linear_int.h"

/* A task's state of a row: its k best so far, the worst of them, and the running sum of e^(x - largest). */
typedef struct {
    float largest, sum, worst;
    int32_t broken; /* a NaN was seen */
} seen;

/* Scratch of one task and row: `seen`, then k ids of four bytes, then k values. */
INLINE uint8_t *place_of(const pick_arguments *a, int64_t task, int64_t row) {
    return (uint8_t *)a->scratch + (task * a->product.rows + row) * (int64_t)(sizeof(seen) + 8 * (size_t)a->k);
}

INLINE void insert(const pick_arguments *a, seen *s, float value, int64_t id) {
    int32_t *ids = (int32_t *)(s + 1);
    float *values = (float *)(ids + a->k);
    int64_t i = a->k - 1;
    if (!(value > values[i])) return; /* among equal values the lower id, which comes earlier, stays */
    for (; i > 0 && value > values[i - 1]; i--) values[i] = values[i - 1], ids[i] = ids[i - 1];
    values[i] = value, ids[i] = (int32_t)id;
    s->worst = values[a->k - 1];
}

INLINE void add_exponentials(seen *s, const float *x, int64_t outputs) {
    vf most = vf_all(-INFINITY), total = vf_all(0);
    for (int64_t i = 0; i < outputs; i++) most[0] = x[i] > most[0] ? x[i] : most[0];
    const float largest = most[0] > s->largest ? most[0] : s->largest;
    if (largest == -INFINITY) return;
    for (int64_t i = 0; i < outputs; i += LANES) {
        float part[LANES];
        for (int64_t j = 0; j < LANES; j++) part[j] = i + j < outputs ? x[i + j] : -INFINITY;
        total += vf_exp(vf_load(part) - largest);
    }
    const float shift = s->largest == -INFINITY ? 0.0f : vf_exp(vf_all(s->largest - largest))[0];
    s->sum = s->sum * shift + vf_sum(total);
    s->largest = largest;
}

/* The outputs of a panel that a row may take, one bit each. */
_Static_assert(PANEL_OUTPUTS == 32, "a panel's outputs have one word of bits");
INLINE uint32_t allowed_outputs(const pick_arguments *a, int64_t row, int64_t panel) { return a->allowed ? a->allowed[row * a->allowed_stride + panel] : UINT32_MAX; }

/* True if a row of this tile needs the panel's logits. */
INLINE int panel_is_needed(const pick_arguments *a, int64_t row, int64_t count, int64_t panel) {
    if (!a->allowed || a->logsumexp) return 1;
    for (int64_t r = 0; r < count; r++)
        if (allowed_outputs(a, row + r, panel)) return 1;
    return 0;
}

/* Logits of one row and panel, up to the number of outputs; `allowed` has a bit for each that may be selected. */
INLINE void look(const pick_arguments *a, seen *s, float *x, int64_t first, int64_t outputs, uint32_t allowed) {
    if (!allowed && !a->logsumexp) return;
    const linear_int_arguments *p = &a->product;
    vi better = vi_all(0), nan = vi_all(0);
    for (int64_t i = 0; i < PANEL_OUTPUTS; i += LANES) {
        vf logits = vf_load(x + i);
        if (p->bias && i < outputs) logits += vf_load_part(p->bias + first + i, outputs - i);
        if (a->softcap > 0) logits = (float)a->softcap * vf_tanh(logits / (float)a->softcap);
        vf_store(x + i, logits);
        better |= logits > s->worst;
        nan |= logits != logits;
    }
    if (a->logsumexp) add_exponentials(s, x, outputs);
    if (any_lane(nan)) s->broken = 1;
    if (!any_lane(better)) return;
    for (int64_t i = 0; i < outputs; i++)
        if (allowed >> i & 1) insert(a, s, x[i], first + i);
}

INLINE void start_row(const pick_arguments *a, seen *s) {
    int32_t *ids = (int32_t *)(s + 1);
    float *values = (float *)(ids + a->k);
    *s = (seen){-INFINITY, 0, -INFINITY, 0};
    for (int64_t i = 0; i < a->k; i++) values[i] = -INFINITY, ids[i] = 0;
}

INLINE void pick_task(const pick_arguments *a, int64_t task, int64_t panels, int64_t num_panels, float *sums) {
    const linear_int_arguments *p = &a->product;
    const ptrdiff_t bytes = panel_bytes_int(p);
    for (int64_t row = 0; row < p->rows; row++) start_row(a, (seen *)place_of(a, task, row));
    const int64_t end = (task + 1) * panels < num_panels ? (task + 1) * panels : num_panels;
    int64_t panel = task * panels;
#if STREAMS > 1
    for (; are_streams(p, STREAMS) && (!a->allowed || a->logsumexp) && panel + STREAMS <= end; panel += STREAMS) {
        const int count = (int)p->rows;
        multiply_streams(p, p->panels + panel * bytes, count, sums);
        for (int64_t i = 0; i < STREAMS * count; i++) {
            const int64_t row = i % count, first = (panel + i / count) * PANEL_OUTPUTS, outputs = p->outputs - first;
            look(a, (seen *)place_of(a, task, row), sums + i * PANEL_OUTPUTS, first, outputs < PANEL_OUTPUTS ? outputs : PANEL_OUTPUTS,
                 allowed_outputs(a, row, panel + i / count));
        }
    }
#endif
    for (; panel < end; panel++)
        for (int64_t row = 0; row < p->rows; row += p->height) {
            const uint8_t *weights = p->panels + panel * bytes;
            const int64_t left = p->rows - row, first = panel * PANEL_OUTPUTS, outputs = p->outputs - first;
            const int count = (int)(left < p->height ? left : p->height);
            if (!panel_is_needed(a, row, count, panel)) continue;
            multiply_panel(p, weights, row, count, p->rows <= p->height ? weights + AHEAD(count) : row == 0 ? weights + bytes : NULL, sums);
            for (int r = 0; r < count; r++)
                look(a, (seen *)place_of(a, task, row + r), sums + r * PANEL_OUTPUTS, first, outputs < PANEL_OUTPUTS ? outputs : PANEL_OUTPUTS,
                     allowed_outputs(a, row + r, panel));
        }
}

INLINE void merge(const pick_arguments *a, int64_t row, int64_t tasks) {
    seen *all = (seen *)place_of(a, 0, row);
    for (int64_t task = 1; task < tasks; task++) {
        const seen *s = (const seen *)place_of(a, task, row);
        const int32_t *ids = (const int32_t *)(s + 1);
        const float *values = (const float *)(ids + a->k);
        for (int64_t i = 0; i < a->k; i++) insert(a, all, values[i], ids[i]);
        all->broken |= s->broken;
        if (s->largest == -INFINITY) continue;
        const float largest = s->largest > all->largest ? s->largest : all->largest;
        all->sum = all->sum * (all->largest == -INFINITY ? 0.0f : expf(all->largest - largest)) + s->sum * expf(s->largest - largest);
        all->largest = largest;
    }
    const int32_t *ids = (const int32_t *)(all + 1);
    for (int64_t i = 0; i < a->k; i++) a->ids[row * a->k + i] = ids[i];
    memcpy(a->values + row * a->k, ids + a->k, (size_t)a->k * 4);
    if (all->broken) a->values[row * a->k] = NAN;
    if (a->logsumexp) a->logsumexp[row] = all->broken ? NAN : all->largest + logf(all->sum);
}

static void pick(const void *arguments) {
    const pick_arguments *a = arguments;
    const int64_t num_panels = (a->product.outputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS, panels = (num_panels + PICK_TASKS - 1) / PICK_TASKS;
    const int64_t tasks = (num_panels + panels - 1) / panels;
    float sums[TASK_SUMS] __attribute__((aligned(64)));
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < tasks; task++) pick_task(a, task, panels, num_panels, sums);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a->product.rows; row++) merge(a, row, tasks);
}

#endif
