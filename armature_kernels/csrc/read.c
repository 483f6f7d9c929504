/* Reads memory as fast as products with prefetching do: the read ceiling that they are compared with
 * (armature_kernels/ceilings.py). */
#include <string.h>

#include "level.h"

typedef uint64_t words __attribute__((vector_size(64)));

#define AHEAD 8192 /* of a single stream */
#define TURN 256   /* bytes of one stream before those of the next */

static inline void read_turn(const uint8_t *p, int64_t ahead, words *all) {
    for (int i = 0; i < TURN; i += 64) {
        words x;
        __builtin_prefetch(p + i + ahead);
        memcpy(&x, p + i, sizeof x);
        *all ^= x;
    }
}

/* Return the exclusive or of `bytes` bytes, up to the last whole TURN, read in as many streams as the level's products of one
 * row read. */
EXPORT uint64_t armature_read(const uint8_t *p, int64_t bytes) {
    const level *now = armature_now();
    const int64_t streams = now ? now->streams : 1, ahead = streams > 1 ? now->stream_ahead : AHEAD, turns = bytes / TURN, each = turns / streams;
    words all = {0}; /* one, which baseline registers hold */
    for (int64_t turn = 0; turn < each; turn++)
        for (int64_t stream = 0; stream < streams; stream++) read_turn(p + (stream * each + turn) * TURN, ahead, &all);
    for (int64_t turn = each * streams; turn < turns; turn++) read_turn(p + turn * TURN, ahead, &all);
    uint64_t result = 0;
    for (int i = 0; i < 8; i++) result ^= all[i];
    return result;
}
