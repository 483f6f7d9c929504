/* Attention of whole texts, end to end in one batch, without a cache: keys and values are read where a product wrote them. A task is some
 * queries of one text and all query heads that share a head of keys; it packs a block of keys and values into panels of its own, which stay in
 * its cache while all its queries meet them. Running maximum and sum, as in attention_decode.h. Products are of pairs of bf16 where the level
 * has them, else of fp32, into which bf16 is widened; softmax is fp32. A token's result depends on its own text alone. */
#ifndef ARMATURE_TEXTS_H
#define ARMATURE_TEXTS_H

#include <omp.h>

#include "tile_units.h"

#define TEXT_BLOCK 64     /* positions whose keys and values are in panels together */
#define TEXT_SUMS 24576   /* floats of weighted values that a task holds: queries times padded head */
#define TEXT_HEAD 256     /* elements of a head */

/* A task: rows are (query, query head) of one text and one head of keys. */
typedef struct {
    const texts_arguments *a;
    int64_t begin, end, kv_head, first_query, rows; /* the text's tokens are [begin, end) */
    uint32_t keys[TEXT_BLOCK * TEXT_HEAD], values[TEXT_BLOCK * TEXT_HEAD] __attribute__((aligned(64)));
    uint32_t tile[UNIT_ROWS * TEXT_HEAD] __attribute__((aligned(64)));
    float scores[UNIT_ROWS * TEXT_HEAD] __attribute__((aligned(64)));
    float maximum[TEXT_SUMS / 2 / LANES], total[TEXT_SUMS / 2 / LANES];
    float sums[TEXT_SUMS] __attribute__((aligned(64)));
} text_task;

INLINE int64_t text_group(const texts_arguments *a) { return a->heads / a->kv_heads; }
INLINE int64_t padded_head(const texts_arguments *a) { return (a->head_dim + PANEL_UNITS - 1) / PANEL_UNITS * PANEL_UNITS; }

/* Queries of a task at most: what sums have room for, and fewer where that would leave threads without work. */
static int64_t text_queries(const texts_arguments *a) {
    const int64_t tokens = a->texts->starts[a->texts->count], fit = TEXT_SUMS / padded_head(a) / text_group(a);
    const int64_t shared = tokens * a->kv_heads / (4 * omp_get_num_threads()) + 1, least = fit < 48 ? fit : 48;
    const int64_t most = shared < fit ? shared : fit;
    return most > least ? most : least;
}

/* Elements [0, head_dim) of the head `column` of a token, as units: pairs of bf16 as they lie, else fp32. */
INLINE void load_units(int kind, const texts_arguments *a, const void *rows, int64_t token, int64_t column, uint32_t *units) {
    const int64_t at = token * a->stride + column * a->head_dim;
    if (a->wide) memcpy(units, (const float *)rows + at, (size_t)a->head_dim * 4);
    else if (kind == UNIT_PAIRS) memcpy(units, (const uint16_t *)rows + at, (size_t)a->head_dim * 2);
    else
        for (int64_t i = 0; i < a->head_dim; i += LANES)
            vf_store_part((float *)units + i, bf16_load_part((const uint16_t *)rows + at + i, a->head_dim - i), a->head_dim - i);
}

INLINE int64_t units_of(int kind, int64_t elements) { return kind == UNIT_PAIRS ? elements / 2 : elements; }

/* Keys of positions [from, from + count) to panels [PANEL_UNITS positions][unit of head][position]; what is beyond count is zero. */
INLINE void pack_keys(int kind, text_task *t, int64_t from, int64_t count) {
    const int64_t units = units_of(kind, t->a->head_dim);
    uint32_t four[4][TEXT_HEAD];
    for (int64_t p = 0; p < (count + PANEL_UNITS - 1) / PANEL_UNITS * PANEL_UNITS; p += 4) {
        for (int64_t i = 0; i < 4; i++) {
            if (p + i < count) load_units(kind, t->a, t->a->key, t->begin + from + p + i, t->kv_head, four[i]);
            else memset(four[i], 0, sizeof four[i]);
        }
        uint32_t *target = t->keys + p / PANEL_UNITS * PANEL_UNITS * units + p % PANEL_UNITS;
        for (int64_t u = 0; u < units; u += 4) turn_four(four[0] + u, TEXT_HEAD * 4, units - u, target + u * PANEL_UNITS, PANEL_UNITS);
    }
}

