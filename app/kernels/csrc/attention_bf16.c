/* Causal attention of a ragged batch over bf16 keys and values that lie token by token in one or two segments a sequence.
 *
 * Two roads, chosen by a sequence's number of queries. Few (decode, attention_few.c) read keys and values as they lie: the bytes are the
 * cost. Many (prefill, attention_many.c) use panels. Both keep a running maximum and sum (online softmax: Milakov and Gimelshein,
 * arXiv 1805.02867), scores and sums in fp32. All sequences' tasks are claimed from one list, the long ones first.
 */
#include "attention_bf16.h"

#include <omp.h>
#include <stdlib.h>

#ifdef ARMATURE_X86

/* Heads of keys in one decode task: as many as leave two tasks a thread, since their keys and values lie together. */
static int64_t heads_together(const attention *a) {
    int64_t queries = 0, most = MAX_TASK_HEADS / group_of(a) < a->kv_heads ? MAX_TASK_HEADS / group_of(a) : a->kv_heads;
    for (int64_t i = 0; i < a->num_sequences; i++)
        if (!uses_panels(a, &a->sequences[i])) queries += a->sequences[i].num_tokens;
    while (most > 1 && queries * ((a->kv_heads + most - 1) / most) < 2 * omp_get_max_threads()) most = (most + 1) / 2;
    return most;
}

static int64_t tasks_of(const attention *a, const sequence *s, int64_t together) {
    if (!uses_panels(a, s)) return s->num_tokens * ((a->kv_heads + together - 1) / together);
    return (s->num_tokens + queries_together(a) - 1) / queries_together(a) * a->kv_heads;
}

static TARGET_BF16 void run_task(const attention *a, const sequence *s, int64_t task, int64_t together, const uint8_t *panels) {
    if (uses_panels(a, s)) {
        const int64_t kv_head = task % a->kv_heads;
        attend_many(a, s, task / a->kv_heads * queries_together(a), kv_head, panels + kv_head * panel_bytes(a, s));
    } else {
        const int64_t parts = (a->kv_heads + together - 1) / together, first = task % parts * together;
        attend_few(a, s, task / parts, first, a->kv_heads - first < together ? a->kv_heads - first : together);
    }
}

/* Scratch that `armature_attention_bf16` needs, bytes. */
EXPORT int64_t armature_attention_scratch(const attention *a) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < a->num_sequences; i++)
        if (uses_panels(a, &a->sequences[i])) bytes += a->kv_heads * panel_bytes(a, &a->sequences[i]);
    return bytes;
}

/* Returns 0, or 1 where memory for the list of tasks could not be had. */
EXPORT TARGET_BF16 int armature_attention_bf16(const attention *a) {
    int64_t *first_task = malloc((size_t)(a->num_sequences + 1) * 2 * sizeof *first_task), *offset = first_task + a->num_sequences + 1;
    if (!first_task) return 1;
    const int64_t together = heads_together(a);
    first_task[0] = offset[0] = 0;
    for (int64_t i = 0; i < a->num_sequences; i++) {
        const sequence *s = &a->sequences[i];
        first_task[i + 1] = first_task[i] + tasks_of(a, s, together);
        offset[i + 1] = offset[i] + (uses_panels(a, s) ? a->kv_heads * panel_bytes(a, s) : 0);
    }
#pragma omp parallel
    {
        for (int64_t i = 0; i < a->num_sequences; i++) {
            const sequence *s = &a->sequences[i];
            if (!uses_panels(a, s)) continue;
            const int64_t num_panels = (s->start + s->num_tokens + 127) / 128 * 4, first = first_seen(a, s->start) / 128 * 4;
#pragma omp for collapse(2) schedule(static) nowait
            for (int64_t kv_head = 0; kv_head < a->kv_heads; kv_head++)
                for (int64_t panel = first; panel < num_panels; panel++)
                    pack_context(a, s, kv_head, panel, a->scratch + offset[i] + kv_head * panel_bytes(a, s));
        }
#pragma omp barrier
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = first_task[a->num_sequences] - 1; task >= 0; task--) {
            int64_t low = 0, high = a->num_sequences; /* the sequence whose tasks hold this one */
            while (high - low > 1) {
                int64_t middle = (low + high) / 2;
                if (first_task[middle] <= task) low = middle;
                else high = middle;
            }
            run_task(a, &a->sequences[low], task - first_task[low], together, a->scratch + offset[low]);
        }
    }
    free(first_task);
    return 0;
}

#endif
