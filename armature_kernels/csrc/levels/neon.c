/* Any 64-bit Arm. */
#define LEVEL level_neon
#define NAME "neon"
#define LANES 4
#define BLOCK 4
#define TILE_ROWS 6
#define TILE_ALIGN 1

#include "../tile_neon.h"
#include "../kernels.h"
