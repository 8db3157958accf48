#include "page_set.h"

#include <stdlib.h>
#include <string.h>

bool page_set_reserve(page_set *set, size_t count)
{
    if (count <= set->room)
        return true;
    ck_page *pages = realloc(set->pages, count * sizeof *pages);
    if (!pages)
        return false;
    set->pages = pages;
    unsigned char *bitmaps = realloc(set->bitmaps, count * CK_BITMAP_BYTES);
    if (!bitmaps)
        return false;
    set->bitmaps = bitmaps;
    set->room = count;
    return true;
}

void page_set_free(page_set *set)
{
    free(set->pages);
    free(set->bitmaps);
    *set = (page_set){0};
}

/* --- the page of a key ------------------------------------------------------------------------------ */

#define FEWEST_PLACES 1024

page_writer page_writer_of(page_set *set)
{
    return (page_writer){.set = set, .first = set->count};
}

void page_writer_free(page_writer *writer)
{
    free(writer->numbers);
}

static size_t place_in(const page_writer *in, uint64_t key)
{
    return (size_t)(key * 0x9E3779B97F4A7C15ull >> 20) & (in->places - 1);
}

static void enter(page_writer *in, size_t number)
{
    size_t place = place_in(in, in->set->pages[in->first + number].key);
    while (in->numbers[place])
        place = (place + 1) & (in->places - 1);
    in->numbers[place] = (uint32_t)number + 1;
}

/* At most half of the places are taken. */
static bool grow(page_writer *in)
{
    const size_t used = in->set->count - in->first;
    if (2 * (used + 1) <= in->places)
        return true;
    free(in->numbers);
    in->places = in->places ? 2 * in->places : FEWEST_PLACES;
    in->numbers = calloc(in->places, sizeof *in->numbers);
    if (!in->numbers)
        return false;
    for (size_t i = 0; i < used; i++)
        enter(in, i);
    return true;
}

static bool add_page(page_writer *in, uint64_t key)
{
    page_set *set = in->set;
    if ((set->count == set->room && !page_set_reserve(set, 2 * set->room + 64)) || !grow(in))
        return false;
    set->pages[set->count] = (ck_page){.key = key};
    memset(set->bitmaps + set->count * CK_BITMAP_BYTES, 0, CK_BITMAP_BYTES);
    enter(in, set->count++ - in->first);
    return true;
}

static bool look_up(page_writer *in, uint64_t key)
{
    for (size_t place = place_in(in, key); in->places && in->numbers[place];
         place = (place + 1) & (in->places - 1)) {
        in->page = in->first + in->numbers[place] - 1;
        if (in->set->pages[in->page].key == key)
            return true;
    }
    in->page = in->set->count;
    return add_page(in, key);
}

/* NULL for want of memory. */
static uint64_t *bitmap_of(page_writer *in, uint64_t key)
{
    if (key != in->key && !look_up(in, key))
        return NULL;
    in->key = key;
    return (uint64_t *)(in->set->bitmaps + in->page * CK_BITMAP_BYTES);
}

/* --- bytes ---------------------------------------------------------------------------------------- */

static void set_bits(uint64_t *words, size_t first, size_t last)
{
    const uint64_t from = ~0ull << (first & 63), to = ~0ull >> (63 - (last & 63));
    uint64_t *word = words + first / 64, *end = words + last / 64;
    if (word == end) {
        *word |= from & to;
        return;
    }
    *word++ |= from;
    memset(word, 0xFF, (size_t)((char *)end - (char *)word));
    *end |= to;
}

bool page_set_bytes(page_writer *in, uint32_t launch, uint32_t mode, uint64_t begin, uint64_t end)
{
    const unsigned level = ((begin | end) & 3) != 0;
    const unsigned page_shift = CK_PAGE_SHIFT(level), granule_shift = CK_GRANULE_SHIFT(level);
    while (begin < end) {
        const uint64_t page = begin >> page_shift, page_end = (page + 1) << page_shift;
        const uint64_t here = end < page_end ? end : page_end;
        uint64_t *words = bitmap_of(in, CK_KEY(launch, mode, level, page));
        if (!words)
            return false;
        set_bits(words, begin >> granule_shift & (CK_BITMAP_BITS - 1),
                 (here - 1) >> granule_shift & (CK_BITMAP_BITS - 1));
        begin = here;
    }
    return true;
}
