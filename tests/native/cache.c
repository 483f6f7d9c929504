/* Keys and values: their position in a row of the cache, and their values. */
#include "cache.h"

static uint8_t *head_at(const cache *c, int values, int64_t row, int64_t head) {
    return (values ? c->kv.values : c->kv.keys) + row * c->kv.token_bytes + head * c->head_dim * (c->int8 ? 1 : c->wide ? 4 : 2);
}

static uint8_t *scale_at(const cache *c, int values, int64_t row, int64_t head) {
    return (values ? c->kv.value_scales : c->kv.key_scales) + row * c->kv.token_bytes + head * 4;
}

float cached_scale(const cache *c, int values, int64_t row, int64_t head) {
    float scale;
    memcpy(&scale, scale_at(c, values, row, head), 4);
    return scale;
}

float cached(const cache *c, int values, int64_t row, int64_t head, int64_t i) {
    const uint8_t *at = head_at(c, values, row, head);
    return c->int8 ? cached_scale(c, values, row, head) * (float)((const int8_t *)at)[i] : get_element(at, c->wide, i);
}

static void fill_head(const cache *c, int values, int64_t row, int64_t head) {
    uint8_t *at = head_at(c, values, row, head);
    const float scale = (1 + fabsf(number())) / 100;
    for (int64_t i = 0; i < c->head_dim; i++)
        if (c->int8) ((int8_t *)at)[i] = (int8_t)between(-127, 127);
        else set_element(at, c->wide, i, 2 * number());
    if (c->int8) memcpy(scale_at(c, values, row, head), &scale, 4);
}

cache new_cache(int64_t rows, int64_t kv_heads, int64_t head_dim, int kind, int filled) {
    const int64_t all = kv_heads * head_dim, int8 = kind == CACHE_INT8, wide = kind == CACHE_FP32;
    cache c = {rows, kv_heads, head_dim, int8, wide, NULL, {NULL, NULL, NULL, NULL, 0}};
    c.kv.token_bytes = int8 ? (2 * all + 8 * kv_heads + 63) / 64 * 64 : (wide ? 8 : 4) * all;
    c.bytes = room(rows * c.kv.token_bytes);
    c.kv.keys = c.bytes, c.kv.values = c.bytes + all * (int8 ? 1 : wide ? 4 : 2);
    if (int8) c.kv.key_scales = c.bytes + 2 * all, c.kv.value_scales = c.kv.key_scales + 4 * kv_heads;
    for (int64_t at = 0; filled && at < rows * kv_heads * 2; at++) fill_head(&c, (int)(at % 2), at / 2 / kv_heads, at / 2 % kv_heads);
    return c;
}
