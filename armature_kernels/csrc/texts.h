/* Attention of whole texts, stored one after the other in one batch, without a cache: keys and values are read where
 * a product wrote them. A task is some queries of one text and all query heads that share a KV head. It packs a block
 * of keys and values into private panels, which stay in its cache while all its queries use them. Running maximum and
 * sum, as in attention_decode.h. Products are of pairs of bf16 if the level has them, else of fp32, to which bf16 is
 * widened. Softmax is fp32. A token's result depends only on its text. */
#ifndef ARMATURE_TEXTS_H
#define ARMATURE_TEXTS_H

#include <omp.h>

#include "tile_units.h"

#define TEXT_BLOCK 256    /* maximum positions whose keys and values are in panels together */
#define TEXT_PANELS 16384 /* elements of keys, and of values, in panels together, so that they stay in L2, but for large heads */
#define TEXT_SUMS 32768   /* floats of weighted values per task: queries times padded head */
#define TEXT_HEAD 512     /* maximum elements of a head */
#define LEAST_BLOCK 64    /* positions in panels together, whatever the head */
#define TEXT_ROOM (LEAST_BLOCK * TEXT_HEAD)
#define TEXT_ROW (TEXT_BLOCK + 16) /* scores of a row; rows at a distance of a power of two would share the same sets of L1 */

/* A task: rows are (query, query head) of one text and one KV head. */
typedef struct {
    const texts_arguments *a;
    int64_t begin, end, kv_head, first_query, rows; /* the text's tokens are [begin, end) */
    uint32_t keys[TEXT_ROOM] __attribute__((aligned(64)));
    uint32_t values[TEXT_ROOM] __attribute__((aligned(64)));
    uint32_t queries[TEXT_SUMS] __attribute__((aligned(64))); /* tile after tile, for each unit all rows; UNIT_TILES: row after row */
    float scores[MOST_UNIT_ROWS * TEXT_ROW] __attribute__((aligned(64))); /* a tile's scores, then its weights, row after row */
    float maximum[TEXT_SUMS / 2 / LANES], total[TEXT_SUMS / 2 / LANES];
    float sums[TEXT_SUMS + MOST_UNIT_ROWS * TEXT_HEAD] __attribute__((aligned(64)));
} text_task;

INLINE int64_t text_group(const texts_arguments *a) { return a->heads / a->kv_heads; }
INLINE int64_t padded_head(const texts_arguments *a) { return (a->head_dim + PANEL_UNITS - 1) / PANEL_UNITS * PANEL_UNITS; }

/* Maximum queries of a task: limited by the capacity of sums, and fewer if threads would have no work. */
static int64_t text_queries(const texts_arguments *a) {
    const int64_t tokens = a->texts->starts[a->texts->count], fit = TEXT_SUMS / padded_head(a) / text_group(a);
    const int64_t shared = tokens * a->kv_heads / (4 * omp_get_num_threads()) + 1, least = fit < 48 ? fit : 48;
    const int64_t most = shared < fit ? shared : fit;
    return most > least ? most : least;
}

/* Positions of a block: a multiple of PANEL_UNITS. */
INLINE int64_t text_block(const texts_arguments *a) {
    const int64_t fit = TEXT_PANELS / padded_head(a) / LEAST_BLOCK * LEAST_BLOCK;
    return fit < LEAST_BLOCK ? LEAST_BLOCK : fit < TEXT_BLOCK ? fit : TEXT_BLOCK;
}

INLINE int64_t units_of(int kind, int64_t elements) { return kind == UNIT_FP32 ? elements : elements / 2; }

/* Address of the head `column` of a token. */
INLINE const void *head_of(const texts_arguments *a, const void *rows, int64_t token, int64_t column) {
    return (const char *)rows + (token * a->stride + column * a->head_dim) * (a->wide ? 4 : 2);
}

/* LANES units of a head from unit u on, of which `left` remain: pairs of bf16 in place, else fp32. */
INLINE vf load_units(int kind, const texts_arguments *a, const void *head, int64_t u, int64_t left) {
    if (a->wide || kind != UNIT_FP32) return vf_load_part((const float *)head + u, left);
    return bf16_load_part((const uint16_t *)head + u, left);
}

