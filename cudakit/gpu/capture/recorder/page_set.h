/* Pages on the host: those read from an arena, and others of the same form. */
#ifndef CK_PAGE_SET_H
#define CK_PAGE_SET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../patch/arena.h"

typedef struct {
    ck_page *pages;
    unsigned char *bitmaps; /* CK_BITMAP_BYTES for each page */
    size_t count, room;
} page_set;

/* Make room for so many pages in all. False for want of memory; then all is as it was. */
bool page_set_reserve(page_set *set, size_t count);
void page_set_free(page_set *set);

/* Adds pages to a set, one for each key, and finds them again. Of what was in the set before, it knows
 * nothing: then there may be two pages of the same key. */
typedef struct {
    page_set *set;
    size_t first;      /* page that was added */
    uint32_t *numbers; /* a hash table of their numbers, from 1 on; 0: free */
    size_t places;     /* a power of 2 */
    uint64_t key;      /* that was looked for last, and its page */
    size_t page;
} page_writer;

page_writer page_writer_of(page_set *set);
void page_writer_free(page_writer *writer);

/* Write down bytes of memory that a launch accessed. False for want of memory. */
bool page_set_bytes(page_writer *in, uint32_t launch, uint32_t mode, uint64_t begin, uint64_t end);

#endif
