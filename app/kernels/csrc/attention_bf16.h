/* What the two roads of attention share: the batch as the caller describes it, and one row's running softmax. */
#ifndef ATTENTION_BF16_H
#define ATTENTION_BF16_H

#include "tile_bf16.h"
#include "vector_bf16.h"

#define MAX_HEAD_DIM 256
#define MAX_GROUP 32      /* query heads that share one head of keys */
#define MAX_TASK_HEADS 64 /* query heads of one decode task */

/* A contiguous run of cached tokens: the first at absolute `position`; addresses of its first token's keys and values, head 0. */
typedef struct {
    const uint16_t *key, *value;
    int64_t tokens, position;
} segment;

/* One sequence: its queries are batch rows [first, first + num_tokens) at positions from `start`; the segments cover [0, start + num_tokens). */
typedef struct {
    int64_t first, num_tokens, start, num_segments;
    segment segments[2];
} sequence;

/* Strides in elements, between tokens; heads of one token lie head_dim apart. window <= 0 and softcap <= 0 mean none. */
typedef struct {
    const uint16_t *query;
    uint16_t *out;
    const sequence *sequences;
    int64_t num_sequences, query_stride, out_stride, key_stride, heads, kv_heads, head_dim, window;
    double scale, softcap;
    uint8_t *scratch;
} attention;

static inline int64_t group_of(const attention *a) { return a->heads / a->kv_heads; }

/* First position that a query at `position` sees. */
static inline int64_t first_seen(const attention *a, int64_t position) {
    return a->window > 0 && position - a->window + 1 > 0 ? position - a->window + 1 : 0;
}

static inline int uses_panels(const attention *a, const sequence *s) { return s->num_tokens > 1 && s->num_tokens * group_of(a) >= 32; }

#ifdef ARMATURE_X86

/* scores * scale, bounded by tanh where the model asks for it */
INLINE TARGET_BF16 __m512 finish_scores(__m512 dots, const attention *a) {
    __m512 scores = _mm512_mul_ps(dots, _mm512_set1_ps((float)a->scale));
    if (a->softcap <= 0) return scores;
    __m512 cap = _mm512_set1_ps((float)a->softcap);
    return _mm512_mul_ps(cap, tanh16(_mm512_div_ps(scores, cap)));
}

/* Takes a block's largest score into the running maximum: returns what earlier sums must be multiplied by. */
INLINE TARGET_BF16 float raise_maximum(float *maximum, float candidate) {
    float before = *maximum;
    if (candidate <= before) return 1.0f;
    *maximum = candidate;
    return _mm512_cvtss_f32(exp16(_mm512_set1_ps(before - candidate)));
}

TARGET_BF16 void attend_few(const attention *a, const sequence *s, int64_t query, int64_t first_head, int64_t kv_heads);
TARGET_BF16 void attend_many(const attention *a, const sequence *s, int64_t first_query, int64_t kv_head, const uint8_t *panels);
TARGET_BF16 void pack_context(const attention *a, const sequence *s, int64_t kv_head, int64_t panel, uint8_t *panels);
int64_t panel_bytes(const attention *a, const sequence *s);
int64_t queries_together(const attention *a);

#endif
#endif
