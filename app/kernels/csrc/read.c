/* Reads memory as fast as products with prefetching do: the read ceiling that they are compared with
 * (app/kernels/ceilings.py). */
#include <string.h>

#include "level.h"

typedef uint64_t words __attribute__((vector_size(64)));

#define AHEAD 8192

/* Return the exclusive or of `bytes` bytes, up to the last whole line of 64. */
EXPORT uint64_t armature_read(const uint8_t *p, int64_t bytes) {
    words all[4] = {{0}};
    for (int64_t i = 0; i + 256 <= bytes; i += 256)
        for (int line = 0; line < 4; line++) {
            words x;
            __builtin_prefetch(p + i + line * 64 + AHEAD);
            memcpy(&x, p + i + line * 64, sizeof x);
            all[line] ^= x;
        }
    uint64_t result = 0;
    for (int line = 0; line < 4; line++)
        for (int i = 0; i < 8; i++) result ^= all[line][i];
    return result;
}
