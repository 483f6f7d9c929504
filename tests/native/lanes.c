/* Tests of lanes: texts that are computed separately, by one thread each or by all, have the same bits as in one
 * batch. */
#include "proof.h"

#define MOST_THREADS 3
#define SIZE 96
#define TABLE 50

/* A small model with its own batch: rows of a table, positions added, attention of whole texts, requested rows. */
typedef struct {
    text_words words;
    float *hidden, *mixed, *result;
    rows_arguments word, place;
    texts_arguments attend;
    gather_arguments gather;
    operation operations[4];
    row_place places[3];
} net;

static float *table;

static void make_words(text_words *words, int64_t tokens) {
    for (int64_t **at = &words->token_ids; at <= &words->wanted; at++) *at = room(8 * tokens);
    words->texts = room(8 * (tokens + 2));
}

static void free_words(text_words *words) {
    for (int64_t **at = &words->token_ids; at <= &words->wanted; at++) free(*at);
    free(words->texts);
}

static void make_net(net *n, int64_t tokens, int some) {
    make_words(&n->words, tokens);
    n->hidden = room(tokens * SIZE * 4), n->mixed = room(tokens * SIZE / 3 * 4), n->result = room(tokens * SIZE / 3 * 4);
    n->word = (rows_arguments){(uint8_t *)table, n->words.token_ids, NULL, n->hidden, tokens, TABLE, SIZE, SIZE, 0, FORM_STORED_FP32, 0, 0, 1};
    n->place = n->word, n->place.ids = n->words.positions, n->place.add = 1;
    n->attend = (texts_arguments){n->hidden, n->hidden + 32, n->hidden + 64, n->mixed, n->words.texts, NULL, SIZE, 32, 2, 2, 16, (int64_t)1 << 40, (int64_t)1 << 40, 0, 1, 0.25, 0};
    n->gather = (gather_arguments){n->mixed, n->words.wanted, n->result, 32, tokens, 32, 32};
    const operation operations[4] = {{OP_ROWS, &n->word}, {OP_ROWS, &n->place}, {OP_TEXTS, &n->attend}, {OP_GATHER, &n->gather}};
    memcpy(n->operations, operations, sizeof operations);
    n->places[0] = (row_place){&n->word.count, 0, 0}, n->places[1] = (row_place){&n->place.count, 0, 0}, n->places[2] = (row_place){&n->gather.count, 1, 0};
    if (!some) n->words.wanted = (free(n->words.wanted), NULL);
}

static void free_net(net *n) {
    free_words(&n->words);
    free(n->hidden), free(n->mixed), free(n->result);
}

static text_steps steps_of(const net *n, int some) {
    return (text_steps){n->words, some ? n->result : n->mixed, n->operations, some ? 4 : 3, n->places, some ? 3 : 2};
}

/* Texts of 1 to 30 tokens, of which one to three are requested. Return the number requested. */
static int64_t fill(text_words *batch, int64_t texts, int64_t *wanted) {
    int64_t rows = 0, *starts = batch->texts->starts;
    batch->texts->count = texts, starts[0] = 0, wanted[0] = 0;
    for (int64_t t = 0; t < texts; t++) {
        const int64_t tokens = between(1, 30);
        starts[t + 1] = starts[t] + tokens;
        for (int64_t i = 0; i < tokens; i++) batch->token_ids[starts[t] + i] = below(TABLE), batch->positions[starts[t] + i] = i;
        for (int64_t i = 0, left = between(1, 3); i < tokens && left > 0; i += 1 + below(4), left--) batch->wanted[rows++] = starts[t] + i;
        wanted[t + 1] = rows;
    }
    return rows;
}

static void lanes_once(const text_words *batch, const int64_t *wanted, const text_steps *steps, int some) {
    const int64_t texts = batch->texts->count, rows = some ? wanted[texts] : batch->texts->starts[texts];
    int64_t cuts[22] = {0}, from[22] = {0}, count = 0;
    for (int64_t text = 0; text < texts;) {
        text += between(1, 3);
        if (text > texts) text = texts;
        cuts[++count] = text, from[count] = wanted[text];
    }
    float *expected = room(rows * 32 * 4), *found = room(rows * 32 * 4);
    const int64_t whole[2] = {0, texts}, all[2] = {0, wanted[texts]};
    lanes_arguments a = {*batch, expected, whole, all, steps, 1, 1, 1, 32};
    if (!some) a.batch.wanted = NULL;
    armature_run_lanes(&a);
    for (a.together = 0; a.together <= count; a.together += 1 + below(3)) {
        memset(found, 0x7b, (size_t)(rows * 32) * 4);
        a.hidden = found, a.texts = cuts, a.wanted = from, a.count = count, a.threads = threads;
        armature_run_lanes(&a);
        if (memcmp(expected, found, (size_t)(rows * 32) * 4) != 0) failed("%d texts in %d lanes, %d of them together: other bits", (int)texts, (int)count, (int)a.together);
    }
    free(expected), free(found);
}

int64_t texts_in_lanes(void) {
    table = room(TABLE * SIZE * 4);
    for (int64_t i = 0; i < TABLE * SIZE; i++) table[i] = number();
    for (int some = 0; some < 2; some++)
        for (int64_t round = 0; round < 6; round++) {
            net nets[1 + MOST_THREADS];
            text_steps steps[1 + MOST_THREADS];
            text_words batch;
            int64_t wanted[22];
            make_words(&batch, 20 * 30);
            for (int i = 0; i <= MOST_THREADS; i++) make_net(nets + i, 20 * 30, some), steps[i] = steps_of(nets + i, some);
            fill(&batch, between(1, 20), wanted);
            lanes_once(&batch, wanted, steps, some);
            for (int i = 0; i <= MOST_THREADS; i++) free_net(nets + i);
            free_words(&batch);
        }
    free(table);
    return 12;
}
