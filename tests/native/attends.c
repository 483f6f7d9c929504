/* Tests of attention over a ragged batch: one or two segments per sequence, windows, soft caps, sinks, ALiBi, each kind
 * of cache; and of writing the cache. */
#include "cache.h"

int64_t armature_attention_scratch(const attention_arguments *arguments);

static const int64_t HEAD_DIMS[] = {64, 128, 80, 256, 96, 72};

typedef struct {
    cache c;
    attention_step *step;
    attention_arguments arguments;
    int64_t rows; /* number of queries */
} attended;

/* A sequence of `tokens` queries after `start`. Its cache rows begin at *row, with a gap between segments. */
static sequence new_sequence(int64_t first, int64_t tokens, int64_t start, int64_t *row) {
    sequence s = {.first = first, .num_tokens = tokens, .start = start, .num_segments = 1};
    const int64_t all = start + tokens, prefix = start > 0 && below(2) ? between(1, start) : 0;
    if (prefix) s.segments[s.num_segments++ - 1] = (segment){*row, prefix, 0}, *row += prefix + below(3);
    s.segments[s.num_segments - 1] = (segment){*row, all - prefix, prefix};
    *row += all - prefix;
    return s;
}

/* A number for each head, or NULL. */
static const float *new_heads(int given, int64_t heads, float size) {
    float *x = given ? room(heads * 4) : NULL;
    for (int64_t i = 0; x && i < heads; i++) x[i] = size * number();
    return x;
}

static attended new_attended(int64_t i) {
    const int64_t kv_heads = between(1, 3), group = between(1, 5), head_dim = HEAD_DIMS[i % 6], count = between(1, 4);
    const int kind = (int)(i % 3), wide = kind == CACHE_FP32;
    attended t = {.step = room((int64_t)sizeof(attention_step) + count * (int64_t)sizeof(sequence))};
    int64_t cached_rows = 0;
    for (int64_t n = 0; n < count; n++) {
        const int many = n % 2, few = group < 16;
        const int64_t tokens = many ? between(32, 70) : few && n % 3 == 2 ? between(1, 31 / group) : 1;
        t.step->sequences[n] = new_sequence(t.rows, tokens, n == 0 && i % 4 == 0 ? between(500, 800) : below(150), &cached_rows);
        t.rows += tokens;
    }
    t.c = new_cache(cached_rows, kv_heads, head_dim, kind, 1);
    const int64_t heads = kv_heads * group, query_stride = heads * head_dim + below(3), out_stride = heads * head_dim + below(3);
    void *query = room(((t.rows - 1) * query_stride + heads * head_dim) * (wide ? 4 : 2));
    for (int64_t at = 0; at < (t.rows - 1) * query_stride + heads * head_dim; at++) set_element(query, wide, at, 2 * number());
    t.arguments = (attention_arguments){
        query, room(((t.rows - 1) * out_stride + heads * head_dim) * (wide ? 4 : 2)), t.step, t.c.kv, query_stride, out_stride, heads, kv_heads, head_dim,
        i % 4 == 1 ? between(1, 100) : 0, wide, 1 / sqrt((double)head_dim), i % 5 == 2 ? 5 : 0, new_heads(i % 7 % 3 == 1, heads, 6), new_heads(i % 5 % 3 == 1, heads, 1),
    };
    t.step->num_sequences = count;
    const int64_t bytes = armature_attention_scratch(&t.arguments);
    t.step->scratch = bytes ? room(bytes) : NULL;
    return t;
}

static void free_attended(attended *t) {
    free((void *)t->arguments.sinks), free((void *)t->arguments.slopes), free((void *)t->arguments.query), free(t->arguments.out), free(t->step->scratch), free(t->step), free(t->c.bytes);
}

static int64_t row_of(const sequence *s, int64_t position) {
    const segment *part = s->num_segments > 1 && position >= s->segments[1].position ? s->segments + 1 : s->segments;
    return part->first + position - part->position;
}

/* Scores of one query head against positions [0, position] as weights that sum to 1; positions it does not see have
 * none. */
static void weigh(const attended *t, const sequence *s, int64_t query, int64_t head, double *weights) {
    const attention_arguments *a = &t->arguments;
    const int64_t position = s->start + query, first = a->window > 0 && position - a->window + 1 > 0 ? position - a->window + 1 : 0;
    double largest = a->sinks ? a->sinks[head] : -INFINITY, total = 0;
    for (int64_t p = 0; p <= position; p++) {
        double dot = 0;
        for (int64_t i = 0; i < a->head_dim; i++)
            dot += (double)get_element(a->query, a->wide, (s->first + query) * a->query_stride + head * a->head_dim + i) * cached(&t->c, 0, row_of(s, p), head / (a->heads / a->kv_heads), i);
        dot *= a->scale;
        if (a->softcap > 0) dot = a->softcap * tanh(dot / a->softcap);
        if (a->slopes) dot += a->slopes[head] * (double)(p - position);
        weights[p] = p < first ? -INFINITY : dot;
        largest = fmax(largest, weights[p]);
    }
    for (int64_t p = 0; p <= position; p++) total += weights[p] = exp(weights[p] - largest);
    if (a->sinks) total += exp(a->sinks[head] - largest);
    for (int64_t p = 0; p <= position; p++) weights[p] /= total;
}

