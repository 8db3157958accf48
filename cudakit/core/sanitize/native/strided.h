/* Strided ranges, and the bytes that they share (strided.py). */
#ifndef CUDAKIT_SANITIZE_STRIDED_H
#define CUDAKIT_SANITIZE_STRIDED_H

#include "state.h"

/* The first address of a range, and the first address after it. */
struct range {
    uint64_t lo, hi;
};

/* `count` rows of `width` bytes each, which begin at `lo`, `lo + stride` and so on. The last row ends at `hi`. */
struct strided_range {
    uint64_t lo, hi, width, stride, count;
};

/* Return the rows of a strided access. Return false if its rows are contiguous or its numbers contradict each other;
 * it then counts as one range. */
bool strided_from_access(struct strided_range *strided, uint64_t lo, uint64_t hi, int64_t stride, uint64_t count);
/* Find the bytes of a range in the first row that overlaps the range. Return false if no row overlaps it. */
bool strided_shared_with_range(const struct strided_range *strided, struct range range,
                               struct range *shared_range);
/* Find the first bytes that are in rows of both strided ranges. Return false if there are none. */
bool strided_shared_with(const struct strided_range *strided, const struct strided_range *stored,
                         struct range *shared_range);

/* The same value as strided.MAX_STRIDED_STATES. */
enum { MAX_STRIDED_STATES = 256 };

/* The states of strided ranges, the oldest first. */
struct strided_states {
    struct strided_range ranges[MAX_STRIDED_STATES];
    struct state states[MAX_STRIDED_STATES];
    size_t range_count;
    struct range bounds; /* all strided ranges are between these addresses */
};

/* Return the state of a strided range. Create it if there is none; if there are too many, remove the oldest. */
struct state *strided_get_or_create(struct strided_states *states, const struct strided_range *strided);
/* Remove the strided range with an index, whose state the caller has cleared. */
void strided_remove(struct strided_states *strided, size_t index);
/* Remove the strided ranges that lie completely between two addresses. */
void strided_clear(struct strided_states *strided, uint64_t lo, uint64_t hi);

#endif
