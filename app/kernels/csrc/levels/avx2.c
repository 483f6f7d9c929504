/* AVX2 with FMA: Intel Haswell, AMD Excavator and newer. */
#define LEVEL level_avx2
#define NAME "avx2"
#define LANES 8
#define BLOCK 4
#define TILE_ROWS 6
#define TILE_ALIGN 1
/* One and two rows wait for memory: the nearer distance is 1.08 to 1.15 times as fast on Zen 3, whose own prefetching has
 * brought lines to the second cache by then, while more in flight fill the buffers of the first. From three rows on, the
 * farther one is 1.02 to 1.1 times as fast. A step of `llama-1b` in int4 takes 0.95 of the time. */
#define AHEAD(rows) ((rows) < 3 ? 2048 : 8192)
#define AHEAD_NARROW 2048 /* as above: 1.07 to 1.15 times as fast; of fp32 weights 4096 is faster */

#include "../tile_avx2.h"
#include "../kernels.h"
