/* AVX-512 with VNNI and products of bf16, and AMX's tiles of bf16: Intel Sapphire Rapids and newer. */
#define LEVEL level_amx
#define NAME "amx"
#define LANES 16
#define BLOCK 4
#define TILE_ROWS 12
#define TILE_ALIGN 1
#define ATTENTION_PANELS 1
#define AMX_TILES 1
#define MIN_WIDE_ROWS 24 /* measured: at 16 rows AVX-512 is as fast, at 32 it takes 1.4 times as long */
/* One row of int4 [8192, 2048] takes 309 us; with a distance of 8 KB 323, and with both of the other levels' values 384:
 * a Sapphire Rapids core has 16 buffers for lines on their way to its first cache, and more for its second. */
#define AHEAD(rows) 4096
#define PREFETCH_TO _MM_HINT_T1

#include "../tile_avx512.h"
#include "../kernels.h"
