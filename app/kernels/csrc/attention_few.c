/* Decode: one query against its whole context, read as it lies. All query heads of one key head go together, so that each byte is read once. */
#include "attention_bf16.h"

#include <math.h>

#ifdef ARMATURE_X86

#define BLOCK 32

/* Sums the lanes of 16 vectors; the sum of x[SUM_SLOT[i]] comes out in lane i. Each level halves the number of vectors. */
static const int SUM_SLOT[16] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};

INLINE TARGET_BF16 __m512 sum_each(__m512 *x) {
    for (int i = 0; i < 8; i++) x[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x[i], x[i + 8], 0x44), _mm512_shuffle_f32x4(x[i], x[i + 8], 0xee));
    for (int i = 0; i < 4; i++) x[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x[i], x[i + 4], 0x88), _mm512_shuffle_f32x4(x[i], x[i + 4], 0xdd));
    for (int i = 0; i < 2; i++) x[i] = _mm512_add_ps(_mm512_shuffle_ps(x[i], x[i + 2], 0x44), _mm512_shuffle_ps(x[i], x[i + 2], 0xee));
    return _mm512_add_ps(_mm512_shuffle_ps(x[0], x[1], 0x88), _mm512_shuffle_ps(x[0], x[1], 0xdd));
}

/* Scores of up to 16 tokens from `key` on; lanes beyond `count` are -inf. */
INLINE TARGET_BF16 __m512 score16(const attention *a, const uint16_t *query, const uint16_t *key, int count) {
    __m512 dots[16];
    for (int i = 0; i < 16; i++) {
        const uint16_t *k = key + (i < count ? i : count - 1) * a->key_stride;
        __m512 dot = _mm512_setzero_ps();
        int64_t d = 0;
        for (; d + 32 <= a->head_dim; d += 32)
            dot = _mm512_dpbf16_ps(dot, (__m512bh)_mm512_loadu_si512(k + d), (__m512bh)_mm512_loadu_si512(query + d));
        if (d < a->head_dim) { /* head sizes are multiples of 16 */
            __mmask32 half = 0xffff;
            dot = _mm512_dpbf16_ps(dot, (__m512bh)_mm512_maskz_loadu_epi16(half, k + d), (__m512bh)_mm512_maskz_loadu_epi16(half, query + d));
        }
        dots[SUM_SLOT[i]] = dot;
    }
    return _mm512_mask_blend_ps(first_lanes(count), _mm512_set1_ps(-INFINITY), finish_scores(sum_each(dots), a));
}

/* sums[head][d] += weights[head][token] * value[token][d] for `heads` (1 to 4) heads, four vectors of d at a time. */
#define DEFINE_ADD_VALUES(HEADS)                                                                                                            \
    INLINE TARGET_BF16 void add_values_##HEADS(const uint16_t *value, int64_t stride, int count, const float (*weights)[BLOCK],             \
                                               float (*sums)[MAX_HEAD_DIM], int64_t d, int vectors) {                                       \
        __m512 acc[HEADS][4];                                                                                                               \
        for (int h = 0; h < HEADS; h++)                                                                                                     \
            for (int v = 0; v < 4; v++) acc[h][v] = v < vectors ? _mm512_loadu_ps(&sums[h][d + v * 16]) : _mm512_setzero_ps();               \
        for (int t = 0; t < count; t++)                                                                                                     \
            for (int v = 0; v < 4; v++)                                                                                                     \
                if (v < vectors) {                                                                                                          \
                    __m512 x = widen(value + t * stride + d + v * 16, 0xffff);                                                              \
                    for (int h = 0; h < HEADS; h++) acc[h][v] = _mm512_fmadd_ps(_mm512_set1_ps(weights[h][t]), x, acc[h][v]);               \
                }                                                                                                                           \
        for (int h = 0; h < HEADS; h++)                                                                                                     \
            for (int v = 0; v < 4; v++)                                                                                                     \
                if (v < vectors) _mm512_storeu_ps(&sums[h][d + v * 16], acc[h][v]);                                                         \
    }
DEFINE_ADD_VALUES(1)
DEFINE_ADD_VALUES(2)
DEFINE_ADD_VALUES(3)
DEFINE_ADD_VALUES(4)

static TARGET_BF16 void add_values(const attention *a, const uint16_t *value, int count, const float (*weights)[BLOCK], float (*sums)[MAX_HEAD_DIM]) {
    for (int64_t head = 0; head < group_of(a); head += 4)
        for (int64_t d = 0; d < a->head_dim; d += 64) {
            int64_t heads = group_of(a) - head, vectors = (a->head_dim - d) / 16;
            if (vectors > 4) vectors = 4;
            if (heads >= 4) {
                if (vectors == 4) add_values_4(value, a->key_stride, count, weights + head, sums + head, d, 4);
                else add_values_4(value, a->key_stride, count, weights + head, sums + head, d, (int)vectors);
            } else if (heads == 3) add_values_3(value, a->key_stride, count, weights + head, sums + head, d, (int)vectors);
            else if (heads == 2) add_values_2(value, a->key_stride, count, weights + head, sums + head, d, (int)vectors);
            else add_values_1(value, a->key_stride, count, weights + head, sums + head, d, (int)vectors);
        }
}

