/* A mixture of experts: the rows of a step are grouped by expert, and each expert that has rows multiplies them by its
 * packed weights, with the products of single weights (linear_*.h). Their tasks are numbered through all experts, so
 * that eight experts of a single row keep all threads busy. Every row has a sum of its own, in a fixed order, so a
 * result does not depend on threads, nor on other rows if the products do not. */
#ifndef ARMATURE_EXPERTS_H
#define ARMATURE_EXPERTS_H

#include "activate.h"
#include "experts_memory.h"
#include "linear_int.h"

#define SUM_PART 512 /* outputs of a row that a thread adds up */

/* ---- a pass: which expert has which rows ---- */

/* Group the experts of rows from `first` on: a stable order, so that an expert's rows ascend. */
INLINE void group_rows(const experts_arguments *a, const expert_memory *m, int64_t first, int64_t rows) {
    int64_t at = 0;
    m->pass->num_experts = 0;
    memset(m->counts, 0, (size_t)a->experts * sizeof *m->counts);
    for (int64_t i = 0; i < rows * a->k; i++) m->counts[a->ids[first * a->k + i]]++;
    for (int64_t e = 0, copy_row = 0; e < a->experts; e++) {
        const int64_t count = m->counts[e], step = count > MOST_COPY_ROWS ? MOST_COPY_ROWS : 2;
        if (!count) continue;
        m->counts[e] = m->pass->num_experts; /* its place from now on */
        expert_rows *x = m->experts + m->pass->num_experts++;
        x->expert = e, x->first = at, x->rows = 0, x->copy_row = copy_row;
        at += (count + TILE_ALIGN - 1) / TILE_ALIGN * TILE_ALIGN;
        copy_row += (count + step - 1) / step * step;
    }
    for (int64_t i = 0; i < rows * a->k; i++) {
        m->expert_of[i] = m->counts[a->ids[first * a->k + i]];
        expert_rows *x = m->experts + m->expert_of[i];
        m->rows_of[i] = x->first + x->rows++;
        m->source_of[m->rows_of[i]] = first + i / a->k;
    }
}

INLINE int64_t rows_together(int64_t rows) {
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, height = (rows + tiles - 1) / tiles;
    return (height + TILE_ALIGN - 1) / TILE_ALIGN * TILE_ALIGN;
}

/* Describe an expert's product. `tiles`: where its rows are copied as bf16. */
INLINE void describe_product(const expert_weights *w, const expert_memory *m, const expert_rows *x, uint8_t *tiles, expert_product *p) {
    (void)tiles;
    const uint8_t *panels = w->panels[x->expert];
    const float *bias = w->biases ? w->biases[x->expert] : NULL;
    float *y = m->results + x->first * w->outputs;
    const int64_t inputs = w->inputs;
    p->form = is_integer(w) && w->wide_from && x->rows >= w->wide_from ? FORM_BF16_PANELS : w->form;
    if (p->form == FORM_FP32_PANELS) {
        p->a.fp32 = (linear_fp32_arguments){
            .x = m->plain + x->first * inputs * 4, .panels = panels, .bias = bias, .tiles = (float *)m->tiles + x->first * ((inputs + 1) / 2 * 2), .y = y,
            .x_stride = inputs, .y_stride = w->outputs, .rows = x->rows, .inputs = inputs, .outputs = w->outputs, .output = OUTPUT_FP32,
            .narrow_panels = w->narrow_panels,
        };
        p->divided = divide_fp32(&p->a.fp32), p->tasks = p->divided.panel_tasks * p->divided.tile_tasks;
        return;
    }
#if BF16_PRODUCT
    if (p->form == FORM_BF16_PANELS) {
        p->a.bf16 = (linear_bf16_arguments){
            .x = (uint16_t *)m->plain + x->first * inputs, .panels = panels, .bias = bias, .tiles = (uint32_t *)(tiles + x->copy_row * ((inputs + 31) / 32 * 64)),
            .y = y, .x_stride = inputs, .y_stride = w->outputs, .rows = x->rows, .inputs = inputs, .outputs = w->outputs, .output = OUTPUT_FP32,
            .fixed = w->fixed, .bits = is_integer(w) ? w->form : 0, .group = w->group, .header = w->header,
        };
        p->divided = divide_bf16(&p->a.bf16), p->tasks = p->divided.panel_tasks * p->divided.tile_tasks;
        return;
    }
#endif
    const int64_t groups = expert_groups(w), padded = groups * w->group;
    p->a.integer = (linear_int_arguments){
        .panels = panels, .bias = bias, .tiles = m->codes + x->first * padded, .scales = m->scales + x->first * groups, .sums = m->sums + x->first * groups, .y = y,
        .y_stride = w->outputs, .rows = x->rows, .padded = padded, .outputs = w->outputs, .group = w->group, .height = rows_together(x->rows), .bits = w->form,
        .header = w->header, .output = OUTPUT_FP32, .shared = w->shared,
    };
    p->divided = divide_int(&p->a.integer);
    p->tasks = p->divided.panel_tasks * p->divided.tile_tasks;
}

