/* Decode: a few queries of a sequence against one part of its context, read in place. All query heads that share a KV
 * head are computed together, and so are all heads of a block of tokens, whose keys and values are adjacent: each
 * byte is read once. Softmax uses a running maximum and sum (online softmax: Milakov and Gimelshein, arXiv
 * 1805.02867) with scores and sums in fp32. Blocks begin at multiples of DECODE_BLOCK positions, so that a row's
 * result does not depend on the rest of the batch or on how its context is divided into segments. */
#ifndef ARMATURE_ATTENTION_DECODE_H
#define ARMATURE_ATTENTION_DECODE_H

#if LANES == 8
#include "decode_products_avx2.h"
#else
#include "decode_products.h"
#endif

#define TASK_ROWS 64 /* query heads (of all queries) of one task */

#if BF16_UNITS
#define KEYS_AS FROM_PAIRS
#else
#define KEYS_AS FROM_BF16
#endif

/* A task: KV heads [first_head, first_head + kv_heads) of positions [from, to). Its rows are (KV head, query, query
 * head). */
typedef struct {
    const attention_arguments *a;
    const sequence *s;
    int64_t first_head, kv_heads, from, to, split;
    int64_t after; /* where the thread's next task may begin, to be prefetched */
    float *partials; /* of the sequence; NULL if the task has the whole context */
    int64_t rows;    /* per KV head */
    int64_t at[2 * DECODE_BLOCK];
    float maximum[TASK_ROWS];
    float totals[TASK_ROWS][LANES] __attribute__((aligned(64))); /* one sum per lane */
    float sums[TASK_ROWS][MAX_HEAD_DIM] __attribute__((aligned(64)));
    float queries[TASK_ROWS][MAX_HEAD_DIM] __attribute__((aligned(64)));
} decoding;

/* Lay out a query head for its dot products, padded with zeros (decode_lanes.h). */
INLINE void load_query(int kind, const void *source, int64_t size, float *target) {
    uint16_t padded[MAX_HEAD_DIM] = {0};
    if (kind == FROM_FP32) {
        memcpy(target, source, (size_t)size * 4);
        memset(target + size, 0, (size_t)(padded32(size) - size) * 4);
        return;
    }
    memcpy(padded, source, (size_t)size * 2);
    for (int64_t i = 0; i < size; i += STEP) {
        if (kind == FROM_PAIRS) memcpy(target + i / 2, padded + i, STEP * 2);
        else if (kind == FROM_INT8)
            for (int half = 0; half < 2; half++) vf_store(target + i + half * LANES, bf16_load(padded + i + half * LANES));
        else {
            vf x[2];
            widen(kind, (const uint8_t *)(padded + i), x);
            for (int v = 0; v < 2; v++) vf_store(target + i + v * LANES, x[v]);
        }
    }
}

static void begin_decoding(decoding *d, int kind) {
    const attention_arguments *a = d->a;
    const int64_t group = group_size(a);
    d->rows = d->s->num_tokens * group;
    for (int64_t row = 0; row < d->kv_heads * d->rows; row++) {
        const int64_t head = (d->first_head + row / d->rows) * group + row % group, query = row % d->rows / group;
        load_query(kind, element_of(a->wide, a->query, (d->s->first + query) * a->query_stride + head * a->head_dim), a->head_dim, d->queries[row]);
        d->maximum[row] = -INFINITY;
        vf_store(d->totals[row], vf_all(0));
        memset(d->sums[row], 0, (size_t)padded32(a->head_dim) * 4);
    }
}

/* Set the addresses of the tokens of the block at `position`. Tokens outside [from, to) use the nearest token inside. */
INLINE void locate(const decoding *d, int64_t position, int64_t from, int64_t to, int64_t *at) {
    for (int64_t t = 0; t < DECODE_BLOCK; t++) {
        const int64_t p = position + t < from ? from : position + t < to ? position + t : to - 1;
        at[t] = row_at(d->a, d->s, p);
    }
}

INLINE float raise_maximum(float *maximum, float candidate) {
    const float before = *maximum;
    if (candidate <= before) return 1.0f;
    *maximum = candidate;
    return vf_exp(vf_all(before - candidate))[0];
}

