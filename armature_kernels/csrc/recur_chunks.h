/* A prompt through a recurrent layer in chunks of tokens. With the state S before a chunk, the decays D(i, t) of tokens
 * i + 1 to t, and G(t) of all up to t, a token adds key u to the state, where
 *     u(t) = f(t) (v(t) - G(t) k(t) S - the sum over i < t of D(i, t) (k(t) . k(i)) u(i)), in Mamba-2 f(t) v(t) alone,
 * its result is G(t) q(t) S + the sum over i <= t of D(i, t) (q(t) . k(i)) u(i), and the state after the chunk is
 * G(last) S + the sum of D(i, last) k(i) u(i). All of these are products of matrices, as in linear_fp32.h. The decays are
 * multiplied, never divided, since a product of a few may be zero. */
#ifndef ARMATURE_RECUR_CHUNKS_H
#define ARMATURE_RECUR_CHUNKS_H

#include "tile_fp32.h"

#define CHUNK STATE_COLUMNS  /* tokens */
#define LEAST_CHUNK 4        /* tokens that are faster as a chunk */
#define COLUMNS (CHUNK + 16) /* between rows of columns: 128 bytes would share half of the sets of the first cache */
#define UNITS_TOGETHER 8     /* whose chunks share the products of keys: 128 KB of states */

/* What the heads of a group share of a token: its query and key, the factors that normalize them, and the product of both. */
typedef struct {
    const float *query, *key;
    float query_scale, key_scale, both;
} token_keys;

INLINE token_keys keys_of(const recur_arguments *a, int64_t row, int64_t group) {
    const float *x = a->x + row * a->channels;
    token_keys of = {x + a->query + group * a->key_size, x + a->key + group * a->key_size, 1.0f, 1.0f, 0.0f};
    if (!a->delta) return of;
    vf keys = vf_all(0), queries = vf_all(0), both = vf_all(0);
    for (int64_t i = 0; i < a->key_size; i += LANES) {
        const vf key = vf_load_part(of.key + i, a->key_size - i), query = vf_load_part(of.query + i, a->key_size - i);
        keys += key * key, queries += query * query, both += key * query;
    }
    of.key_scale = 1.0f / float_sqrt(vf_sum(keys) + 1e-6f);
    of.query_scale = 1.0f / float_sqrt((vf_sum(queries) + 1e-6f) * (float)a->key_size);
    of.both = vf_sum(both) * of.query_scale * of.key_scale;
    return of;
}

/* y[r * STATE_COLUMNS + i] = or, unless `begins`, += the sum over k < inputs of x[k * x_stride + r] * w[k * w_stride + i], for
 * r < rows and i < WIDE_OUTPUTS. `rows` is a compile-time constant at every call. */
INLINE void multiply_columns(int rows, int begins, const float *x, int64_t x_stride, const float *w, int64_t w_stride, int64_t inputs, float *y) {
    vf acc[WIDE_ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < 2; i++) acc[r][i] = begins ? vf_all(0) : vf_load(y + r * STATE_COLUMNS + i * LANES);
    for (int64_t k = 0; k < inputs; k++) add_input(rows, acc, vf_load(w + k * w_stride), vf_load(w + k * w_stride + LANES), x + k * x_stride);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < 2; i++) vf_store(y + r * STATE_COLUMNS + i * LANES, acc[r][i]);
}

/* The same for any number of rows, and columns [i0, STATE_COLUMNS). Two rows more than a whole tile are two tiles of four, whose
 * sums suffice to hide the latency of additions. */
static __attribute__((noinline)) void multiply_all(int begins, const float *x, int64_t x_stride, const float *w, int64_t w_stride, int64_t inputs, float *y,
                                                   int64_t rows, int64_t i0) {
#define ROWS_OF(COUNT) multiply_columns(COUNT, begins, x + r, x_stride, w + i, w_stride, inputs, y + r * STATE_COLUMNS + i), r += COUNT
    for (int64_t i = i0; i < STATE_COLUMNS; i += WIDE_OUTPUTS)
        for (int64_t r = 0; r < rows;) {
            const int64_t left = rows - r;
            if (left >= WIDE_ROWS && left != WIDE_ROWS + 2) ROWS_OF(WIDE_ROWS);
            else if (left >= 4) ROWS_OF(4);
            else if (left >= 2) ROWS_OF(2);
            else ROWS_OF(1);
        }
}

/* A chunk of one sequence, for the heads of one group: keys as rows, keys and queries as columns, both normalized, and their
 * products, a row for each key. */
typedef struct {
    int64_t first, count; /* rows of the batch */
    float keys[CHUNK * MOST_KEYS], key_columns[MOST_KEYS * COLUMNS], query_columns[MOST_KEYS * COLUMNS];
    float keys_by_keys[CHUNK * CHUNK], keys_by_queries[CHUNK * CHUNK];
} group_chunk;