static void check_query(const attended *t, const sequence *s, int64_t query, int64_t head) {
    const attention_arguments *a = &t->arguments;
    const int64_t count = s->start + query + 1;
    double *weights = room(count * 8);
    weigh(t, s, query, head, weights);
    for (int64_t i = 0; i < a->head_dim; i++) {
        double expected = 0, size = 0;
        for (int64_t p = 0; p < count; p++) {
            const double part = weights[p] * cached(&t->c, 1, row_of(s, p), head / (a->heads / a->kv_heads), i);
            expected += part, size += fabs(part);
        }
        const float found = get_element(a->out, a->wide, (s->first + query) * a->out_stride + head * a->head_dim + i);
        /* Keys of int8 may be rounded to bf16, which moves a score of many elements by up to a hundredth. */
        if (!close_to(found, expected, a->wide ? 2e-5 * size + 1e-5 : 0.016 * size + 1e-3))
            failed("query %d of %d at %d, head %d, element %d of %d: %g for %g", (int)query, (int)s->num_tokens, (int)s->start, (int)head, (int)i, (int)a->head_dim, found, expected);
    }
    free(weights);
}

int64_t attends(void) {
    for (int64_t i = 0; i < 18; i++) {
        attended t = new_attended(i);
        const attention_arguments *a = &t.arguments;
        run(OP_ATTENTION, a);
        for (int64_t n = 0; n < t.step->num_sequences; n++) {
            const sequence *s = t.step->sequences + n;
            for (int64_t query = 0; query < s->num_tokens; query += 1 + s->num_tokens / 4)
                for (int64_t head = 0; head < a->heads; head++) check_query(&t, s, query, head);
        }
        for (int64_t at = 0; at < (t.rows - 1) * a->out_stride; at++)
            if (at % a->out_stride >= a->heads * a->head_dim && ((const uint16_t *)a->out)[a->wide ? 2 * at : at] != 0x7b7b) failed("a word between two rows was written");
        free_attended(&t);
    }
    return 18;
}

/* Reference for a head: normalised if there are weights, then RoPE. */
static void turned(const turn_arguments *a, const void *x, int64_t first, int64_t row, int64_t head, double *out) {
    const float *weight = head < a->heads ? a->query_norm : head < a->heads + a->kv_heads ? a->key_norm : a->value_norm;
    const int64_t dim = head < a->heads + a->kv_heads ? a->dim : 0, half = dim / 2;
    double squares = 0, before[256];
    for (int64_t i = 0; i < a->head_dim; i++) before[i] = get_element(x, a->wide, first + i), squares += before[i] * before[i];
    for (int64_t i = 0; weight && i < a->head_dim; i++) before[i] *= weight[i] / sqrt(squares / (double)a->head_dim + a->eps);
    for (int64_t i = 0; i < a->head_dim; i++) {
        const int64_t other = i < half ? i + half : i - half;
        out[i] = i < dim ? before[i] * a->cos[row * dim + i] + before[other] * a->sin[row * dim + i] : before[i];
    }
}

static void check_turned(const turn_arguments *a, const cache *c, int64_t row, int64_t head, const double *expected) {
    const int64_t own = head - a->heads, kv_head = own < a->kv_heads ? own : own - a->kv_heads;
    const int values = own >= a->kv_heads;
    for (int64_t i = 0; i < a->head_dim; i++) {
        const float found = own < 0 ? get_element(a->x, a->wide, row * a->stride + head * a->head_dim + i) : cached(c, values, a->written[row], kv_head, i);
        const double step = own >= 0 && c->int8 ? 0.51 * cached_scale(c, values, a->written[row], kv_head) : a->wide ? 0 : fabs(expected[i]) / 200;
        if (!close_to(found, expected[i], step + 1e-5)) failed("row %d, head %d, element %d: %g for %g", (int)row, (int)head, (int)i, found, expected[i]);
    }
}

static float *floats(int64_t count) {
    float *x = room(count * 4);
    for (int64_t i = 0; i < count; i++) x[i] = number();
    return x;
}

int64_t turns(void) {
    for (int64_t i = 0; i < 18; i++) {
        const int64_t rows = between(1, 9), kv_heads = i >= 16 ? 0 : between(1, 3), heads = kv_heads ? kv_heads * between(1, 3) : 2, all = heads + 2 * kv_heads, size = HEAD_DIMS[i % 6];
        const int64_t dim = i % 4 == 3 ? 0 : i % 4 == 2 ? size / 2 : size, stride = all * size + below(3), count = (rows - 1) * stride + all * size;
        const int kind = (int)(i % 3), wide = kind == CACHE_FP32, bytes = wide ? 4 : 2;
        cache c = new_cache(rows * 2, kv_heads ? kv_heads : 1, size, kind, 0);
        void *x = room(count * bytes);
        int64_t *written = room(rows * 8);
        for (int64_t at = 0; at < count; at++) set_element(x, wide, at, 3 * number());
        for (int64_t row = 0; row < rows; row++) written[row] = 2 * row + 1;
        float *norms[3] = {i % 5 ? floats(size) : NULL, i % 5 ? floats(size) : NULL, i >= 12 ? floats(size) : NULL}, *waves[2] = {floats(rows * dim), floats(rows * dim)};
        void *before = memcpy(room(count * bytes), x, (size_t)(count * bytes));
        const turn_arguments a = {x, norms[0], norms[1], waves[0], waves[1], written, c.kv, stride, rows, heads, kv_heads, size, dim, wide, 1e-6, NULL, 0, 0, 0, norms[2]};
        run(OP_TURN, &a);
        for (int64_t at = 0; at < rows * all; at++) {
            double expected[256];
            turned(&a, before, at / all * stride + at % all * size, at / all, at % all, expected);
            check_turned(&a, &c, at / all, at % all, expected);
        }
        for (int64_t row = 0; row < 2 * rows; row++)
            if ((!kv_heads || row % 2 == 0) && c.bytes[row * c.kv.token_bytes] != 0x7b) failed("row %d of the cache was written", (int)row);
        free(c.bytes), free(x), free(written), free(norms[0]), free(norms[1]), free(norms[2]), free(waves[0]), free(waves[1]), free(before);
    }
    return 18;
}
