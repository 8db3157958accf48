/* What the patch on the host has for kernels that are made up. */
#ifndef PATCH_ON_HOST_H
#define PATCH_ON_HOST_H

#include "arena.h"

enum { LANES = 32 };

/* What the lanes of a warp, a bit for each that is there, access with one instruction, or copy but for some
 * bytes at the end, which are filled with zeros. */
typedef struct {
    ck_u64 userdata, address[LANES];
    ck_u32 lanes, bytes, flags, copy, zeros[LANES];
} together;

void access_together(const together *all);
void set_grid(ck_u64 number);

#endif
