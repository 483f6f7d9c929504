/* Plain C, for processors without a better level. */
#define LEVEL level_portable
#define NAME "portable"
#define LANES 4
#define BLOCK 4
#define TILE_ROWS 4
#define TILE_ALIGN 1

#include "../tile_portable.h"
#include "../kernels.h"
