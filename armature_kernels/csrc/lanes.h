/* Lanes: texts of one batch that go through recorded operations separately (lanes.c). Only ops.h includes this file. */
#ifndef ARMATURE_LANES_H
#define ARMATURE_LANES_H

#include "ops.h"

/* A number that recorded operations keep: a number of rows, or the height of tiles for that number. `which`: 0 all
 * tokens, 1 the requested tokens. */
typedef struct {
    int64_t *word, which, is_height;
} row_place;

/* Texts one after the other, and `wanted`, ascending: the tokens whose hidden states are requested, NULL for all.
 * `types` NULL: not read. */
typedef struct {
    int64_t *token_ids, *positions, *types, *wanted;
    text_list *texts;
} text_words;

/* Recorded operations with separate memory, the addresses from which they read their texts, and of their hidden
 * states fp32 [wanted, size]. */
typedef struct {
    text_words words;
    const float *hidden;
    const operation *operations;
    int64_t count;
    const row_place *places;
    int64_t num_places;
} text_steps;

/* A batch, and hidden [wanted, size]. Lane i has texts [texts[i], texts[i + 1]) and rows [wanted[i], wanted[i + 1])
 * of the requested tokens. All `threads` compute the first `together` of `count` lanes with steps[0]; one thread
 * computes each of the others, thread t with steps[1 + t]. */
typedef struct {
    text_words batch;
    float *hidden;
    const int64_t *texts, *wanted;
    const text_steps *steps;
    int64_t count, together, threads, size;
} lanes_arguments;

#endif
