/* What a tensor map says: a tensor in global memory, and the box of it that one instruction moves. */
#ifndef CK_TENSOR_MAPS_H
#define CK_TENSOR_MAPS_H

#include <stdbool.h>
#include <stdint.h>

#include "../patch/arena.h"

#define MAX_RANK 5

typedef struct {
    uint64_t address;
    uint64_t dims[MAX_RANK];    /* elements */
    uint64_t strides[MAX_RANK]; /* bytes from one element to the next; the first is the size of an element */
    uint32_t box[MAX_RANK];     /* elements, of which each ``steps``th is moved */
    uint32_t steps[MAX_RANK];
    unsigned rank, interleave;
} tensor_map;

/* Where the kernel's coordinates put the box: bytes at a distance, in each dimension but the first, in which
 * they are neighbours. Only what is within the tensor. */
typedef struct {
    uint64_t begin, bytes; /* bytes 0: nothing */
    uint64_t strides[MAX_RANK];
    uint32_t counts[MAX_RANK];
} box_extent;

/* Read a map as cuTensorMapEncodeTiled makes it. False for one of a form that is not known, and for elements
 * of less than a byte. */
bool tensor_map_of(const ck_u64 content[CK_MAP_WORDS], tensor_map *map);

/* False where it is not known for sure what is moved: interleaved layouts, steps that do not divide the box
 * or are in the first dimension (which the Driver API says to be ignored), boxes that fit into no shared
 * memory, and addresses that there are not. */
bool box_extent_of(const tensor_map *map, const int32_t at[MAX_RANK], box_extent *extent);

#endif
