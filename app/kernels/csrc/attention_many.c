/* Prefill: many queries against panels of keys and values, packed once for all queries and heads that share them. */
#include "attention_bf16.h"

#include <math.h>
#include <string.h>

#ifdef ARMATURE_X86

#define BLOCK 128           /* tokens whose scores are held: four panels of keys */
#define ROWS 48             /* pairs of query and head that share a block while it lies in the cache */
#define PANELS (BLOCK / 32) /* panels of keys in a block */

static inline int64_t context_of(const sequence *s) { return s->start + s->num_tokens; }
static inline int64_t padded(int64_t n) { return (n + 31) / 32 * 32; }
static inline int64_t blocks_of(const sequence *s) { return (context_of(s) + BLOCK - 1) / BLOCK; }

/* Keys: [32-token panel][head_dim / 2][32 tokens] pairs along head_dim; values after them: [32 outputs][token pairs][32] pairs along tokens. */
int64_t panel_bytes(const attention *a, const sequence *s) {
    return blocks_of(s) * BLOCK * (a->head_dim + padded(a->head_dim)) * 2;
}

int64_t queries_together(const attention *a) { return ROWS / group_of(a) > 0 ? ROWS / group_of(a) : 1; }

static const segment *segment_at(const sequence *s, int64_t position) {
    return s->num_segments > 1 && position >= s->segments[1].position ? &s->segments[1] : &s->segments[0];
}

/* Packs the 32 tokens from 32 * panel on; what is beyond the context is zero. */
TARGET_BF16 void pack_context(const attention *a, const sequence *s, int64_t kv_head, int64_t panel, uint8_t *panels) {
    const int64_t pairs = a->head_dim / 2, context = context_of(s), token_pairs = blocks_of(s) * BLOCK / 2;
    uint32_t *keys = (uint32_t *)panels + panel * pairs * 32;
    uint16_t *values = (uint16_t *)(panels + blocks_of(s) * BLOCK * a->head_dim * 2);
    for (int64_t t = 0; t < 32; t++) {
        const int64_t position = panel * 32 + t, slot = (position / 2 * 32) * 2 + (position & 1);
        const segment *part = segment_at(s, position);
        const int64_t offset = (position - part->position) * a->key_stride + kv_head * a->head_dim;
        const int inside = position < context;
        for (int64_t p = 0; p < pairs; p++) {
            uint32_t pair = 0;
            if (inside) memcpy(&pair, part->key + offset + 2 * p, 4);
            keys[p * 32 + t] = pair;
        }
        for (int64_t d = 0; d < padded(a->head_dim); d++)
            values[d / 32 * token_pairs * 64 + slot + d % 32 * 2] = inside && d < a->head_dim ? part->value[offset + d] : 0;
    }
}

/* One tile of up to 12 rows: row r is query first + r / group, head r % group. */
typedef struct {
    int count;
    uint32_t queries[MAX_TILE_ROWS * MAX_HEAD_DIM / 2];
    float sums[MAX_TILE_ROWS][MAX_HEAD_DIM], maximum[MAX_TILE_ROWS], total[MAX_TILE_ROWS];
    int64_t position[MAX_TILE_ROWS];
} query_tile;

static TARGET_BF16 void load_tile(query_tile *tile, const attention *a, const sequence *s, int64_t first_query, int row, int rows, int64_t kv_head) {
    const int64_t group = group_of(a);
    tile->count = tile_rows(row, rows);
    memset(tile->sums, 0, sizeof tile->sums);
    for (int r = 0; r < tile->count; r++) {
        int64_t query = first_query + (row + r) / group, head = kv_head * group + (row + r) % group;
        const uint16_t *source = a->query + (s->first + query) * a->query_stride + head * a->head_dim;
        for (int64_t p = 0; p < a->head_dim / 2; p++) memcpy(&tile->queries[p * tile->count + r], source + 2 * p, 4);
        tile->maximum[r] = -INFINITY, tile->total[r] = 0, tile->position[r] = s->start + query;
    }
}