/* Of one of its heads: the decays, the decays up to each token, and the products with the decays between both tokens. */
typedef struct {
    float total[CHUNK], to_last[CHUNK], by_keys[CHUNK * CHUNK], by_queries[CHUNK * CHUNK];
} head_chunk;

/* columns[k * COLUMNS + t] = rows[t * size + k] for t < count; the columns from `count` on are zero. */
static void turn_chunk(const float *rows, int64_t size, int64_t count, float *columns) {
    for (int64_t t = 0; t < CHUNK; t += 4) {
        if (t + 4 <= count)
            for (int64_t k = 0; k + 4 <= size; k += 4) turn_four(rows + t * size + k, size * (int64_t)sizeof *rows, 4, (uint32_t *)columns + k * COLUMNS + t, COLUMNS);
        for (int64_t k = t + 4 <= count ? size / 4 * 4 : 0; k < size; k++)
            for (int64_t i = t; i < t + 4; i++) columns[k * COLUMNS + i] = i < count ? rows[i * size + k] : 0.0f;
    }
}

INLINE void scaled_row(const float *x, float scale, int64_t size, float *to) {
    for (int64_t i = 0; i < size; i += LANES) vf_store_part(to + i, vf_load_part(x + i, size - i) * scale, size - i);
}

static void begin_group(const recur_arguments *a, int64_t group, group_chunk *c) {
    float queries[CHUNK * MOST_KEYS] __attribute__((aligned(64)));
    const int64_t size = a->key_size;
    for (int64_t t = 0; t < c->count; t++) {
        const token_keys of = keys_of(a, c->first + t, group);
        for (int64_t i = 0; t + 4 < c->count && i < size; i += 16) __builtin_prefetch(of.key + 4 * a->channels + i), __builtin_prefetch(of.query + 4 * a->channels + i);
        scaled_row(of.key, of.key_scale, size, c->keys + t * size);
        scaled_row(of.query, of.query_scale, size, queries + t * size);
    }
    turn_chunk(c->keys, size, c->count, c->key_columns);
    turn_chunk(queries, size, c->count, c->query_columns);
    /* Only tokens after a key's are read. */
    for (int64_t i = 0; i < c->count; i += WIDE_OUTPUTS) {
        const int64_t rows = c->count - i < WIDE_OUTPUTS ? c->count - i : WIDE_OUTPUTS;
        multiply_all(1, c->key_columns + i, COLUMNS, c->query_columns, COLUMNS, size, c->keys_by_queries + i * CHUNK, rows, i);
        if (a->delta) multiply_all(1, c->key_columns + i, COLUMNS, c->key_columns, COLUMNS, size, c->keys_by_keys + i * CHUNK, rows, i);
    }
}

static void begin_head(const recur_arguments *a, int64_t head, const group_chunk *c, head_chunk *h) {
    const float *decays = a->scales + c->first * 2 * a->heads + head;
    const int64_t stride = 2 * a->heads;
    float between[CHUNK] __attribute__((aligned(64))) = {0}; /* from the end of token i to the end of each token */
    for (int64_t t = 0; t < c->count; t++) h->total[t] = decays[t * stride] * (t ? h->total[t - 1] : 1.0f);
    for (int64_t i = c->count - 1; i >= 0; i--) {
        const float decay = i + 1 < c->count ? decays[(i + 1) * stride] : 0.0f;
        for (int64_t t = 0; t < CHUNK; t += LANES) vf_store(between + t, vf_load(between + t) * decay);
        between[i] = 1.0f;
        const int64_t first = i / WIDE_OUTPUTS * WIDE_OUTPUTS; /* products before it were not computed */
        h->to_last[i] = between[c->count - 1];
        for (int64_t t = 0; t < CHUNK; t += LANES) {
            const int64_t at = i * CHUNK + t;
            const vf decays_to = vf_load(between + t);
            vf_store(h->by_queries + at, t < first ? vf_all(0) : vf_load(c->keys_by_queries + at) * decays_to);
            if (a->delta) vf_store(h->by_keys + at, t < first ? vf_all(0) : vf_load(c->keys_by_keys + at) * decays_to);
        }
    }
}

/* to [STATE_COLUMNS] += factor * from. */
INLINE void add_row(float *to, float factor, const float *from) {
    for (int64_t i = 0; i < STATE_COLUMNS; i += LANES) vf_store(to + i, vf_load(to + i) + factor * vf_load(from + i));
}

/* added[t] -= the sum over i < t of by_keys[i][t] * added[i] times the factor of t, in order of t. */
static void solve_chunk(const recur_arguments *a, int64_t head, const group_chunk *c, const head_chunk *h, float *added) {
    float sums[WIDE_ROWS * STATE_COLUMNS] __attribute__((aligned(64)));
    for (int64_t from = 0; from < c->count; from += WIDE_ROWS) {
        const int64_t rows = c->count - from < WIDE_ROWS ? c->count - from : WIDE_ROWS;
        multiply_all(1, h->by_keys + from, CHUNK, added, STATE_COLUMNS, from, sums, rows, 0);
        for (int64_t t = from; t < from + rows; t++) {
            float *sum = sums + (t - from) * STATE_COLUMNS;
            for (int64_t i = from; i < t; i++) add_row(sum, h->by_keys[i * CHUNK + t], added + i * STATE_COLUMNS);
            add_row(added + t * STATE_COLUMNS, -a->scales[((c->first + t) * 2 + 1) * a->heads + head], sum);
        }
    }
}