/* Compute a block's scores from the dot products of one row. Tokens outside [from, to) get -inf. `ahead`: position of
 * the block's first token minus the query's. */
INLINE void finish_block(const attention_arguments *a, int64_t head, int64_t ahead, int from, int to, const float *key_scales, float *scores) {
    const float cap = (float)a->softcap;
    vi lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    for (int t = from / LANES * LANES; t < to; t += LANES) {
        vf x = vf_load(scores + t) * (float)a->scale;
        if (key_scales) x *= vf_load(key_scales + t);
        if (cap > 0) x = vf_tanh(x / cap) * cap;
        if (a->slopes) x += a->slopes[head] * __builtin_convertvector(lanes + (int32_t)(ahead + t), vf);
        if (from > t || to < t + LANES) x = vf_select((lanes + t >= from) & (lanes + t < to), x, vf_all(-INFINITY));
        vf_store(scores + t, x);
    }
}

/* The maximum may be slightly too small: sums grow by no more than e^SLACK and are rarely rescaled. */
#define SLACK 20.0f

static void raise(decoding *d, int64_t row, int from, int to, const float *scores) {
    vf largest = vf_all(-INFINITY);
    for (int t = from / LANES * LANES; t < to; t += LANES) largest = vf_max(vf_load(scores + t), largest);
    const float rescale = raise_maximum(&d->maximum[row], vf_largest(largest));
    vf_store(d->totals[row], vf_load(d->totals[row]) * rescale);
    for (int64_t i = 0; i < padded32(d->a->head_dim); i += LANES) vf_store(d->sums[row] + i, vf_load(d->sums[row] + i) * rescale);
}

/* Turn the dot products of one row for tokens [from, to) of the block into weights e^(score - maximum). The others
 * become zero. */
INLINE void weigh(decoding *d, int64_t row, int64_t head, int64_t ahead, int from, int to, const float *key_scales, const float *value_scales, float *scores) {
    const vf limit = vf_all(d->maximum[row] + SLACK);
    vi above = vi_all(0);
    finish_block(d->a, head, ahead, from, to, key_scales, scores);
    for (int t = from / LANES * LANES; t < to; t += LANES) above |= vf_load(scores + t) > limit;
    if (any_lane(above)) raise(d, row, from, to, scores);
    vf total = vf_load(d->totals[row]);
    for (int t = from / LANES * LANES; t < to; t += LANES) {
        const vf weight = exp_below(vf_load(scores + t) - d->maximum[row]);
        total += weight;
        vf_store(scores + t, value_scales ? weight * vf_load(value_scales + t) : weight);
    }
    vf_store(d->totals[row], total);
}

#define FOR_ROWS(COUNT, CALL)       \
    switch (COUNT) {                \
        case 1: CALL(1); break;     \
        case 2: CALL(2); break;     \
        case 3: CALL(3); break;     \
        default: CALL(SHARING);     \
    }

INLINE void score_all(int kind, const decoding *d, kv_ahead *ahead, int64_t row0, const block_rows *keys, int from, int to, float (*scores)[DECODE_BLOCK]) {
    for (int64_t r = 0; r < d->rows; r += SHARING) {
#define SCORE(ROWS) score(kind, ROWS < SHARING ? ROWS : SHARING, r ? NULL : ahead, keys, (const float (*)[MAX_HEAD_DIM])d->queries + row0 + r, from, to, scores + r)
        FOR_ROWS(d->rows - r, SCORE)
    }
}

/* Process rows [row, row + count), all of one query. `ahead`: NULL for all queries but the first. */
INLINE void add_all(int kind, decoding *d, kv_ahead *ahead, int64_t row, int64_t count, const block_rows *values, const float (*weights)[DECODE_BLOCK],
                    int from, int to) {
    for (int64_t r = 0; r < count; r += SHARING) {
#define ADD(ROWS) \
    add_head(kind == FROM_PAIRS ? FROM_BF16 : kind, ROWS < SHARING ? ROWS : SHARING, r ? NULL : ahead, values, weights + r, from, to, d->sums + row + r)
        FOR_ROWS(count - r, ADD)
    }
}

