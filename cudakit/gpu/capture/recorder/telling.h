/* What an arena holds, as records: the accesses of each launch, and that they are all. */
#ifndef CK_TELLING_H
#define CK_TELLING_H

#include "arenas.h"
#include "record.h"
#include "stores.h"

/* Write down what launches did. ``launches`` are like their records, by their index in the arena; of kind 0
 * where an index was not given. ``spoiled``: it cannot be said whose accesses are whose.
 * The lock is not held. */
void tell(arena_copy *all, const record *launches, uint32_t count, store_set *stores, bool spoiled);

/* Write down that the accesses of a launch will not be told. The lock is held. */
void tell_nothing(const record *like);

#endif