/* Transpose four heads: unit u of head i goes to to[u * stride + i]. NULL heads are zeros. */
INLINE void turn_heads(int kind, const texts_arguments *a, const void *const *heads, uint32_t *to, int64_t stride) {
    const int64_t units = units_of(kind, a->head_dim);
    for (int64_t u = 0; u < units; u += LANES) {
        vf four[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) four[i] = heads[i] ? load_units(kind, a, heads[i], u, units - u) : vf_all(0);
        for (int64_t part = 0; part < LANES && u + part < units; part += 4)
            turn_four((const float *)four + part, sizeof *four, units - u - part, to + (u + part) * stride, stride);
    }
}

/* Keys of positions [from, from + count) to panels [PANEL_UNITS positions][unit of head][position]; positions beyond
 * count are zero. */
INLINE void pack_keys(int kind, text_task *t, int64_t from, int64_t count) {
    const int64_t units = units_of(kind, t->a->head_dim);
    for (int64_t p = 0; p < (count + PANEL_UNITS - 1) / PANEL_UNITS * PANEL_UNITS; p += 4) {
        const void *heads[4];
        for (int64_t i = 0; i < 4; i++) heads[i] = p + i < count ? head_of(t->a, t->a->key, t->begin + from + p + i, t->kv_head) : NULL;
        turn_heads(kind, t->a, heads, t->keys + p / PANEL_UNITS * PANEL_UNITS * units + p % PANEL_UNITS, PANEL_UNITS);
    }
}

/* Positions of a block as they are multiplied with values: registers have 16 pairs, the others zeros. */
INLINE int64_t padded_positions(int kind, int64_t count) { return kind == UNIT_TILES ? (count + 2 * TILE_UNITS - 1) / (2 * TILE_UNITS) * (2 * TILE_UNITS) : count; }

/* Values of the same positions to panels [PANEL_UNITS elements][unit of positions][element]. */
INLINE void pack_values(int kind, text_task *t, int64_t from, int64_t count) {
    const int64_t size = t->a->head_dim, units = units_of(kind, text_block(t->a));
    for (int64_t p = 0; p < padded_positions(kind, count); p += kind == UNIT_FP32 ? 1 : 2) {
        const void *even = p < count ? head_of(t->a, t->a->value, t->begin + from + p, t->kv_head) : NULL;
        const void *odd = p + 1 < count ? head_of(t->a, t->a->value, t->begin + from + p + 1, t->kv_head) : NULL;
        for (int64_t d = 0; d < size; d += LANES) {
            uint32_t *target = t->values + (d / PANEL_UNITS * units + units_of(kind, p)) * PANEL_UNITS + d % PANEL_UNITS;
            if (kind != UNIT_FP32) join_pairs(even ? (const uint16_t *)even + d : NULL, odd ? (const uint16_t *)odd + d : NULL, size - d, target);
            else vf_store((float *)target, load_units(kind, t->a, even, d, size - d));
        }
        if (size % PANEL_UNITS && size % PANEL_UNITS <= LANES) /* the panel's other half */
            vf_store((float *)t->values + (size / PANEL_UNITS * units + units_of(kind, p)) * PANEL_UNITS + LANES, vf_all(0));
    }
}

/* The relative position bias of a query at `position` and LANES keys from `from` on. */
INLINE vf distance_bias(const texts_arguments *a, int64_t head, int64_t position, int64_t from) {
    const float *middle = a->bias + head * (2 * a->most + 1) + a->most;
    const int64_t first = from - position, last = first + LANES - 1;
    if (first >= -a->most && last <= a->most) return vf_load(middle + first);
    float part[LANES];
    for (int64_t i = 0; i < LANES; i++) part[i] = middle[first + i < -a->most ? -a->most : first + i > a->most ? a->most : first + i];
    return vf_load(part);
}

/* Rows of the tile that begins at `row`: all are as equal as possible, but those of registers full except the last. */
INLINE int64_t rows_of_tile(int kind, const text_task *t, int64_t row) {
    const int64_t left = t->rows - row, tiles = (left + unit_rows(kind) - 1) / unit_rows(kind);
    if (kind == UNIT_TILES) return left < unit_rows(kind) ? left : unit_rows(kind);
    return (left + tiles - 1) / tiles;
}

/* The head of row `row` of the task. */
INLINE const void *query_of(const text_task *t, int64_t row) {
    const int64_t group = text_group(t->a);
    return head_of(t->a, t->a->query, t->begin + t->first_query + row / group, t->kv_head * group + row % group);
}

