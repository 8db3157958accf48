/* From the boxes of an arena to pages, as if the kernel had accessed their bytes one by one. */
#ifndef CK_BOXES_H
#define CK_BOXES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../patch/arena.h"
#include "page_set.h"

/* Add the pages of all boxes to those of ``into``, of which there may then be two of the same key.
 *
 * The counts are those of the arena's header, which may be of more than there is. ``lost`` is told each launch,
 * maybe more than once, of which a box cannot be expanded for sure. False for want of memory. */
bool boxes_expand(const ck_map *maps, size_t map_count, const ck_box *boxes, size_t box_count, page_set *into,
                  void (*lost)(void *to, uint32_t launch), void *to);

#endif
