/* A layer's keys and values in the library's layout: bf16, fp32, or int8 with a scale for each head. */
#ifndef ARMATURE_CACHE_H
#define ARMATURE_CACHE_H

#include "proof.h"

typedef struct {
    int64_t rows, kv_heads, head_dim, int8, wide;
    uint8_t *bytes;
    kv_rows kv;
} cache;

enum { CACHE_BF16, CACHE_INT8, CACHE_FP32 };

/* Filled with plausible keys and values if `filled`, else with any bytes. */
cache new_cache(int64_t rows, int64_t kv_heads, int64_t head_dim, int kind, int filled);
/* The value of element i of a head's key (or value). */
float cached(const cache *c, int values, int64_t row, int64_t head, int64_t i);
/* The scale of a head's key or value: int8 only. */
float cached_scale(const cache *c, int values, int64_t row, int64_t head);

#endif