/* Copy queries row after row; the rows of the last register are filled with zeros. */
INLINE void copy_queries(text_task *t) {
    const int64_t units = t->a->head_dim / 2;
    for (int64_t row = 0; row < (t->rows + MOST_UNIT_ROWS - 1) / MOST_UNIT_ROWS * MOST_UNIT_ROWS; row++)
        if (row < t->rows) memcpy(t->queries + row * units, query_of(t, row), (size_t)units * 4);
        else memset(t->queries + row * units, 0, (size_t)units * 4);
}

/* Pack queries into tiles, four rows at a time. */
INLINE void pack_queries(int kind, text_task *t) {
    const texts_arguments *a = t->a;
    const int64_t units = units_of(kind, a->head_dim);
    uint32_t last[4 * TEXT_HEAD];
    if (kind == UNIT_TILES) {
        copy_queries(t);
        return;
    }
    for (int64_t row = 0, count; row < t->rows; row += count) {
        count = rows_of_tile(kind, t, row);
        for (int64_t r = 0; r < count; r += 4) {
            const void *heads[4];
            uint32_t *target = t->queries + row * units + r;
            for (int64_t i = 0; i < 4; i++) heads[i] = r + i < count ? query_of(t, row + r + i) : NULL;
            if (r + 4 <= count) {
                turn_heads(kind, a, heads, target, count);
                continue;
            }
            turn_heads(kind, a, heads, last, 4);
            for (int64_t u = 0; u < units; u++)
                for (int64_t i = 0; i < count - r; i++) target[u * count + i] = last[u * 4 + i];
        }
    }
}

#define LOG2_E 1.44269504088896341f

/* Turn the dot products of a row (a query at `position` and its `head`) with `count` positions from `from` on into
 * logarithms of weights, base 2; -infinity for positions that it does not see. Return the largest. */
INLINE float finish_scores_of(int kind, const texts_arguments *a, int64_t head, int64_t position, int64_t from, int64_t count, float *scores) {
    const int64_t low = position - a->before - from, high = position + a->after + 1 - from; /* visible: [low, high) of the block */
    const int plain = a->softcap <= 0 && !a->bias && !a->slopes;
    const float factor = plain ? (float)a->scale * LOG2_E : (float)a->scale;
    vf most = vf_all(-INFINITY);
    vi lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    for (int64_t p = 0; p < padded_positions(kind, count); p += LANES) {
        vf x = vf_load(scores + p) * factor;
        if (!plain) {
            if (a->softcap > 0) x = vf_tanh(x / (float)a->softcap) * (float)a->softcap;
            if (a->bias) x += distance_bias(a, head, position, from + p);
            if (a->slopes) x += a->slopes[head] * __builtin_convertvector(lanes + (int32_t)(from + p - position), vf);
            x *= LOG2_E;
        }
        if (low > p || high < p + LANES || count < p + LANES) {
            const int64_t end = high < count ? high : count, first = low - p < 0 ? 0 : low - p > LANES ? LANES : low - p;
            x = vf_select((lanes >= (int32_t)first) & (lanes < (int32_t)(end - p < 0 ? 0 : end - p > LANES ? LANES : end - p)), x, vf_all(-INFINITY));
        }
        most = vf_max(x, most);
        vf_store(scores + p, x);
    }
    return vf_largest(most);
}

/* Turn logarithms of `count` weights into weights, in units for the product with values. Return their sum. */
INLINE float weigh_scores(int kind, float *scores, int64_t count, float maximum) {
    vf sum = vf_all(0);
    for (int64_t p = 0; p < padded_positions(kind, count); p += LANES) {
        const vf weight = exp2_below(vf_load(scores + p) - maximum);
        sum += weight;
        store_weights(kind, (uint32_t *)scores, p, weight);
    }
    return vf_sum(sum);
}

/* Turn a tile's dot products with `count` positions from `from` on into weights, and rescale earlier sums to the new
 * maximum. */
INLINE void weigh_tile(int kind, text_task *t, int64_t row, int rows, int64_t from, int64_t count) {
    const texts_arguments *a = t->a;
    const int64_t group = text_group(a), size = padded_head(a);
    int64_t position = t->first_query + row / group, member = row % group;
    for (int r = 0; r < rows; r++, row++) {
        float *scores = t->scores + r * TEXT_ROW, *sums = t->sums + row * size;
        const float top = finish_scores_of(kind, a, t->kv_head * group + member, position, from, count, scores), before = t->maximum[row];
        if (position - a->before >= from + count || position + a->after < from) { /* it sees nothing here */
            memset(scores, 0, TEXT_BLOCK * sizeof *scores);
        } else {
            if (top > before) {
                const float rescale = exp2_below(vf_all(before - top))[0];
                for (int64_t i = 0; i < size; i += LANES) vf_store(sums + i, vf_load(sums + i) * rescale);
                t->maximum[row] = top, t->total[row] *= rescale;
            }
            t->total[row] += weigh_scores(kind, scores, count, t->maximum[row]);
        }
        if (++member == group) member = 0, position++;
    }
}