/* One row's scores of a block to weights, interleaved as the next product's tile; returns what earlier sums are multiplied by. */
static TARGET_BF16 float weigh_row(query_tile *tile, int r, const attention *a, float (*scores)[MAX_TILE_ROWS][32], int64_t block, int panels, uint32_t *weights) {
    const int64_t from = first_seen(a, tile->position[r]) - block, to = tile->position[r] + 1 - block; /* seen lanes of the block */
    __m512 part[2 * PANELS], largest = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int i = 0; i < 2 * panels; i++) {
        int64_t lane = i * 16;
        __mmask16 seen = to <= lane ? 0 : first_lanes(to - lane);
        if (from > lane) seen &= from - lane >= 16 ? 0 : (__mmask16) ~((1u << (from - lane)) - 1);
        part[i] = _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), finish_scores(_mm512_loadu_ps(&scores[i / 2][r][i % 2 * 16]), a));
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

static TARGET_BF16 void attend_block(query_tile *tile, const attention *a, const sequence *s, int64_t block, const uint8_t *panels) {
    const int64_t pairs = a->head_dim / 2, token_pairs = blocks_of(s) * BLOCK / 2;
    const uint8_t *values = panels + blocks_of(s) * BLOCK * a->head_dim * 2;
    float scores[PANELS][MAX_TILE_ROWS][32] __attribute__((aligned(64))), product[MAX_TILE_ROWS][32] __attribute__((aligned(64)));
    uint32_t weights[MAX_TILE_ROWS * BLOCK / 2];
    float rescale[MAX_TILE_ROWS];
    int64_t seen = tile->position[tile->count - 1] + 1 - block; /* by the tile's last query */
    int num = seen >= BLOCK ? PANELS : (int)((seen + 31) / 32);
    for (int i = 0; i < num; i++) {
        const uint8_t *keys = panels + (block / 32 + i) * pairs * 128;
        tile_product(tile->count, tile->queries, keys, pairs, keys, 0, scores[i][0]);
    }
    for (int r = 0; r < tile->count; r++) rescale[r] = weigh_row(tile, r, a, scores, block, num, weights);
    for (int64_t d = 0; d < padded(a->head_dim); d += 32) {
        const uint8_t *part = values + (d / 32 * token_pairs + block / 2) * 128;
        tile_product(tile->count, weights, part, num * 16, part, 0, product[0]);
        for (int r = 0; r < tile->count; r++)
            for (int i = 0; i < 32; i += 16) {
                float *sum = &tile->sums[r][d + i];
                _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_loadu_ps(sum), _mm512_set1_ps(rescale[r]), _mm512_loadu_ps(&product[r][i])));
            }
    }
}

TARGET_BF16 void attend_many(const attention *a, const sequence *s, int64_t first_query, int64_t kv_head, const uint8_t *panels) {
    const int64_t group = group_of(a), left = s->num_tokens - first_query;
    const int64_t queries = left < queries_together(a) ? left : queries_together(a), rows = queries * group;
    query_tile tiles[ROWS / MAX_TILE_ROWS];
    int num_tiles = 0;
    for (int64_t row = 0; row < rows; row += tiles[num_tiles++].count) load_tile(&tiles[num_tiles], a, s, first_query, (int)row, (int)rows, kv_head);
    int64_t first_block = first_seen(a, s->start + first_query) / BLOCK * BLOCK, last = s->start + first_query + queries;
    for (int64_t block = first_block; block < last; block += BLOCK)
        for (int i = 0; i < num_tiles; i++)
            if (tiles[i].position[tiles[i].count - 1] >= block) attend_block(&tiles[i], a, s, block, panels);
    for (int i = 0, row = 0; i < num_tiles; row += tiles[i++].count)
        for (int r = 0; r < tiles[i].count; r++) {
            int64_t query = first_query + (row + r) / group, head = kv_head * group + (row + r) % group;
            uint16_t *out = a->out + (s->first + query) * a->out_stride + head * a->head_dim;
            for (int64_t d = 0; d < a->head_dim; d += 16)
                narrow(out + d, _mm512_div_ps(_mm512_loadu_ps(&tiles[i].sums[r][d]), _mm512_set1_ps(tiles[i].total[r])), 0xffff);
        }
}

#endif
