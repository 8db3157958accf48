/* Pages of an arena on the host, and their conversion to address ranges. */
#ifndef CK_PAGES_H
#define CK_PAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "patch/arena.h"

/* --- page sets ----------------------------------------------------------------------------------- */

typedef struct {
    ck_page *pages;
    unsigned char *bitmaps; /* CK_BITMAP_BYTES for each page */
    size_t count, capacity;
} page_set;

/* Reserve space for ``count`` pages in total. False if out of memory; the set is then unchanged. */
bool page_set_reserve(page_set *set, size_t count);
void page_set_free(page_set *set);

/* Appends pages to a set, at most one per key. Pages that were in the set before are not searched, so that the
 * set may then have two pages of one key. */
typedef struct {
    page_set *set;
    size_t first_page;      /* index of the first appended page */
    uint32_t *page_numbers; /* hash table of page numbers, counted from 1; 0: free */
    size_t slot_count;      /* of the hash table; a power of two */
    uint64_t last_key;      /* of the last lookup, and its page */
    size_t last_page;
} page_writer;

page_writer page_writer_begin(page_set *set);
void page_writer_free(page_writer *writer);

/* Mark the bytes from ``begin`` to ``end`` as accessed by a launch. False if out of memory. */
bool page_writer_mark_bytes(page_writer *writer, uint32_t launch, uint32_t mode, uint64_t begin, uint64_t end);

/* --- ranges -------------------------------------------------------------------------------------- */

/* ``count`` pieces of ``bytes``: the first at ``lo``, each ``stride`` after the one before. */
typedef struct {
    uint64_t lo, bytes, stride, count;
    uint32_t launch;
    uint32_t mode; /* ck_mode */
} access_range;

typedef void (*range_sink)(void *context, const access_range *range);

/* Pass the accesses of an arena's launches to ``sink``, ordered by launch, mode and address. Adjacent pieces are
 * joined; three or more pieces of the same size at the same distance become one range.
 *
 * ``pages`` are in any order; ``bitmaps`` holds 4 KiB for each, unused for full pages. Pages of the same key are
 * merged in place. False if out of memory; nothing was passed then. */
bool pages_to_ranges(const ck_page *pages, void *bitmaps, size_t count, range_sink sink, void *context);

#endif
