/* Prefill: many queries against panels of bf16 keys and values (tile_bf16.h), which are packed once for all queries
 * and heads that share them. int8 codes are converted to bf16 while packing. */
#ifndef ARMATURE_ATTENTION_PANELS_H
#define ARMATURE_ATTENTION_PANELS_H

#include "decode_lanes.h"
#include "tile_bf16.h"

#define ROWS 48                   /* pairs of query and head that use a block while it is in the cache */
#define PANELS (PANEL_BLOCK / 32) /* panels of keys in a block */

static int64_t queries_together(const attention_arguments *a) { return ROWS / group_size(a) > 0 ? ROWS / group_size(a) : 1; }

static int64_t prompt_tasks(const attention_arguments *a, const sequence *s) {
    return is_decode(a, s) ? 0 : (s->num_tokens + queries_together(a) - 1) / queries_together(a) * a->kv_heads;
}

/* Return one head of one row in bf16: in place, or dequantized in `room`. */
INLINE const uint8_t *as_bf16(const uint8_t *head, const uint8_t *scale, int64_t size, uint16_t *room) {
    if (!scale) return head;
    float own;
    memcpy(&own, scale, 4);
    for (int64_t i = 0; i < size; i += STEP) {
        vf x[2];
        if (i + STEP <= size) widen(FROM_INT8, head + i, x);
        else widen_tail(FROM_INT8, head + i, size - i, x);
        for (int v = 0; v < 2; v++) bf16_store(room + i + v * LANES, x[v] * own);
    }
    return (const uint8_t *)room;
}

/* Keys: [32-token panel][head_dim / 2][32 tokens] pairs along head_dim. Values after them: [32 outputs][token
 * pairs][32] pairs along tokens. Packs the 32 tokens from 32 * panel on; tokens beyond the context are zero. */
static void pack_context(const attention_arguments *a, const sequence *s, int64_t kv_head, int64_t panel, uint8_t *panels) {
    const int64_t pairs = a->head_dim / 2, context = s->start + s->num_tokens, token_pairs = panel_blocks(s) * PANEL_BLOCK / 2;
    uint32_t *keys = (uint32_t *)panels + panel * pairs * 32;
    uint16_t *values = (uint16_t *)(panels + panel_blocks(s) * PANEL_BLOCK * a->head_dim * 2);
    for (int64_t t = 0; t < 32; t++) {
        const int64_t position = panel * 32 + t, slot = (position / 2 * 32) * 2 + (position & 1);
        const int inside = position < context;
        const int64_t row = row_at(a, s, inside ? position : context - 1), head = row + kv_head * a->head_dim * (a->kv.key_scales ? 1 : 2);
        uint16_t room[2][MAX_HEAD_DIM + STEP];
        const uint8_t *key = as_bf16(a->kv.keys + head, a->kv.key_scales ? a->kv.key_scales + row + 4 * kv_head : NULL, a->head_dim, room[0]);
        const uint8_t *value = as_bf16(a->kv.values + head, a->kv.value_scales ? a->kv.value_scales + row + 4 * kv_head : NULL, a->head_dim, room[1]);
        for (int64_t p = 0; p < pairs; p++) {
            uint32_t pair = 0;
            if (inside) memcpy(&pair, key + 4 * p, 4);
            keys[p * 32 + t] = pair;
        }
        for (int64_t d = 0; d < padded32(a->head_dim); d++) {
            uint16_t number = 0;
            if (inside && d < a->head_dim) memcpy(&number, value + 2 * d, 2);
            values[d / 32 * token_pairs * 64 + slot + d % 32 * 2] = number;
        }
    }
}

/* Pack the contexts of all sequences with many queries, from the first block that any query sees. */
static void pack_panels(const attention_arguments *a) {
    uint8_t *panels = a->step->scratch;
    for (int64_t i = 0; i < a->step->num_sequences; i++) {
        const sequence *s = &a->step->sequences[i];
        if (prompt_tasks(a, s)) {
            const int64_t num_panels = panel_blocks(s) * PANELS, first = first_seen(a, s->start) / PANEL_BLOCK * PANELS;
#pragma omp for collapse(2) schedule(static) nowait
            for (int64_t kv_head = 0; kv_head < a->kv_heads; kv_head++)
                for (int64_t panel = first; panel < num_panels; panel++) pack_context(a, s, kv_head, panel, panels + kv_head * panel_bytes(a, s));
        }
        panels += scratch_of(a, s, 1);
    }
#pragma omp barrier
}

