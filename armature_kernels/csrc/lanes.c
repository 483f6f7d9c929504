/* Lanes of a batch of texts: whole texts that one thread takes through all operations, in separate memory. Threads
 * that divide every operation wait for each other after each one. With lanes they wait once, at the end. A thread
 * that loses its core delays only its own lane: the others claim the remaining lanes. */
#include <string.h>

#include <omp.h>

#include "level.h"

/* Set the numbers of rows that recorded operations keep; sizes[which] each. */
EXPORT void armature_resize(const row_place *places, int64_t count, const int64_t *sizes) {
    const level *l = armature_now();
    for (int64_t i = 0; i < count; i++) {
        const int64_t rows = sizes[places[i].which];
        *places[i].word = places[i].is_height ? tile_height(l, rows) : rows;
    }
}

/* The part of the batch that lane `i` has. */
typedef struct {
    int64_t text, texts, token, tokens, row, rows; /* first index and count of each */
} part;

static part part_of(const lanes_arguments *a, int64_t i) {
    const int64_t *starts = a->batch.texts->starts, text = a->texts[i], end = a->texts[i + 1];
    part p = {text, end - text, starts[text], starts[end] - starts[text], starts[text], starts[end] - starts[text]};
    if (a->batch.wanted) p.row = a->wanted[i], p.rows = a->wanted[i + 1] - a->wanted[i];
    return p;
}

/* Write the part's texts, as if there were no others, to where the steps read them. */
static void describe(const text_words *batch, const part *p, const text_steps *steps) {
    const text_words *own = &steps->words;
    const size_t bytes = (size_t)p->tokens * sizeof(int64_t);
    memcpy(own->token_ids, batch->token_ids + p->token, bytes);
    memcpy(own->positions, batch->positions + p->token, bytes);
    if (own->types) memcpy(own->types, batch->types + p->token, bytes);
    for (int64_t r = 0; batch->wanted && r < p->rows; r++) own->wanted[r] = batch->wanted[p->row + r] - p->token;
    own->texts->count = p->texts;
    for (int64_t t = 0; t <= p->texts; t++) own->texts->starts[t] = batch->texts->starts[p->text + t] - p->token;
    const int64_t sizes[2] = {p->tokens, p->rows};
    armature_resize(steps->places, steps->num_places, sizes);
}

/* Called by the whole team. */
static void walk(const level *l, const text_steps *steps) {
    for (int64_t i = 0; i < steps->count; i++) l->kernels[steps->operations[i].code](steps->operations[i].arguments);
}

static void collect(const lanes_arguments *a, const part *p, const text_steps *steps) {
    memcpy(a->hidden + p->row * a->size, steps->hidden, (size_t)(p->rows * a->size) * sizeof *a->hidden);
}

/* Run lane `i` by `threads` threads together. */
static void run_lane(const level *l, const lanes_arguments *a, int64_t i, const text_steps *steps, int threads) {
    const part p = part_of(a, i);
    describe(&a->batch, &p, steps);
#pragma omp parallel num_threads(threads)
    walk(l, steps);
    collect(a, &p, steps);
}

/* First all threads compute the shared lanes together, with the first of the steps. Then each thread claims one lane
 * after the other, with its own steps. The result does not depend on which threads compute a lane, except where a
 * kernel says so. */
EXPORT void armature_run_lanes(const lanes_arguments *a) {
    const level *l = armature_now();
    for (int64_t i = 0; i < a->together; i++) run_lane(l, a, i, a->steps, (int)a->threads);
    if (a->together == a->count) return;
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)a->threads)
    for (int64_t i = a->together; i < a->count; i++) run_lane(l, a, i, a->steps + 1 + omp_get_thread_num(), 1);
}