/* Process head `h` of the task for the block at `position`, whose tokens are at d->at; those of the next block follow
 * there. */
INLINE void take_block(decoding *d, int kind, kv_ahead *ahead, int64_t h, int64_t position) {
    const attention_arguments *a = d->a;
    const int64_t group = group_size(a), bytes = a->head_dim * bytes_of(kind), head = d->first_head + h;
    const block_rows keys = {a->kv.keys + head * bytes, d->at, a->head_dim, bytes}, values = {a->kv.values + head * bytes, d->at, a->head_dim, bytes};
    const int share = (DECODE_BLOCK + (int)group - 1) / (int)group; /* tokens whose values are prefetched at a time */
    float scores[MAX_GROUP][DECODE_BLOCK] __attribute__((aligned(64))), key_scales[DECODE_BLOCK], value_scales[DECODE_BLOCK];
    if (kind == FROM_INT8)
        for (int t = 0; t < DECODE_BLOCK; t++) {
            if (h == 0) __builtin_prefetch(a->kv.key_scales + d->at[DECODE_BLOCK + t]); /* the next block's, for all heads */
            memcpy(key_scales + t, a->kv.key_scales + d->at[t] + head * 4, 4);
            memcpy(value_scales + t, a->kv.value_scales + d->at[t] + head * 4, 4);
        }
    const int low = d->from > position ? (int)(d->from - position) : 0, high = d->to - position < DECODE_BLOCK ? (int)(d->to - position) : DECODE_BLOCK;
    begin_head(ahead, h);
    score_all(kind, d, ahead, h * d->rows, &keys, low, high, scores);
    for (int64_t query = 0; query < d->s->num_tokens; query++) {
        const int64_t seen = first_seen(a, d->s->start + query) - position, left = d->s->start + query + 1 - position, row = h * d->rows + query * group;
        const int from = seen > low ? (int)(seen < DECODE_BLOCK ? seen : DECODE_BLOCK) : low, to = left < high ? (int)(left > 0 ? left : 0) : high;
        if (from >= to) continue;
        for (int64_t g = 0; g < group; g++) {
            if (query == 0) ask_for_values(ahead, share);
            weigh(d, row + g, head * group + g, 1 - left, from, to, kind == FROM_INT8 ? key_scales : NULL, kind == FROM_INT8 ? value_scales : NULL, scores[query * group + g]);
        }
        add_all(kind, d, query ? NULL : ahead, row, group, &values, (const float (*)[DECODE_BLOCK])scores + query * group, from, to);
    }
}

/* Row: (KV head, query, query head). */
INLINE int64_t head_of_row(const attention_arguments *a, const sequence *s, int64_t row) {
    const int64_t group = group_size(a), rows = s->num_tokens * group;
    return row / rows * group + row % group;
}

/* Reorder a row's sums of values and divide them by their total, to which its head's sink is added. It is added here, so
 * that the result does not depend on how the context is divided. */
INLINE void store_output(const attention_arguments *a, int64_t head, const float *sums, float maximum, float total, void *out) {
    float ordered[MAX_HEAD_DIM] __attribute__((aligned(64)));
    const int64_t size = padded32(a->head_dim);
    if (a->sinks) total += vf_exp(vf_all(a->sinks[head] - maximum))[0];
    if (a->kv.key_scales || a->wide) memcpy(ordered, sums, (size_t)size * 4);
    else
        for (int64_t i = 0; i < size; i++) ordered[i] = sums[i / STEP * STEP + i % 2 * LANES + i % STEP / 2];
    for (int64_t i = 0; i < a->head_dim; i += LANES) row_store_part(a->wide, out, i, vf_load(ordered + i) / total, a->head_dim - i);
}

INLINE void *output_of(const attention_arguments *a, const sequence *s, int64_t row) {
    const int64_t group = group_size(a), query = row % (s->num_tokens * group) / group;
    return element_of(a->wide, a->out, (s->first + query) * a->out_stride + head_of_row(a, s, row) * a->head_dim);
}