/* e^x, relative error below 2^-22: x = n ln 2 + r, a degree-6 Taylor polynomial on |r| <= ln 2 / 2 (Cephes' range reduction). -inf gives 0, NaN NaN. */
INLINE __m512 exp16(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x); /* the second operand is returned if one is NaN */
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 y = _mm512_set1_ps(1.0f / 720);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 120));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 24));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 6));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.5f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, n);
}

/* scores * scale, bounded by tanh if the model has a soft cap, plus ALiBi for 16 keys of which the first is `ahead` of the
 * query */
INLINE __m512 finish_scores(__m512 dots, const attention_arguments *a, int64_t head, int64_t ahead) {
    const __m512 cap = _mm512_set1_ps((float)a->softcap);
    __m512 scores = _mm512_mul_ps(dots, _mm512_set1_ps((float)a->scale));
    if (a->softcap > 0) scores = _mm512_mul_ps(cap, vf_tanh(_mm512_div_ps(scores, cap)));
    if (!a->slopes) return scores;
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512 distances = _mm512_cvtepi32_ps(_mm512_add_epi32(lanes, _mm512_set1_epi32((int)ahead)));
    return _mm512_fmadd_ps(_mm512_set1_ps(a->slopes[head]), distances, scores);
}

/* One tile of up to 12 rows: row r is query first + r / group, head r % group. */
typedef struct {
    int count;
    uint32_t queries[BF16_ROWS * MAX_HEAD_DIM / 2];
    float sums[BF16_ROWS][MAX_HEAD_DIM], maximum[BF16_ROWS], total[BF16_ROWS];
    int64_t position[BF16_ROWS], head[BF16_ROWS];
} query_tile;

static void load_tile(query_tile *tile, const attention_arguments *a, const sequence *s, int64_t first_query, int row, int rows, int64_t kv_head) {
    const int64_t group = group_size(a);
    tile->count = tile_rows(row, rows);
    memset(tile->sums, 0, sizeof tile->sums);
    for (int r = 0; r < tile->count; r++) {
        int64_t query = first_query + (row + r) / group, head = kv_head * group + (row + r) % group;
        const uint16_t *source = (const uint16_t *)a->query + (s->first + query) * a->query_stride + head * a->head_dim;
        for (int64_t p = 0; p < a->head_dim / 2; p++) memcpy(&tile->queries[p * tile->count + r], source + 2 * p, 4);
        tile->position[r] = s->start + query, tile->head[r] = head;
        /* A sink counts as a first position whose value is zero. */
        tile->maximum[r] = a->sinks ? a->sinks[head] : -INFINITY, tile->total[r] = a->sinks ? 1 : 0;
    }
}

/* Turn one row's scores of a block into weights, interleaved for the next product. Return the factor for earlier
 * sums. */
static float weigh_row(query_tile *tile, int r, const attention_arguments *a, float (*scores)[BF16_ROWS][32], int64_t block, int panels, uint32_t *weights) {
    const int64_t from = first_seen(a, tile->position[r]) - block, to = tile->position[r] + 1 - block; /* visible lanes of the block */
    __m512 part[2 * PANELS], largest = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int i = 0; i < 2 * panels; i++) {
        int64_t lane = i * 16;
        __mmask16 seen = to <= lane ? 0 : first_lanes(to - lane);
        if (from > lane) seen &= from - lane >= 16 ? 0 : (__mmask16) ~((1u << (from - lane)) - 1);
        part[i] = _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), finish_scores(_mm512_loadu_ps(&scores[i / 2][r][i % 2 * 16]), a, tile->head[r], block + lane - tile->position[r]));
        largest = _mm512_max_ps(largest, part[i]);
    }
    float top = _mm512_reduce_max_ps(largest), rescale = raise_maximum(&tile->maximum[r], top);
    const __m512 maximum = _mm512_set1_ps(tile->maximum[r] == -INFINITY ? 0 : tile->maximum[r]);
    for (int i = 0; i < panels; i++) {
        __m512 low = exp16(_mm512_sub_ps(part[2 * i], maximum)), high = exp16(_mm512_sub_ps(part[2 * i + 1], maximum));
        sum = _mm512_add_ps(sum, _mm512_add_ps(low, high));
        uint32_t pairs[16];
        _mm512_storeu_si512(pairs, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        for (int p = 0; p < 16; p++) weights[(i * 16 + p) * tile->count + r] = pairs[p];
    }
    tile->total[r] = tile->total[r] * rescale + _mm512_reduce_add_ps(sum);
    return rescale;
}

