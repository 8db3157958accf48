/* Interface of the patch on the host for fake kernels. */
#ifndef PATCH_ON_HOST_H
#define PATCH_ON_HOST_H

#include "arena.h"

enum { LANES = 32 };

/* Accesses of the lanes of a warp by one instruction, or copies that fill some bytes at the end with zeros.
 * ``lanes`` has a bit for each active lane. */
typedef struct {
    ck_u64 userdata, address[LANES];
    ck_u32 lanes, bytes, flags, copy, zeros[LANES];
} warp_access;

void access_in_warp(const warp_access *all);
void set_grid_id(ck_u64 number);

#endif
