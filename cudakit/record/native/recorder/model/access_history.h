/* The earlier accesses to an allocation that several streams use, by byte range.
 *
 * For each interval of bytes, the accesses are stored that later work may be unordered with. An access is dropped
 * when a later access is ordered after it and conflicts with at least the same accesses. Two accesses conflict if
 * at least one of them writes. Bytes are contested if two exact accesses to them were unordered and conflicted, or
 * if a limit of the history was reached. A launch that accesses contested bytes counts as unordered. Callers hold
 * the recorder lock. */
#ifndef CK_ACCESS_HISTORY_H
#define CK_ACCESS_HISTORY_H

#include <stdbool.h>
#include <stdint.h>

#include "model/stream_order.h"

/* An access of an operation to all bytes of a range. */
typedef struct {
    stream_operation operation;
    bool is_write;
    bool is_assumed; /* the operation may access the bytes, but its accesses are unknown */
} byte_access;

typedef struct access_history access_history;

/* Return the history of an allocation whose last operation may have accessed all of its bytes, from ``lo`` up to
 * ``hi``. Return NULL if no memory is left. */
access_history *history_create(uint64_t lo, uint64_t hi, byte_access last_access);
void history_free(access_history *history);

/* Store that an operation on the allocation is not ordered after the operation before it. */
void history_note_unordered(access_history *history);

/* Return whether a history can be freed: the host has waited for all accesses to the allocation, they did not conflict, and
 * all recent ones were ordered. */
bool history_is_obsolete(const access_history *history);

/* Return whether an access to the bytes from ``lo`` up to ``hi`` is ordered after all earlier accesses that it
 * conflicts with, and none of the bytes are contested. */
bool history_is_ordered(const access_history *history, uint64_t lo, uint64_t hi, byte_access access);

/* Return whether some of the bytes from ``lo`` up to ``hi`` are contested. */
bool history_has_contested_bytes(const access_history *history, uint64_t lo, uint64_t hi);

/* Add an access. If it is unordered with an earlier access that it conflicts with, and neither of them is assumed,
 * the bytes that both access are contested during the next accesses to them. */
void history_add(access_history *history, uint64_t lo, uint64_t hi, byte_access access);

#endif