/* Values likewise to panels [PANEL_UNITS elements][unit of positions][element]. */
INLINE void pack_values(int kind, text_task *t, int64_t from, int64_t count) {
    const int64_t size = t->a->head_dim, per = kind == UNIT_PAIRS ? 2 : 1, units = TEXT_BLOCK / per;
    uint32_t rows[2][TEXT_HEAD + PANEL_UNITS];
    memset(rows, 0, sizeof rows);
    for (int64_t p = 0; p < count; p += per) {
        for (int64_t i = 0; i < per; i++) {
            if (p + i < count) load_units(kind, t->a, t->a->value, t->begin + from + p + i, t->kv_head, rows[i]);
            else memset(rows[i], 0, sizeof rows[i]);
        }
        for (int64_t d = 0; d < size; d += PANEL_UNITS) {
            uint32_t *target = t->values + (d / PANEL_UNITS * units + p / per) * PANEL_UNITS;
            if (kind == UNIT_PAIRS) join_pairs((const uint16_t *)rows[0] + d, (const uint16_t *)rows[1] + d, target);
            else memcpy(target, rows[0] + d, PANEL_UNITS * 4);
        }
    }
}

/* What distance adds to the scores of a query at `position` with keys from `from` on, LANES of them. */
INLINE vf distance_bias(const texts_arguments *a, int64_t head, int64_t position, int64_t from) {
    const float *middle = a->bias + head * (2 * a->most + 1) + a->most;
    const int64_t first = from - position, last = first + LANES - 1;
    if (first >= -a->most && last <= a->most) return vf_load(middle + first);
    float part[LANES];
    for (int64_t i = 0; i < LANES; i++) part[i] = middle[first + i < -a->most ? -a->most : first + i > a->most ? a->most : first + i];
    return vf_load(part);
}

/* Dots of row r with `count` positions from `from` on to weights, units for the product with values; sums so far are put on the new maximum's scale. */
INLINE void weigh_text_row(int kind, text_task *t, int64_t row, int64_t from, int64_t count, float *scores, uint32_t *weights) {
    const texts_arguments *a = t->a;
    const int64_t group = text_group(a), position = t->first_query + row / group, head = t->kv_head * group + row % group;
    const int64_t low = position - a->before - from, high = position + a->after + 1 - from; /* seen: [low, high) of the block */
    vf largest = vf_all(-INFINITY), sum = vf_all(0);
    vi lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    for (int64_t p = 0; p < TEXT_BLOCK && p < count; p += LANES) {
        vf x = vf_load(scores + p) * (float)a->scale;
        if (a->softcap > 0) x = vf_tanh(x / (float)a->softcap) * (float)a->softcap;
        if (a->bias) x += distance_bias(a, head, position, from + p);
        if (low > p || high < p + LANES || count < p + LANES) {
            const int64_t end = high < count ? high : count, first = low - p < 0 ? 0 : low - p > LANES ? LANES : low - p;
            x = vf_select((lanes >= (int32_t)first) & (lanes < (int32_t)(end - p < 0 ? 0 : end - p > LANES ? LANES : end - p)), x, vf_all(-INFINITY));
        }
        largest = vf_max(x, largest);
        vf_store(scores + p, x);
    }
    const int64_t whole = (count + LANES - 1) / LANES * LANES;
    const float top = vf_largest(largest), before = t->maximum[row];
    if (high <= 0 || low >= count) { /* it sees nothing here */
        for (int64_t p = 0; p < whole; p += LANES) store_weights(kind, weights, p, vf_all(0));
        return;
    }
    if (top > before) {
        const float rescale = vf_exp(vf_all(before - top))[0];
        float *sums = t->sums + row * padded_head(a);
        for (int64_t i = 0; i < padded_head(a); i += LANES) vf_store(sums + i, vf_load(sums + i) * rescale);
        t->maximum[row] = top, t->total[row] *= rescale;
    }
    for (int64_t p = 0; p < whole; p += LANES) {
        const vf weight = exp_below(vf_load(scores + p) - t->maximum[row]);
        sum += weight;
        store_weights(kind, weights, p, weight);
    }
    t->total[row] += vf_sum(sum);
}

