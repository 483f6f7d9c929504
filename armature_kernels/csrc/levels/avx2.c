/* AVX2 with FMA: Intel Haswell, AMD Excavator and newer. */
#define LEVEL level_avx2
#define NAME "avx2"
#define LANES 8
#define BLOCK 4
#define TILE_ROWS 6
#define TILE_ALIGN 1
/* One and two rows wait for memory, of which these processors read four streams per core faster than one: on two cores of
 * Zen 2 four reach 36 to 51 GB/s while one reaches 28 to 35, with prefetches of up to 512 bytes; 1 KB or more, which help
 * a single stream of products, take 1.2 times as long. */
#define STREAMS 4
#define STREAM_AHEAD 256 /* prefetch distance in bytes of each */

/* The same where there are too few panels for that: by then the processor's own prefetching has brought lines to the
 * second cache, while more in flight fill the buffers of the first: 2 KB instead of 8 is 1.08 to 1.15 times as fast on
 * Zen 3, and for one row 1 KB instead of 2 1.07 to 1.09 times on Zen 2. From three rows on, the farther distance is 1.02 to
 * 1.1 times as fast. */
#define AHEAD(rows) ((rows) == 1 ? 1024 : (rows) == 2 ? 2048 : 8192)
#define AHEAD_NARROW 1024 /* as above: 1.17 times as fast as 2 KB on Zen 2; of fp32 weights 1 to 8 KB are equally fast */

/* Bytes of panels per tile, in int4 one panel of 2,048 inputs or more. These processors have an L2 of 256 or 512 KB, in
 * which 512 KB of panels do not stay: 32 rows of int4 take 0.83 to 0.92 of the time, 64 to 512 rows 0.91 to 0.96, 128 and
 * 256 KB are between, int8 takes 0.98 to 1.02, and a step of 32 rows of `llama-1b` in int4 0.98 (Zen 2). */
#define FIT_INT (1 << 16)

#include "../tile_avx2.h"
#include "../kernels.h"
