/* From the pages of an arena to ranges of bytes. */
#ifndef CK_RANGES_H
#define CK_RANGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../patch/arena.h"

/* ``count`` pieces of ``bytes``, the first at ``lo``, each ``stride`` behind the one before. */
typedef struct {
    uint64_t lo, bytes, stride, count;
    uint32_t launch;
    uint32_t mode; /* ck_mode */
} access_range;

typedef void (*range_sink)(void *to, const access_range *range);

/* Hand over what the launches of an arena did: launch by launch, mode by mode, in the order of addresses.
 * Neighbours are joined; three or more pieces of the same size at the same distance are one range.
 *
 * ``pages`` are those of the arena in any order, ``bitmaps`` holds 4 KiB for each; that of a page that is
 * full is not looked at. Pages of the same key become one, in the bitmap of one of them. False for want of
 * memory; then nothing was handed over. */
bool ranges_of(const ck_page *pages, void *bitmaps, size_t count, range_sink sink, void *to);

#endif
