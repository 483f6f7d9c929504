/* Causal attention of a ragged batch as a team function: the tasks of all sequences form one list, claimed one by
 * one. */
#ifndef ARMATURE_ATTENTION_TEAM_H
#define ARMATURE_ATTENTION_TEAM_H

#include <omp.h>

#include "attention_decode.h"
#include "attention_units.h"

#if ATTENTION_PANELS
#include "attention_panels.h"
#else
static int64_t prompt_tasks(const attention_arguments *a, const sequence *s) { return 0; }
static void attend_prompt(const attention_arguments *a, const sequence *s, int64_t task, const uint8_t *panels) {}
#endif

/* Whether prompts use panels that all threads share; else each task packs its own. */
static int in_panels(const attention_arguments *a) { return ATTENTION_PANELS && !a->wide && !in_registers(a->wide, a->head_dim); }

/* A position in the list: sequence i, whose tasks begin at `first` and whose scratch begins at `offset`. */
typedef struct {
    int64_t i, first, offset;
} cursor;

/* KV heads of one decode task: as many as leave two tasks per thread, or one if there is a single sequence, since the
 * keys and values of heads are adjacent. With two heads instead of one, a context of 144 tokens in four heads takes 0.89
 * of the time on two cores of Zen 2, and with four instead of two, one of 600 tokens 0.82. No result depends on it. */
static int64_t heads_together(const attention_arguments *a) {
    int64_t parts = 0, rows = 1, most = a->kv_heads, sequences = 0;
    for (int64_t i = 0; i < a->step->num_sequences; i++) {
        const sequence *s = &a->step->sequences[i];
        if (!is_decode(a, s)) continue;
        sequences++, parts += num_splits(a, s);
        if (s->num_tokens * group_size(a) > rows) rows = s->num_tokens * group_size(a);
    }
    if (TASK_ROWS / rows < most) most = TASK_ROWS / rows;
    const int64_t wanted = (sequences == 1 ? 1 : 2) * omp_get_num_threads();
    while (most > 1 && parts * ((a->kv_heads + most - 1) / most) < wanted) most = (most + 1) / 2;
    return most;
}

static int64_t tasks_of(const attention_arguments *a, const sequence *s, int64_t together) {
    if (!is_decode(a, s)) return in_panels(a) ? prompt_tasks(a, s) : prompt_unit_tasks(a, s);
    return num_splits(a, s) * ((a->kv_heads + together - 1) / together);
}

static void attention_task(const attention_arguments *a, const sequence *s, int64_t task, int64_t together, uint8_t *scratch) {
    if (!is_decode(a, s)) {
        if (in_panels(a)) attend_prompt(a, s, task, scratch);
        else attend_prompt_units(a, s, task);
        return;
    }
    const int64_t parts = (a->kv_heads + together - 1) / together, head = task % parts * together, left = a->kv_heads - head;
    decode(a, s, task / parts, head, left < together ? left : together, num_splits(a, s) == 1 ? NULL : (float *)scratch);
}

INLINE cursor end_of_list(const attention_arguments *a, int64_t together) {
    cursor at = {a->step->num_sequences, 0, 0};
    for (int64_t i = 0; i < at.i; i++) {
        at.first += tasks_of(a, &a->step->sequences[i], together);
        at.offset += scratch_of(a, &a->step->sequences[i], in_panels(a));
    }
    return at;
}

/* Threads claim tasks from the end of the list, where long prompts are. Each thread continues its search from its
 * last task. */
INLINE void move_back(cursor *at, const attention_arguments *a, int64_t task, int64_t together) {
    while (task < at->first) {
        const sequence *s = &a->step->sequences[--at->i];
        at->first -= tasks_of(a, s, together);
        at->offset -= scratch_of(a, s, in_panels(a));
    }
}

/* Merge the parts of long contexts, with the rows of each sequence divided among the threads. */
static void join_all(const attention_arguments *a) {
    uint8_t *scratch = a->step->scratch;
    for (int64_t i = 0; i < a->step->num_sequences; i++) {
        const sequence *s = &a->step->sequences[i];
        if (is_decode(a, s) && num_splits(a, s) > 1) {
#pragma omp for schedule(static) nowait
            for (int64_t row = 0; row < s->num_tokens * a->heads; row++) join(a, s, row, (const float *)scratch);
        }
        scratch += scratch_of(a, s, in_panels(a));
    }
#pragma omp barrier
}

static void attention(const void *arguments) {
    const attention_arguments *a = arguments;
    const int64_t together = heads_together(a);
    cursor at = end_of_list(a, together);
    const int64_t tasks = at.first;
    int joins = 0;
    for (int64_t i = 0; i < a->step->num_sequences; i++) joins |= is_decode(a, &a->step->sequences[i]) && num_splits(a, &a->step->sequences[i]) > 1;
#if ATTENTION_PANELS
    if (in_panels(a)) pack_panels(a);
#endif
#pragma omp for schedule(monotonic : dynamic, 1)
    for (int64_t claimed = 0; claimed < tasks; claimed++) {
        const int64_t task = tasks - 1 - claimed;
        move_back(&at, a, task, together);
        attention_task(a, &a->step->sequences[at.i], task - at.first, together, a->step->scratch + at.offset);
    }
    if (joins) join_all(a);
}

#endif