/* Rows [row, row + count) of the task against the block at `from`. */
INLINE void attend_tile(int kind, text_task *t, int64_t row, int count, int64_t from, int64_t positions) {
    const texts_arguments *a = t->a;
    const int64_t group = text_group(a), units = units_of(kind, a->head_dim), token_units = TEXT_BLOCK / (kind == UNIT_PAIRS ? 2 : 1);
    const int64_t used = kind == UNIT_PAIRS ? (positions + 1) / 2 : positions;
    for (int r = 0; r < count; r++)
        load_units(kind, a, a->query, t->begin + t->first_query + (row + r) / group, t->kv_head * group + (row + r) % group, t->tile + r * TEXT_HEAD);
    for (int64_t p = 0; p < positions; p += PANEL_UNITS)
        multiply_units(kind, count, 0, t->tile, TEXT_HEAD, t->keys + p * units, units, t->scores + p, TEXT_HEAD);
    for (int r = 0; r < count; r++) weigh_text_row(kind, t, row + r, from, positions, t->scores + r * TEXT_HEAD, t->tile + r * TEXT_HEAD);
    for (int64_t d = 0; d < a->head_dim; d += PANEL_UNITS)
        multiply_units(kind, count, 1, t->tile, TEXT_HEAD, t->values + d * token_units, used, t->sums + row * padded_head(a) + d, padded_head(a));
}

static void finish_text_rows(const text_task *t) {
    const texts_arguments *a = t->a;
    const int64_t group = text_group(a);
    for (int64_t row = 0; row < t->rows; row++) {
        const int64_t token = t->begin + t->first_query + row / group, at = token * a->out_stride + (t->kv_head * group + row % group) * a->head_dim;
        const float *sums = t->sums + row * padded_head(a);
        for (int64_t i = 0; i < a->head_dim; i += LANES) {
            const vf x = vf_load(sums + i) / t->total[row];
            if (a->wide) vf_store_part((float *)a->out + at + i, x, a->head_dim - i);
            else bf16_store_part((uint16_t *)a->out + at + i, x, a->head_dim - i);
        }
    }
}

INLINE void attend_text(int kind, text_task *t, int64_t queries) {
    const texts_arguments *a = t->a;
    const int64_t length = t->end - t->begin, last = t->first_query + queries - 1;
    const int64_t low = t->first_query > a->before ? t->first_query - a->before : 0, high = length - last > a->after ? last + a->after + 1 : length;
    t->rows = queries * text_group(a);
    for (int64_t row = 0; row < t->rows; row++) t->maximum[row] = -INFINITY, t->total[row] = 0;
    memset(t->sums, 0, (size_t)(t->rows * padded_head(a)) * 4);
    for (int64_t from = low / TEXT_BLOCK * TEXT_BLOCK; from < high; from += TEXT_BLOCK) {
        const int64_t positions = high - from < TEXT_BLOCK ? high - from : TEXT_BLOCK;
        pack_keys(kind, t, from, positions);
        pack_values(kind, t, from, positions);
        for (int64_t row = 0, count; row < t->rows; row += count) {
            const int64_t left = t->rows - row, tiles = (left + UNIT_ROWS - 1) / UNIT_ROWS;
            count = (left + tiles - 1) / tiles;
            attend_tile(kind, t, row, (int)count, from, positions);
        }
    }
    finish_text_rows(t);
}

INLINE int64_t tasks_of_text(const texts_arguments *a, int64_t i, int64_t queries) {
    return (a->texts->starts[i + 1] - a->texts->starts[i] + queries - 1) / queries * a->kv_heads;
}

static void texts(const void *arguments) {
    const texts_arguments *a = arguments;
    const int64_t queries = text_queries(a);
    int64_t tasks = 0, i = 0, first = 0; /* text i's tasks begin at `first` */
    text_task t;
    t.a = a;
    for (int64_t n = 0; n < a->texts->count; n++) tasks += tasks_of_text(a, n, queries);
#pragma omp for schedule(monotonic : dynamic, 1)
    for (int64_t task = 0; task < tasks; task++) {
        while (task >= first + tasks_of_text(a, i, queries)) first += tasks_of_text(a, i++, queries);
        t.begin = a->texts->starts[i], t.end = a->texts->starts[i + 1];
        const int64_t length = t.end - t.begin, chunks = (length + queries - 1) / queries, size = (length + chunks - 1) / chunks;
        t.kv_head = (task - first) % a->kv_heads, t.first_query = (task - first) / a->kv_heads * size;
        const int64_t left = length - t.first_query;
        if (left < 1) continue;
#if ATTENTION_PANELS
        if (!a->wide) {
            attend_text(UNIT_PAIRS, &t, left < size ? left : size);
            continue;
        }
#endif
        attend_text(UNIT_FP32, &t, left < size ? left : size);
    }
}

#endif
