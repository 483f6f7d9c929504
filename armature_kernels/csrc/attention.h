/* Shared parts of attention: which kernel a sequence uses, addresses of tokens, and the layout of scratch. No vectors
 * here.
 *
 * Few queries (decode, attention_decode.h) read keys and values in place, because memory bandwidth is the cost. Their
 * contexts are split at multiples of DECODE_SPLIT positions, whatever else is in the batch and however many threads
 * there are. Parts that are not computed by one task alone are *partials* in scratch, which are merged in the order
 * of their positions. Many queries (prefill) use panels, if the level has them. */
#ifndef ARMATURE_ATTENTION_H
#define ARMATURE_ATTENTION_H

#include "level.h"

#define MAX_HEAD_DIM 512
#define MAX_GROUP 32     /* query heads that share one KV head */
#define DECODE_SPLIT 256 /* positions of a part */
#define PANEL_BLOCK 128  /* positions packed into panels at a time */

static inline int64_t group_size(const attention_arguments *a) { return a->heads / a->kv_heads; }

/* Return the first position that a query at `position` sees. */
static inline int64_t first_seen(const attention_arguments *a, int64_t position) {
    return a->window > 0 && position - a->window + 1 > 0 ? position - a->window + 1 : 0;
}

static inline int is_decode(const attention_arguments *a, const sequence *s) { return s->num_tokens == 1 || s->num_tokens * group_size(a) < 32; }

static inline const segment *segment_at(const sequence *s, int64_t position) {
    return s->num_segments > 1 && position >= s->segments[1].position ? &s->segments[1] : &s->segments[0];
}

/* Return the offset in bytes of a position's row from row 0. */
static inline int64_t row_at(const attention_arguments *a, const sequence *s, int64_t position) {
    const segment *part = segment_at(s, position);
    return (part->first + position - part->position) * a->kv.token_bytes;
}

static inline int64_t first_split(const attention_arguments *a, const sequence *s) { return first_seen(a, s->start) / DECODE_SPLIT; }

static inline int64_t num_splits(const attention_arguments *a, const sequence *s) {
    return (s->start + s->num_tokens - 1) / DECODE_SPLIT + 1 - first_split(a, s);
}

static inline int64_t padded32(int64_t n) { return (n + 31) / 32 * 32; }

/* Floats of a partial: maximum, total, and from index 16 on the weighted values of one query head. */
static inline int64_t partial_floats(const attention_arguments *a) { return 16 + padded32(a->head_dim); }

static inline int64_t panel_blocks(const sequence *s) { return (s->start + s->num_tokens + PANEL_BLOCK - 1) / PANEL_BLOCK; }

/* Per KV head. */
static inline int64_t panel_bytes(const attention_arguments *a, const sequence *s) {
    return panel_blocks(s) * PANEL_BLOCK * (a->head_dim + padded32(a->head_dim)) * 2;
}

/* `panels`: true if the level has panels. */
static inline int64_t scratch_of(const attention_arguments *a, const sequence *s, int panels) {
    if (!is_decode(a, s)) return panels ? a->kv_heads * panel_bytes(a, s) : 0;
    return num_splits(a, s) == 1 ? 0 : s->num_tokens * a->heads * num_splits(a, s) * partial_floats(a) * 4;
}

#endif