static void attend_block(query_tile *tile, const attention_arguments *a, const sequence *s, int64_t block, const uint8_t *panels) {
    const int64_t pairs = a->head_dim / 2, token_pairs = panel_blocks(s) * PANEL_BLOCK / 2;
    const uint8_t *values = panels + panel_blocks(s) * PANEL_BLOCK * a->head_dim * 2;
    float scores[PANELS][BF16_ROWS][32] __attribute__((aligned(64))), product[BF16_ROWS][32] __attribute__((aligned(64)));
    uint32_t weights[BF16_ROWS * PANEL_BLOCK / 2];
    float rescale[BF16_ROWS];
    int64_t seen = tile->position[tile->count - 1] + 1 - block; /* by the tile's last query */
    int num = seen >= PANEL_BLOCK ? PANELS : (int)((seen + 31) / 32);
    for (int i = 0; i < num; i++) {
        const uint8_t *keys = panels + (block / 32 + i) * pairs * 128;
        tile_product(tile->count, tile->queries, keys, pairs, NULL, 0, scores[i][0]);
    }
    for (int r = 0; r < tile->count; r++) rescale[r] = weigh_row(tile, r, a, scores, block, num, weights);
    for (int64_t d = 0; d < padded32(a->head_dim); d += 32) {
        const uint8_t *part = values + (d / 32 * token_pairs + block / 2) * 128;
        tile_product(tile->count, weights, part, num * 16, NULL, 0, product[0]);
        for (int r = 0; r < tile->count; r++)
            for (int i = 0; i < 32; i += 16) {
                float *sum = &tile->sums[r][d + i];
                _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_loadu_ps(sum), _mm512_set1_ps(rescale[r]), _mm512_loadu_ps(&product[r][i])));
            }
    }
}

static void attend_prompt(const attention_arguments *a, const sequence *s, int64_t task, const uint8_t *scratch) {
    const int64_t group = group_size(a), kv_head = task % a->kv_heads, first_query = task / a->kv_heads * queries_together(a);
    const int64_t left = s->num_tokens - first_query, queries = left < queries_together(a) ? left : queries_together(a), rows = queries * group;
    const uint8_t *panels = scratch + kv_head * panel_bytes(a, s);
    query_tile tiles[ROWS / BF16_ROWS];
    int num_tiles = 0;
    for (int64_t row = 0; row < rows; row += tiles[num_tiles++].count) load_tile(&tiles[num_tiles], a, s, first_query, (int)row, (int)rows, kv_head);
    int64_t first_block = first_seen(a, s->start + first_query) / PANEL_BLOCK * PANEL_BLOCK, last = s->start + first_query + queries;
    for (int64_t block = first_block; block < last; block += PANEL_BLOCK)
        for (int i = 0; i < num_tiles; i++)
            if (tiles[i].position[tiles[i].count - 1] >= block) attend_block(&tiles[i], a, s, block, panels);
    for (int i = 0, row = 0; i < num_tiles; row += tiles[i++].count)
        for (int r = 0; r < tiles[i].count; r++) {
            int64_t query = first_query + (row + r) / group, head = kv_head * group + (row + r) % group;
            uint16_t *out = (uint16_t *)a->out + (s->first + query) * a->out_stride + head * a->head_dim;
            for (int64_t d = 0; d < a->head_dim; d += 16)
                narrow(out + d, _mm512_div_ps(_mm512_loadu_ps(&tiles[i].sums[r][d]), _mm512_set1_ps(tiles[i].total[r])), first_lanes(a->head_dim - d));
        }
}

#endif