static void finish_decoding(const decoding *d) {
    const attention_arguments *a = d->a;
    for (int64_t r = 0; r < d->kv_heads * d->rows; r++) {
        const int64_t row = d->first_head * d->rows + r;
        const float total = vf_sum(vf_load(d->totals[r]));
        if (!d->partials) {
            store_output(a, head_of_row(a, d->s, row), d->sums[r], d->maximum[r], total, output_of(a, d->s, row));
            continue;
        }
        float *partial = d->partials + (row * num_splits(a, d->s) + d->split) * partial_floats(a);
        partial[0] = d->maximum[r], partial[1] = total;
        for (int64_t i = 0; i < padded32(a->head_dim); i += LANES) vf_store(partial + 16 + i, vf_load(d->sums[r] + i));
    }
}

INLINE void decode_as(decoding *d, int kind) {
    const attention_arguments *a = d->a;
    const int64_t bytes = a->head_dim * bytes_of(kind);
    const task_rows all = {a->kv.keys + d->first_head * bytes, a->kv.values + d->first_head * bytes, d->at, d->kv_heads, bytes};
    begin_decoding(d, kind);
    int64_t position = d->from / DECODE_BLOCK * DECODE_BLOCK;
    locate(d, position, d->from, d->to, d->at);
    for (; position < d->to; position += DECODE_BLOCK) {
        kv_ahead ahead;
        if (position + DECODE_BLOCK < d->to) locate(d, position + DECODE_BLOCK, d->from, d->to, d->at + DECODE_BLOCK);
        else locate(d, d->after, d->after, d->after + DECODE_BLOCK < d->to ? d->after + DECODE_BLOCK : d->to, d->at + DECODE_BLOCK);
        begin_block(&ahead, &all);
        for (int64_t h = 0; h < d->kv_heads; h++) take_block(d, kind, &ahead, h, position);
        memcpy(d->at, d->at + DECODE_BLOCK, sizeof d->at / 2);
    }
    finish_decoding(d);
}

/* Compute part `split` of a sequence's context for some KV heads. */
static void decode(const attention_arguments *a, const sequence *s, int64_t split, int64_t first_head, int64_t kv_heads, float *partials) {
    decoding d;
    const int64_t begins = (first_split(a, s) + split) * DECODE_SPLIT, ends = begins + DECODE_SPLIT, lowest = first_seen(a, s->start), context = s->start + s->num_tokens;
    d.a = a, d.s = s, d.first_head = first_head, d.kv_heads = kv_heads, d.split = split, d.partials = partials;
    d.from = begins > lowest ? begins : lowest, d.to = ends < context ? ends : context;
    /* Threads claim parts from the last to the first, so that this one's next is likely to be so many before. */
    const int64_t after = begins - omp_get_num_threads() * DECODE_SPLIT;
    d.after = after < lowest || kv_heads < a->kv_heads ? d.from : after;
    if (a->wide) decode_as(&d, FROM_FP32);
    else if (a->kv.key_scales) decode_as(&d, FROM_INT8);
    else decode_as(&d, KEYS_AS);
}

/* Merge the parts of one row in the order of their positions. */
static void join(const attention_arguments *a, const sequence *s, int64_t row, const float *partials) {
    const int64_t splits = num_splits(a, s), floats = partial_floats(a);
    const float *first = partials + row * splits * floats;
    float sums[MAX_HEAD_DIM] __attribute__((aligned(64))), maximum = -INFINITY, total = 0;
    for (int64_t i = 0; i < splits; i++) maximum = first[i * floats] > maximum ? first[i * floats] : maximum;
    memset(sums, 0, sizeof sums);
    for (const float *part = first; part < first + splits * floats; part += floats) {
        const float share = vf_exp(vf_all(part[0] - maximum))[0];
        total += share * part[1];
        for (int64_t i = 0; i < padded32(a->head_dim); i += LANES) vf_store(sums + i, vf_load(sums + i) + share * vf_load(part + 16 + i));
    }
    store_output(a, head_of_row(a, s, row), sums, maximum, total, output_of(a, s, row));
}

#endif
