/* What all of attention shares: which sequences take which road, where a token lies, and how scratch is divided. No vectors here.
 *
 * Few queries (decode, attention_decode.h) read keys and values as they lie: the bytes are the cost. Their contexts are cut at multiples of
 * DECODE_SPLIT positions, whoever else is in the batch and however many threads there are; parts that no thread has alone are *partials* in
 * scratch, which are joined in the order of their positions. Many queries (prefill) go to panels, where the level has them. */
#ifndef ARMATURE_ATTENTION_H
#define ARMATURE_ATTENTION_H

#include "level.h"

#define MAX_HEAD_DIM 256
#define MAX_GROUP 32     /* query heads that share one head of keys */
#define DECODE_SPLIT 256 /* positions of a part */
#define PANEL_BLOCK 128  /* positions that panels are made of at a time */

static inline int64_t group_size(const attention_arguments *a) { return a->heads / a->kv_heads; }

/* First position that a query at `position` sees. */
static inline int64_t first_seen(const attention_arguments *a, int64_t position) {
    return a->window > 0 && position - a->window + 1 > 0 ? position - a->window + 1 : 0;
}

static inline int is_decode(const attention_arguments *a, const sequence *s) { return s->num_tokens == 1 || s->num_tokens * group_size(a) < 32; }

static inline const segment *segment_at(const sequence *s, int64_t position) {
    return s->num_segments > 1 && position >= s->segments[1].position ? &s->segments[1] : &s->segments[0];
}

/* Bytes from row 0 to the row of a position. */
static inline int64_t row_at(const attention_arguments *a, const sequence *s, int64_t position) {
    const segment *part = segment_at(s, position);
    return (part->first + position - part->position) * a->kv.token_bytes;
}

static inline int64_t first_split(const attention_arguments *a, const sequence *s) { return first_seen(a, s->start) / DECODE_SPLIT; }

static inline int64_t num_splits(const attention_arguments *a, const sequence *s) {
    return (s->start + s->num_tokens - 1) / DECODE_SPLIT + 1 - first_split(a, s);
}

static inline int64_t padded32(int64_t n) { return (n + 31) / 32 * 32; }

/* Floats of a partial: maximum, total, and from 16 on the weighted values of one query head. */
static inline int64_t partial_floats(const attention_arguments *a) { return 16 + padded32(a->head_dim); }

static inline int64_t panel_blocks(const sequence *s) { return (s->start + s->num_tokens + PANEL_BLOCK - 1) / PANEL_BLOCK; }

/* Of one head of keys. */
static inline int64_t panel_bytes(const attention_arguments *a, const sequence *s) {
    return panel_blocks(s) * PANEL_BLOCK * (a->head_dim + padded32(a->head_dim)) * 2;
}

/* `panels`: whether the level has them. */
static inline int64_t scratch_of(const attention_arguments *a, const sequence *s, int panels) {
    if (!is_decode(a, s)) return panels ? a->kv_heads * panel_bytes(a, s) : 0;
    return num_splits(a, s) == 1 ? 0 : s->num_tokens * a->heads * num_splits(a, s) * partial_floats(a) * 4;
}

#endif