/* Scores of one head for a block become weights in place: e^(score - maximum). Returns their sum. */
static TARGET_BF16 float weigh(float *scores, int count, float *maximum, float *rescale) {
    __m512 largest = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int t = 0; t < count; t += 16) largest = _mm512_max_ps(largest, _mm512_loadu_ps(scores + t));
    *rescale = raise_maximum(maximum, _mm512_reduce_max_ps(largest));
    for (int t = 0; t < count; t += 16) {
        __m512 weights = exp16(_mm512_sub_ps(_mm512_loadu_ps(scores + t), _mm512_set1_ps(*maximum)));
        weights = _mm512_maskz_mov_ps(first_lanes(count - t), weights);
        _mm512_storeu_ps(scores + t, weights);
        sum = _mm512_add_ps(sum, weights);
    }
    return _mm512_reduce_add_ps(sum);
}

/* One query head's running softmax over the blocks seen so far. */
typedef struct {
    float maximum, total;
} progress;

/* Takes `count` tokens from offset `token` of a segment into the sums of one group of query heads. */
static TARGET_BF16 void attend_tokens(const attention *a, const segment *part, int64_t token, int count, const uint16_t *query, int64_t kv_head, progress *done,
                                      float (*sums)[MAX_HEAD_DIM]) {
    const int64_t offset = token * a->key_stride + kv_head * a->head_dim;
    float weights[MAX_GROUP][BLOCK];
    for (int64_t t = BLOCK; t < BLOCK + count; t++) /* tokens are a whole stride apart: more than the hardware looks ahead */
        for (int64_t d = 0; d < a->head_dim; d += 32) {
            _mm_prefetch((const char *)(part->key + offset + t * a->key_stride + d), _MM_HINT_T1);
            _mm_prefetch((const char *)(part->value + offset + t * a->key_stride + d), _MM_HINT_T1);
        }
    for (int64_t h = 0; h < group_of(a); h++) {
        for (int b = 0; b < count; b += 16)
            _mm512_storeu_ps(&weights[h][b], score16(a, query + h * a->head_dim, part->key + offset + b * a->key_stride, count - b));
        float rescale, sum = weigh(weights[h], count, &done[h].maximum, &rescale);
        done[h].total = done[h].total * rescale + sum;
        if (rescale != 1.0f)
            for (int64_t d = 0; d < a->head_dim; d += 16)
                _mm512_storeu_ps(&sums[h][d], _mm512_mul_ps(_mm512_loadu_ps(&sums[h][d]), _mm512_set1_ps(rescale)));
    }
    add_values(a, part->value + offset, count, (const float (*)[BLOCK])weights, sums);
}

/* Heads are the inner loop: a block's keys and values of all heads lie together and stream through the cache once. */
TARGET_BF16 void attend_few(const attention *a, const sequence *s, int64_t query, int64_t first_head, int64_t kv_heads) {
    const int64_t group = group_of(a), position = s->start + query, lowest = first_seen(a, position), heads = group * kv_heads;
    const uint16_t *q = a->query + (s->first + query) * a->query_stride + first_head * group * a->head_dim;
    float sums[MAX_TASK_HEADS][MAX_HEAD_DIM];
    progress done[MAX_TASK_HEADS];
    for (int64_t h = 0; h < heads; h++) {
        done[h] = (progress){-INFINITY, 0};
        for (int64_t d = 0; d < a->head_dim; d += 16) _mm512_storeu_ps(&sums[h][d], _mm512_setzero_ps());
    }
    for (int64_t i = 0; i < s->num_segments; i++) {
        const segment *part = &s->segments[i];
        int64_t from = lowest > part->position ? lowest - part->position : 0, to = part->tokens;
        if (part->position + to > position + 1) to = position + 1 - part->position;
        for (int64_t t = from; t < to; t += BLOCK)
            for (int64_t head = 0; head < kv_heads; head++)
                attend_tokens(a, part, t, (int)(to - t < BLOCK ? to - t : BLOCK), q + head * group * a->head_dim, first_head + head, done + head * group,
                              sums + head * group);
    }
    uint16_t *out = a->out + (s->first + query) * a->out_stride + first_head * group * a->head_dim;
    for (int64_t h = 0; h < heads; h++)
        for (int64_t d = 0; d < a->head_dim; d += 16)
            narrow(out + h * a->head_dim + d, _mm512_div_ps(_mm512_loadu_ps(&sums[h][d]), _mm512_set1_ps(done[h].total)), 0xffff);
}

#endif
