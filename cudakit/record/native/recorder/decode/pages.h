/* Pages of an arena, copied to the host, and their conversion to address ranges. */
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
    size_t page_count, page_capacity;
} page_set;

/* Reserve space for ``count`` pages in total. Return false if no memory is left; the set is then unchanged. */
bool page_set_reserve(page_set *set, size_t count);
void page_set_free(page_set *set);

/* Appends pages to a set, at most one per key. Earlier pages of the set are not searched, so the set may then have two
 * pages of one key. */
typedef struct {
    page_set *set;
    size_t first_page;      /* index of the first appended page */
    uint32_t *page_numbers; /* hash table: page indices relative to first_page, plus 1; 0: free slot */
    size_t slot_count;      /* number of slots of the hash table; a power of two */
    uint64_t last_key;      /* key of the last lookup */
    size_t last_page;       /* index of the page that the last lookup found */
} page_writer;

page_writer page_writer_begin(page_set *set);
void page_writer_free(page_writer *writer);

/* Mark the bytes from ``begin`` up to ``end`` as accessed by a launch. Return false if no memory is left. */
bool page_writer_mark_bytes(page_writer *writer, uint32_t launch, uint32_t mode, uint64_t begin, uint64_t end);

/* --- ranges -------------------------------------------------------------------------------------- */

/* ``count`` address intervals of ``bytes`` bytes each. The first interval begins at ``lo``, each next one ``stride``
 * bytes later. */
typedef struct {
    uint64_t lo, bytes, stride, count;
    uint32_t launch;
    uint32_t mode; /* read, write or atomic: a value of ck_mode */
} access_range;

typedef void (*range_sink)(void *context, const access_range *range);

/* Pass the accesses of the launches in an arena to ``sink``, ordered by launch, mode and address. Adjacent intervals
 * are joined. Three or more intervals of the same size at the same distance become one range.
 *
 * ``pages`` may be in any order; ``bitmaps`` has 4 KiB for each page, unused for full pages. Pages of the same key are
 * merged in place. Returns false, with nothing passed, if no memory is left. */
bool pages_to_ranges(const ck_page *pages, void *bitmaps, size_t count, range_sink sink, void *context);

#endif