/* Process rows [row, row + count) of the task with the block at `from`. */
INLINE void attend_tile(int kind, text_task *t, int64_t row, int count, int64_t from, int64_t positions) {
    const texts_arguments *a = t->a;
    const int64_t units = units_of(kind, a->head_dim), block = units_of(kind, text_block(a));
    const int64_t used = units_of(kind, kind == UNIT_PAIRS ? positions + 1 : padded_positions(kind, positions));
    multiply_panels(kind, count, 0, t->queries + row * units, kind == UNIT_TILES ? units : 0, t->keys, units, units, positions, t->scores, TEXT_ROW);
    weigh_tile(kind, t, row, count, from, positions);
    multiply_panels(kind, count, 1, (const uint32_t *)t->scores, TEXT_ROW, t->values, block, used, a->head_dim, t->sums + row * padded_head(a), padded_head(a));
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

/* Begin the softmax of all rows. A sink counts as a first position whose value is zero. */
INLINE void begin_text_rows(text_task *t) {
    const texts_arguments *a = t->a;
    const int64_t group = text_group(a);
    for (int64_t row = 0; row < t->rows; row++) {
        t->maximum[row] = a->sinks ? a->sinks[t->kv_head * group + row % group] * LOG2_E : -INFINITY;
        t->total[row] = a->sinks ? 1 : 0;
    }
    memset(t->sums, 0, (size_t)(t->rows * padded_head(a)) * 4);
}

INLINE void attend_text(int kind, text_task *t, int64_t queries) {
    const texts_arguments *a = t->a;
    const int64_t block = text_block(a), length = t->end - t->begin, last = t->first_query + queries - 1;
    const int64_t low = t->first_query > a->before ? t->first_query - a->before : 0, high = length - last > a->after ? last + a->after + 1 : length;
    t->rows = queries * text_group(a);
    begin_text_rows(t);
    pack_queries(kind, t);
    for (int64_t from = low / block * block; from < high; from += block) {
        const int64_t positions = high - from < block ? high - from : block;
        pack_keys(kind, t, from, positions);
        pack_values(kind, t, from, positions);
        for (int64_t row = 0, count; row < t->rows; row += count) {
            count = rows_of_tile(kind, t, row);
            attend_tile(kind, t, row, (int)count, from, positions);
        }
    }
    finish_text_rows(t);
}

/* Whether registers multiply the heads: their rows have 16 pairs. */
INLINE int in_registers(int64_t wide, int64_t head_dim) { return AMX_TILES && !wide && head_dim % (2 * TILE_UNITS) == 0; }

/* Attend with the kind of units that the level and the heads allow. */
#if AMX_TILES
#define FOR_UNITS(WIDE, HEAD_DIM, CALL)       \
    if (in_registers(WIDE, HEAD_DIM)) {       \
        use_rows(AMX_ROWS);                   \
        CALL(UNIT_TILES);                     \
        tile_release();                       \
    } else if (!(WIDE)) CALL(UNIT_PAIRS);     \
    else CALL(UNIT_FP32)
#elif BF16_UNITS
#define FOR_UNITS(WIDE, HEAD_DIM, CALL)  \
    if (!(WIDE)) CALL(UNIT_PAIRS);       \
    else CALL(UNIT_FP32)
#else
#define FOR_UNITS(WIDE, HEAD_DIM, CALL) CALL(UNIT_FP32)
#endif

INLINE int64_t tasks_of_text(const texts_arguments *a, int64_t i, int64_t queries) {
    return (a->texts->starts[i + 1] - a->texts->starts[i] + queries - 1) / queries * a->kv_heads;
}

static void texts(const void *arguments) {
    const texts_arguments *a = arguments;
    const int64_t queries = text_queries(a);
    int64_t tasks = 0, i = 0, first = 0; /* the tasks of text i begin at `first` */
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
#define ATTEND_TEXT(KIND) attend_text(KIND, &t, left < size ? left : size)
        FOR_UNITS(a->wide, a->head_dim, ATTEND_TEXT);
    }
}

#endif