INLINE int has_gates(const experts_arguments *a) { return a->gate_up.outputs > a->down.inputs; }

/* Describe both products of an expert. */
INLINE void describe_products(const experts_arguments *a, const expert_memory *m, expert_rows *x) {
    expert_product *up = x->products, *down = x->products + 1;
    up->gated = down->gated = 0;
    describe_product(&a->gate_up, m, x, m->tiles, up);
#ifdef GATED_PRODUCT
    describe_product(&a->down, m, x, m->plain, down);
    if (up->form != FORM_BF16_PANELS || down->form != FORM_BF16_PANELS || !has_gates(a) || !can_gate(&up->a.bf16)) return;
    up->gated = 1, up->tasks = gated_tasks(&up->a.bf16), up->divided.panels = 2;
#else
    describe_product(&a->down, m, x, m->tiles, down);
#endif
}

/* Bytes of the panels of a task, as they are read. */
INLINE int64_t task_bytes(const expert_product *p) {
    if (p->form == FORM_FP32_PANELS) return p->divided.panels * panel_bytes_fp32(&p->a.fp32);
#if BF16_PRODUCT
    if (p->form == FORM_BF16_PANELS) return p->divided.panels * ((p->a.bf16.inputs + 1) / 2 * PANEL_OUTPUTS * 4);
#endif
    return p->divided.panels * panel_bytes_int(&p->a.integer);
}

INLINE int64_t copies_of(const expert_product *p, int which) {
    if (p->form == FORM_FP32_PANELS) return copies_fp32(&p->a.fp32);
#ifdef GATED_PRODUCT /* the second product's rows are written into their copy at once */
    if (p->form == FORM_BF16_PANELS) return which ? 0 : gathers_of(&p->a.bf16);
#elif BF16_PRODUCT
    if (p->form == FORM_BF16_PANELS) return copies_bf16(&p->a.bf16);
#endif
    (void)which;
    return 0;
}

/* Number the copies and tasks of all experts. A thread claims about a megabyte of panels at a time, so that reading is
 * continuous, but there are at least eight claims per thread. */
INLINE void plan_pass(const experts_arguments *a, const expert_memory *m, int64_t first, int64_t rows) {
    expert_pass *pass = m->pass;
    group_rows(a, m, first, rows);
    for (expert_rows *x = m->experts; x < m->experts + pass->num_experts; x++) describe_products(a, m, x);
    for (int which = 0; which < 2; which++) {
        int64_t copies = 0, tasks = 0, chunk = MOST_EXPERTS;
        for (expert_rows *x = m->experts; x < m->experts + pass->num_experts; x++) {
            expert_product *p = x->products + which;
            const int64_t fit = (1 << 20) / task_bytes(p);
            chunk = p->divided.tile_tasks > 1 || fit < 1 ? 1 : fit < chunk ? fit : chunk;
            p->first_copy = copies, p->first_task = tasks;
            copies += copies_of(p, which), tasks += p->tasks;
        }
        const int64_t most = tasks / (8 * omp_get_num_threads());
        pass->num_copies[which] = copies, pass->num_tasks[which] = tasks;
        pass->chunk[which] = chunk < most ? chunk : most < 1 ? 1 : most;
    }
}

