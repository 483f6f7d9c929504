/* AVX-512 with VNNI: Intel Ice Lake, AMD Zen 4 and newer. */
#define LEVEL level_avx512
#define NAME "avx512"
#define LANES 16
#define BLOCK 4
#define TILE_ROWS 12
#define TILE_ALIGN 1

#include "../tile_avx512.h"
#include "../kernels.h"
