/* Prompts on levels without bf16 products, and from fp32 caches on every level: many queries of one sequence, with the
 * products and the softmax of whole texts (texts.h). A task converts a block of cached keys and values to rows, packs
 * them into its private panels, and uses them for all its queries. Blocks begin at multiples of their size, so a
 * query's result depends neither on the other queries nor on the number of threads. */
#ifndef ARMATURE_ATTENTION_UNITS_H
#define ARMATURE_ATTENTION_UNITS_H

#include "attention.h"
#include "texts.h"

#define UNBOUNDED (1ll << 40) /* more than any context has */

/* Some queries of one sequence and all query heads of one KV head. `cached` describes `rows`: one head of a block's
 * keys, then of its values, one after the other. */
typedef struct {
    text_task text;
    texts_arguments queries, cached;
    float rows[TEXT_ROOM + 2 * LANES] __attribute__((aligned(64)));
} prompt_task;

/* The most queries of a task: as many as its sums have room for, and fewer if threads would have no work. */
static int64_t prompt_queries(const attention_arguments *a, const sequence *s) {
    const int64_t fit = TEXT_SUMS / ((a->head_dim + PANEL_UNITS - 1) / PANEL_UNITS * PANEL_UNITS) / group_size(a);
    const int64_t shared = s->num_tokens * a->kv_heads / (4 * omp_get_num_threads()) + 1, least = fit < 48 ? fit : 48;
    const int64_t most = shared < fit ? shared : fit;
    return most > least ? most : least;
}

static int64_t prompt_unit_tasks(const attention_arguments *a, const sequence *s) {
    return (s->num_tokens + prompt_queries(a, s) - 1) / prompt_queries(a, s) * a->kv_heads;
}

/* One head of cached keys or values at positions [from, from + count) to rows, fp32 or, for pairs, bf16. */
INLINE void convert_heads(int kind, prompt_task *t, const attention_arguments *a, const sequence *s, int64_t kv_head, int values, int64_t from, int64_t count) {
    const uint8_t *base = values ? a->kv.values : a->kv.keys, *scales = values ? a->kv.value_scales : a->kv.key_scales;
    const int64_t size = a->head_dim, bytes = scales ? 1 : a->wide ? 4 : 2;
    for (int64_t p = 0; p < count; p++) {
        const int64_t row = row_at(a, s, from + p);
        const uint8_t *head = base + row + kv_head * size * bytes;
        void *to = element_of(kind == UNIT_FP32, t->rows, p * size);
        if (!scales) {
            for (int64_t i = 0; i < size; i += LANES) row_store_part(kind == UNIT_FP32, to, i, row_load_part(a->wide, head, i, size - i), size - i);
            continue;
        }
        float scale;
        memcpy(&scale, scales + row + 4 * kv_head, 4);
        for (int64_t i = 0; i < size; i += 2 * LANES) {
            const int64_t left = size - i;
            int8_t codes[2 * LANES < 16 ? 16 : 2 * LANES] = {0};
            vf x[2];
            memcpy(codes, head + i, (size_t)(left < 2 * LANES ? left : 2 * LANES));
            bytes_load(codes, x);
            for (int v = 0; v < 2 && v * LANES < left; v++) row_store_part(kind == UNIT_FP32, to, i + v * LANES, x[v] * scale, left - v * LANES);
        }
    }
}

/* Pack the keys and values of positions [from, from + count). */
INLINE void pack_block(int kind, prompt_task *t, const attention_arguments *a, const sequence *s, int64_t from, int64_t count) {
    const int64_t begin = t->text.begin, kv_head = t->text.kv_head;
    t->text.a = &t->cached, t->text.begin = -from, t->text.kv_head = 0; /* position `from` is row 0 of a single head */
    convert_heads(kind, t, a, s, kv_head, 0, from, count);
    pack_keys(kind, &t->text, from, count);
    convert_heads(kind, t, a, s, kv_head, 1, from, count);
    pack_values(kind, &t->text, from, count);
    t->text.a = &t->queries, t->text.begin = begin, t->text.kv_head = kv_head;
}

INLINE void attend_queries(int kind, prompt_task *t, const attention_arguments *a, const sequence *s, int64_t queries) {
    text_task *text = &t->text;
    const int64_t group = group_size(a), block = text_block(&t->queries), low = first_seen(a, text->first_query), high = text->first_query + queries;
    text->rows = queries * group;
    begin_text_rows(text);
    pack_queries(kind, text);
    for (int64_t from = low / block * block; from < high; from += block) {
        const int64_t positions = high - from < block ? high - from : block;
        pack_block(kind, t, a, s, from, positions);
        for (int64_t row = 0, count; row < text->rows; row += count) {
            count = rows_of_tile(kind, text, row);
            const int64_t seen = text->first_query + (row + count - 1) / group + 1 - from; /* by the tile's last query */
            if (seen > 0) attend_tile(kind, text, row, (int)count, from, seen < positions ? seen : positions);
        }
    }
    finish_text_rows(text);
}

static __attribute__((noinline)) void attend_prompt_units(const attention_arguments *a, const sequence *s, int64_t task) {
    const int64_t most = prompt_queries(a, s), chunks = (s->num_tokens + most - 1) / most, size = (s->num_tokens + chunks - 1) / chunks;
    const int64_t first = task / a->kv_heads * size, left = s->num_tokens - first;
    prompt_task t;
    if (left < 1) return;
    t.queries = (texts_arguments){
        .query = a->query, .out = a->out, .stride = a->query_stride, .out_stride = a->out_stride, .heads = a->heads, .kv_heads = a->kv_heads,
        .head_dim = a->head_dim, .before = a->window > 0 ? a->window - 1 : UNBOUNDED, .wide = a->wide, .scale = a->scale, .softcap = a->softcap,
        .sinks = a->sinks, .slopes = a->slopes,
    };
    t.cached = (texts_arguments){.key = t.rows, .value = t.rows, .stride = a->head_dim, .heads = 1, .kv_heads = 1, .head_dim = a->head_dim};
    t.text.a = &t.queries, t.text.kv_head = task % a->kv_heads;
    t.text.first_query = s->start + first; /* a position, so that batch row = begin + position */
    t.text.begin = s->first - s->start;
#define ATTEND_QUERIES(KIND) \
    (t.cached.wide = (KIND) == UNIT_FP32, attend_queries(KIND, &t, a, s, left < size ? left : size))
    FOR_UNITS(a->wide, a->head_dim, ATTEND_QUERIES);
}

#endif