/* ---- products ---- */

/* Where the rows of an expert go that its product reads. */
INLINE sink input_of(const expert_product *p) {
    if (p->form == FORM_FP32_PANELS) return (sink){.wide = (float *)p->a.fp32.x};
#if BF16_PRODUCT
    if (p->form == FORM_BF16_PANELS) return (sink){.rows = (uint16_t *)p->a.bf16.x};
#endif
    const linear_int_arguments *i = &p->a.integer;
    return (sink){.tiles = (int8_t *)i->tiles, .scales = (float *)i->scales, .sums = (int32_t *)i->sums, .group = i->group, .height = i->height, .shared = i->shared};
}

/* Write part p of a row, for any form of the product that reads it. */
INLINE void emit_input(const expert_product *product, const sink *out, int64_t rows, int64_t size, part p, float *values) {
#ifdef GATED_PRODUCT
    if (product->form == FORM_BF16_PANELS) {
        copy_part(&product->a.bf16, p.row, p.from, p.count, values);
        return;
    }
#endif
    (void)product;
    emit(out, rows, size, p, values);
}

/* The rows of x to the experts that they go to. */
static void spread_rows(const experts_arguments *a, const expert_memory *m, int64_t first, int64_t rows) {
    float values[MOST_GROUP] __attribute__((aligned(64)));
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows * a->k; i++) {
        const expert_rows *e = m->experts + m->expert_of[i];
#ifdef GATED_PRODUCT
        if (e->products->form == FORM_BF16_PANELS) continue; /* gathered as copies */
#endif
        const sink out = input_of(e->products);
        const void *x = element_of(a->wide, a->x, (first + i / a->k) * a->x_stride);
        const float scale = a->scales_inputs ? a->weights[first + i] : 1.0f;
        for (int64_t at = 0, parts = parts_of(&out, a->gate_up.inputs); at < parts; at++) {
            part p = nth_part(&out, a->gate_up.inputs, at);
            for (int64_t n = 0; n < p.count; n += LANES) vf_store(values + n, row_load_part(a->wide, x, p.from + n, p.count - n) * scale);
            p.row = m->rows_of[i] - e->first;
            emit(&out, e->rows, a->gate_up.inputs, p, values);
        }
    }
}

/* act(gate) * up, or without gates act(up), of all rows for which no task has done that. */
static void gate_rows(const experts_arguments *a, const expert_memory *m, int64_t rows) {
    const int64_t size = a->down.inputs;
    float values[MOST_GROUP] __attribute__((aligned(64)));
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows * a->k; i++) {
        const expert_rows *e = m->experts + m->expert_of[i];
        if (e->products->gated) continue;
        const sink out = input_of(e->products + 1);
        const float *gate = m->results + m->rows_of[i] * a->gate_up.outputs;
        for (int64_t at = 0, parts = parts_of(&out, size); at < parts; at++) {
            part p = nth_part(&out, size, at);
#define GATE_EXPERT(WHICH) gate_values(WHICH, (gate_pair){gate + p.from, gate + size + p.from, 1, 1}, p.count, values)
#define ACTIVATE_EXPERT(WHICH) activate_values(WHICH, 1, gate + p.from, p.count, values)
            if (has_gates(a)) FOR_GATE(a->activation, GATE_EXPERT)
            else FOR_ACTIVATION(a->activation, ACTIVATE_EXPERT)
            p.row = m->rows_of[i] - e->first;
            emit_input(e->products + 1, &out, e->rows, size, p, values);
        }
    }
}

