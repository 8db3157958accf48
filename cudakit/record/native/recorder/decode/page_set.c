#include "decode/pages.h"

#include <stdlib.h>
#include <string.h>

bool page_set_reserve(page_set *set, size_t count)
{
    if (count <= set->page_capacity)
        return true;
    ck_page *pages = realloc(set->pages, count * sizeof *pages);
    if (!pages)
        return false;
    set->pages = pages;
    unsigned char *bitmaps = realloc(set->bitmaps, count * CK_BITMAP_BYTES);
    if (!bitmaps)
        return false;
    set->bitmaps = bitmaps;
    set->page_capacity = count;
    return true;
}

void page_set_free(page_set *set)
{
    free(set->pages);
    free(set->bitmaps);
    *set = (page_set){0};
}

/* --- hash table of page keys ------------------------------------------------------------------ */

#define MIN_SLOT_COUNT 1024

page_writer page_writer_begin(page_set *set)
{
    return (page_writer){.set = set, .first_page = set->page_count};
}

void page_writer_free(page_writer *writer)
{
    free(writer->page_numbers);
}

static size_t slot_of(const page_writer *writer, uint64_t key)
{
    return (size_t)(key * 0x9E3779B97F4A7C15ull >> 20) & (writer->slot_count - 1);
}

static void insert_page(page_writer *writer, size_t number)
{
    size_t slot = slot_of(writer, writer->set->pages[writer->first_page + number].key);
    while (writer->page_numbers[slot])
        slot = (slot + 1) & (writer->slot_count - 1);
    writer->page_numbers[slot] = (uint32_t)number + 1;
}

/* Enlarge the hash table so that at least half of the slots are free. Return false if no memory is left. */
static bool grow_hash_table(page_writer *writer)
{
    const size_t page_count = writer->set->page_count - writer->first_page;
    if (2 * (page_count + 1) <= writer->slot_count)
        return true;
    free(writer->page_numbers);
    writer->slot_count = writer->slot_count ? 2 * writer->slot_count : MIN_SLOT_COUNT;
    writer->page_numbers = calloc(writer->slot_count, sizeof *writer->page_numbers);
    if (!writer->page_numbers)
        return false;
    for (size_t i = 0; i < page_count; i++)
        insert_page(writer, i);
    return true;
}

/* Append an empty page. Return false if no memory is left. */
static bool add_page(page_writer *writer, uint64_t key)
{
    page_set *set = writer->set;
    if ((set->page_count == set->page_capacity && !page_set_reserve(set, 2 * set->page_capacity + 64)) ||
        !grow_hash_table(writer))
        return false;
    set->pages[set->page_count] = (ck_page){.key = key};
    memset(set->bitmaps + set->page_count * CK_BITMAP_BYTES, 0, CK_BITMAP_BYTES);
    insert_page(writer, set->page_count++ - writer->first_page);
    return true;
}

/* Set last_page to the page of a key, appending a page if the key is new. Return false if no memory is left. */
static bool find_or_add_page(page_writer *writer, uint64_t key)
{
    for (size_t slot = slot_of(writer, key); writer->slot_count && writer->page_numbers[slot];
         slot = (slot + 1) & (writer->slot_count - 1)) {
        writer->last_page = writer->first_page + writer->page_numbers[slot] - 1;
        if (writer->set->pages[writer->last_page].key == key)
            return true;
    }
    writer->last_page = writer->set->page_count;
    return add_page(writer, key);
}

/* Return the bitmap of a key, appending a page if the key is new. Return NULL if no memory is left. */
static uint64_t *bitmap_of(page_writer *writer, uint64_t key)
{
    if (key != writer->last_key && !find_or_add_page(writer, key))
        return NULL;
    writer->last_key = key;
    return (uint64_t *)(writer->set->bitmaps + writer->last_page * CK_BITMAP_BYTES);
}

/* --- bytes ------------------------------------------------------------------------------------ */

/* Set the bits from ``first`` to ``last``, both included. */
static void set_bits(uint64_t *words, size_t first, size_t last)
{
    const uint64_t first_mask = ~0ull << (first & 63), last_mask = ~0ull >> (63 - (last & 63));
    uint64_t *word = words + first / 64, *end_word = words + last / 64;
    if (word == end_word) {
        *word |= first_mask & last_mask;
        return;
    }
    *word++ |= first_mask;
    memset(word, 0xFF, (size_t)((char *)end_word - (char *)word));
    *end_word |= last_mask;
}

bool page_writer_mark_bytes(page_writer *writer, uint32_t launch, uint32_t mode, uint64_t begin, uint64_t end)
{
    const unsigned level = ((begin | end) & 3) != 0;
    const unsigned page_shift = CK_PAGE_SHIFT(level), granule_shift = CK_GRANULE_SHIFT(level);
    while (begin < end) {
        const uint64_t page = begin >> page_shift, page_end = (page + 1) << page_shift;
        const uint64_t part_end = end < page_end ? end : page_end;
        uint64_t *words = bitmap_of(writer, CK_KEY(launch, mode, level, page));
        if (!words)
            return false;
        set_bits(words, begin >> granule_shift & (CK_BITMAP_BITS - 1),
                 (part_end - 1) >> granule_shift & (CK_BITMAP_BITS - 1));
        begin = part_end;
    }
    return true;
}