/* A chunk in STATE_COLUMNS elements of the values of a head, of which `left` are not padding. With drafts the state stays. */
static void recur_chunk(const recur_arguments *a, const group_chunk *c, const head_chunk *h, float *state, int64_t head, int64_t from, int64_t left, int64_t drafts) {
    float added[CHUNK * STATE_COLUMNS] __attribute__((aligned(64))), read[CHUNK * STATE_COLUMNS] __attribute__((aligned(64)));
    const int64_t size = a->key_size;
    const float *values = a->x + c->first * a->channels + a->value + head * a->value_size + from, skip = a->skips ? a->skips[head] : 0.0f;
    if (a->delta) multiply_all(1, c->key_columns, COLUMNS, state, STATE_COLUMNS, size, read, c->count, 0);
    for (int64_t t = 0; t < c->count; t++) {
        const float factor = a->scales[((c->first + t) * 2 + 1) * a->heads + head], known = a->delta ? h->total[t] : 0.0f;
        for (int64_t i = 0; i < STATE_COLUMNS; i += LANES) {
            const vf value = i < left ? vf_load_part(values + t * a->channels + i, left - i) : vf_all(0);
            vf_store(added + t * STATE_COLUMNS + i, factor * (a->delta ? value - known * vf_load(read + t * STATE_COLUMNS + i) : value));
        }
    }
    if (a->delta) solve_chunk(a, head, c, h, added);
    multiply_all(1, c->query_columns, COLUMNS, state, STATE_COLUMNS, size, read, c->count, 0);
    for (int64_t t = 0; t < c->count; t++)
        for (int64_t i = 0; i < STATE_COLUMNS; i += LANES) vf_store(read + t * STATE_COLUMNS + i, h->total[t] * vf_load(read + t * STATE_COLUMNS + i));
    for (int64_t t = 0; t < c->count; t += WIDE_ROWS) {
        const int64_t rows = c->count - t < WIDE_ROWS ? c->count - t : WIDE_ROWS;
        multiply_all(0, h->by_queries + t, CHUNK, added, STATE_COLUMNS, t + rows, read + t * STATE_COLUMNS, rows, 0);
    }
    for (int64_t t = 0; t < c->count; t++) {
        float *out = a->out + ((c->first + t) * a->heads + head) * a->value_size + from;
        for (int64_t i = 0; i < STATE_COLUMNS && i < left; i += LANES)
            vf_store_part(out + i, vf_load(read + t * STATE_COLUMNS + i) + skip * vf_load_part(values + t * a->channels + i, left - i), left - i);
        for (int64_t i = 0; i < STATE_COLUMNS; i += LANES) vf_store(added + t * STATE_COLUMNS + i, h->to_last[t] * vf_load(added + t * STATE_COLUMNS + i));
    }
    if (drafts) return;
    const float decay = h->total[c->count - 1];
    for (int64_t i = 0; i < size * STATE_COLUMNS; i += LANES) vf_store(state + i, vf_load(state + i) * decay);
    multiply_all(0, c->keys, size, added, STATE_COLUMNS, c->count, state, size, 0);
}

/* The units [first, end) of one sequence, as in recur.h: a few of one group at a time, whose states stay in the second cache. */
static void recur_chunks(const recur_arguments *a, const state_run *run, float *states, int64_t first, int64_t end) {
    group_chunk c __attribute__((aligned(64)));
    head_chunk h __attribute__((aligned(64)));
    const int64_t tiles = (a->value_size + STATE_COLUMNS - 1) / STATE_COLUMNS, tile_size = a->key_size * STATE_COLUMNS, in_group = a->heads / a->key_heads * tiles;
    for (int64_t from = first, to; from < end; from = to) {
        const int64_t group = from / in_group, last = (group + 1) * in_group < end ? (group + 1) * in_group : end;
        to = from + UNITS_TOGETHER < last ? from + UNITS_TOGETHER : last;
        for (int64_t done = 0; done < run->num_tokens; done += CHUNK) {
            c.first = run->first + done, c.count = run->num_tokens - done < CHUNK ? run->num_tokens - done : CHUNK;
            begin_group(a, group, &c);
            for (int64_t unit = from, known = -1; unit < to; unit++) {
                const int64_t head = unit / tiles, column = unit % tiles * STATE_COLUMNS;
                if (head != known) known = head, begin_head(a, head, &c, &h);
                recur_chunk(a, &c, &h, states + unit * tile_size, head, column, a->value_size - column, run->drafts);
            }
        }
    }
}

#endif