INLINE void copy_rows(const experts_arguments *a, const expert_memory *m, const expert_rows *x, int which, int64_t copy) {
    const expert_product *p = x->products + which;
    if (p->form == FORM_FP32_PANELS) copy_fp32(&p->a.fp32, copy);
#ifdef GATED_PRODUCT
    else gather_rows(&p->a.bf16, a->wide, a->x, a->x_stride, m->source_of + x->first, a->scales_inputs ? a->weights : NULL, copy);
#elif BF16_PRODUCT
    else copy_bf16(&p->a.bf16, copy);
#endif
    (void)a, (void)m;
}

INLINE void run_product(const experts_arguments *a, const expert_product *p, int64_t task, float *sums) {
#ifdef GATED_PRODUCT
    if (p->gated) {
        task_gated(&p->a.bf16, &p[1].a.bf16, a->activation, task);
        return;
    }
#endif
    (void)a;
    if (p->form == FORM_FP32_PANELS) task_fp32(&p->a.fp32, &p->divided, task);
#if BF16_PRODUCT
    else if (p->form == FORM_BF16_PANELS) task_bf16(&p->a.bf16, &p->divided, task);
#endif
    else run_task(&p->a.integer, &p->divided, task, sums);
}

/* One product of all experts. */
static void multiply_experts(const experts_arguments *a, const expert_memory *m, int which) {
    const expert_pass *pass = m->pass;
    const expert_rows *last = m->experts + pass->num_experts - 1, *x = m->experts;
    if (pass->num_copies[which]) {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < pass->num_copies[which]; i++) {
            for (x = x->products[which].first_copy > i ? m->experts : x; x < last && x[1].products[which].first_copy <= i;) x++;
            copy_rows(a, m, x, which, i - x->products[which].first_copy);
        }
    }
    const expert_rows *begun = NULL;
    const int chunk = (int)pass->chunk[which];
    float sums[TASK_SUMS] __attribute__((aligned(64)));
    x = m->experts;
#pragma omp for schedule(dynamic, chunk)
    for (int64_t i = 0; i < pass->num_tasks[which]; i++) {
        for (x = x->products[which].first_task > i ? m->experts : x; x < last && x[1].products[which].first_task <= i;) x++;
#if BF16_PRODUCT
        if (x != begun && x->products[which].form == FORM_BF16_PANELS) begin_bf16(&x->products[which].a.bf16), begun = x;
#endif
        run_product(a, x->products + which, i - x->products[which].first_task, sums);
    }
#if BF16_PRODUCT
    if (begun) end_bf16();
#endif
    (void)begun;
}

/* Add each row's experts, times their weights, to the residual stream. */
static void add_experts(const experts_arguments *a, const expert_memory *m, int64_t first, int64_t rows) {
    const int64_t size = a->down.outputs, parts = (size + SUM_PART - 1) / SUM_PART;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows * parts; i++) {
        const int64_t row = i / parts, from = i % parts * SUM_PART, to = from + SUM_PART < size ? from + SUM_PART : size;
        float *hidden = a->hidden + (first + row) * a->hidden_stride;
        for (int64_t n = from; n < to; n += LANES) {
            vf sum = vf_all(0);
            for (int64_t j = 0; j < a->k; j++)
                sum += (a->scales_inputs ? 1.0f : a->weights[(first + row) * a->k + j]) * vf_load_part(m->results + m->rows_of[row * a->k + j] * size + n, to - n);
            vf_store_part(hidden + n, vf_load_part(hidden + n, to - n) + sum, to - n);
        }
    }
}

static void experts(const void *arguments) {
    const experts_arguments *a = arguments;
    const expert_memory m = memory_of_experts(a, TILE_ALIGN);
    for (int64_t first = 0; first < a->rows; first += m.pass_rows) {
        const int64_t rows = a->rows - first < m.pass_rows ? a->rows - first : m.pass_rows;
#pragma omp single
        plan_pass(a, &m, first, rows);
        spread_rows(a, &m, first, rows);
        multiply_experts(a, &m, 0);
        gate_rows(a, &m, rows);
        multiply_experts(a, &m, 1);
        add_experts(a, &m, first, rows);
    }
}

#endif
