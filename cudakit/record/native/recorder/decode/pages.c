#include "decode/pages.h"

#include <stdlib.h>
#include <string.h>

/* --- page sets ------------------------------------------------------------------------------------- */

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

/* --- ranges ---------------------------------------------------------------------------------------- */

#define WORDS (CK_BITMAP_BYTES / 8) /* 64-bit words of a bitmap */
#define QUARTERS 4                  /* number of level-1 pages in a level-0 page */

/* --- sorting pages ---------------------------------------------------------------------------- */

typedef struct {
    uint64_t sort_key; /* fields, from the most significant bit: launch, mode, window, quarter, level */
    uint32_t page;
} sort_entry;

/* Return the key by which pages are sorted. A window is the memory of one level-0 page (128 KiB); a quarter of a
 * window is the memory of one level-1 page. */
static uint64_t sort_key_of(uint64_t key)
{
    uint64_t level = CK_KEY_LEVEL(key), quarter = CK_KEY_PAGE(key) << (level ? 0 : 2);
    uint64_t launch_and_mode = (uint64_t)CK_KEY_LAUNCH(key) << 2 | CK_KEY_MODE(key);
    return launch_and_mode << (CK_PAGE_BITS + 1) | quarter << 1 | level;
}

#define DIGIT_BITS 11
#define DIGITS (1u << DIGIT_BITS)

/* Compute the index at which each digit starts in the sorted array. Return false if all pages have the same digit,
 * so that they need not be sorted by it. */
static bool find_digit_starts(const sort_entry *pages, size_t count, unsigned shift, size_t starts[DIGITS])
{
    memset(starts, 0, DIGITS * sizeof *starts);
    for (size_t i = 0; i < count; i++)
        starts[pages[i].sort_key >> shift & (DIGITS - 1)]++;
    if (starts[pages[0].sort_key >> shift & (DIGITS - 1)] == count)
        return false; /* all pages have the same digit */
    size_t offset = 0;
    for (size_t i = 0; i < DIGITS; i++) {
        size_t digit_count = starts[i];
        starts[i] = offset;
        offset += digit_count;
    }
    return true;
}

/* Sort by digits, the least significant digit first. Most digits are the same in all pages. Return the array with the
 * sorted pages: ``pages`` or ``spare``. */
static sort_entry *radix_sort(sort_entry *pages, sort_entry *spare, size_t count)
{
    size_t starts[DIGITS];
    for (unsigned shift = 0; shift < 64; shift += DIGIT_BITS) {
        if (!find_digit_starts(pages, count, shift, starts))
            continue;
        for (size_t i = 0; i < count; i++)
            // NOLINTNEXTLINE(clang-analyzer-core.UndefinedBinaryOperatorResult): count entries are set
            spare[starts[pages[i].sort_key >> shift & (DIGITS - 1)]++] = pages[i];
        sort_entry *unsorted_pages = pages;
        pages = spare;
        spare = unsorted_pages;
    }
    return pages;
}

/* --- intervals to ranges ------------------------------------------------------------------------- */

typedef struct {
    range_sink sink;
    void *sink_context;
    uint64_t lo, hi;    /* the last address interval, which may still grow; empty if lo == hi */
    access_range range; /* the intervals before the last one; its count is 0 if there are none */
} range_writer;

static void flush_range(range_writer *writer)
{
    if (writer->range.count)
        writer->sink(writer->sink_context, &writer->range);
    writer->range.count = 0;
}

/* Emit the first of two intervals alone, and begin a new range with the second. Two intervals do not establish a
 * stride. */
static void emit_first_interval(range_writer *writer)
{
    access_range second_range = writer->range;
    second_range.lo += second_range.stride;
    second_range.count = 1;
    writer->range.count = 1;
    writer->range.stride = 0;
    flush_range(writer);
    second_range.stride = 0;
    writer->range = second_range;
}

static bool continues_range(const access_range *range, uint64_t lo, uint64_t bytes)
{
    if (bytes != range->bytes)
        return false;
    return range->count == 1 || lo == range->lo + range->count * range->stride;
}

/* Add the last interval to the range, or emit the range and begin a new one. */
static void end_interval(range_writer *writer)
{
    access_range *range = &writer->range;
    uint64_t lo = writer->lo, bytes = writer->hi - writer->lo;
    if (!bytes)
        return;
    writer->hi = writer->lo = 0;
    if (range->count == 2 && !continues_range(range, lo, bytes))
        emit_first_interval(writer);
    if (range->count && !continues_range(range, lo, bytes))
        flush_range(writer);
    if (!range->count) {
        range->lo = lo;
        range->bytes = bytes;
        range->stride = 0;
    } else if (range->count == 1) {
        range->stride = lo - range->lo;
    }
    range->count++;
}

/* Emit all intervals that are not emitted yet, after the last page of one launch and mode. */
static void emit_pending_ranges(range_writer *writer)
{
    end_interval(writer);
    if (writer->range.count == 2)
        emit_first_interval(writer);
    flush_range(writer);
}

/* Add an interval; if it is adjacent to the last interval, join both. */
static inline void add_interval(range_writer *writer, uint64_t lo, uint64_t hi)
{
    if (writer->hi != lo || writer->hi == writer->lo) {
        end_interval(writer);
        writer->lo = lo;
    }
    writer->hi = hi;
}

/* --- bits to intervals --------------------------------------------------------------------------- */

/* Add an interval for each run of set bits; a bit stands for 2^shift bytes. */
static void add_set_bits(range_writer *writer, uint64_t word, uint64_t base, unsigned shift)
{
    unsigned bit_position = 0;
    while (word) {
        unsigned zero_count = (unsigned)__builtin_ctzll(word);
        word >>= zero_count;
        bit_position += zero_count;
        unsigned run_bits = ~word ? (unsigned)__builtin_ctzll(~word) : 64;
        add_interval(writer, base + ((uint64_t)bit_position << shift),
                     base + ((uint64_t)(bit_position + run_bits) << shift));
        if (run_bits == 64)
            return;
        word >>= run_bits;
        bit_position += run_bits;
    }
}

static void add_bitmap(range_writer *writer, const uint64_t *words, uint64_t base, unsigned shift)
{
    for (size_t i = 0; i < WORDS; i++)
        if (words[i])
            add_set_bits(writer, words[i], base + ((uint64_t)i << (6 + shift)), shift);
}

/* --- windows: the pages of the same 128 KiB --------------------------------------------------- */

typedef struct {
    const ck_page *pages;
    unsigned char *bitmaps;
    uint64_t quarter_words[WORDS]; /* scratch memory: a quarter of a window, one bit per byte */
} page_source;

static uint64_t *source_bitmap(const page_source *source, uint32_t page)
{
    return (uint64_t *)(source->bitmaps + (size_t)page * CK_BITMAP_BYTES);
}

static bool is_full(const page_source *source, uint32_t page)
{
    return source->pages[page].is_full;
}

/* Merge sorted pages of the same key. Return the number of remaining pages. */
static size_t merge_pages_of_same_key(const page_source *source, sort_entry *pages, size_t count)
{
    size_t page_count = 0;
    for (size_t i = 0; i < count; i++) {
        sort_entry *last_page = page_count ? pages + page_count - 1 : NULL;
        if (!last_page || last_page->sort_key != pages[i].sort_key) {
            pages[page_count++] = pages[i];
        } else if (is_full(source, pages[i].page)) {
            *last_page = pages[i];
        } else if (!is_full(source, last_page->page)) {
            uint64_t *target_bits = source_bitmap(source, last_page->page),
                     *added_bits = source_bitmap(source, pages[i].page);
            for (size_t word_index = 0; word_index < WORDS; word_index++)
                target_bits[word_index] |= added_bits[word_index];
        }
    }
    return page_count;
}

static uint64_t address_of(const page_source *source, uint32_t page)
{
    uint64_t key = source->pages[page].key;
    return CK_KEY_PAGE(key) << CK_PAGE_SHIFT(CK_KEY_LEVEL(key));
}

static void add_page_pieces(range_writer *writer, const page_source *source, uint32_t page)
{
    unsigned level = CK_KEY_LEVEL(source->pages[page].key);
    uint64_t base_address = address_of(source, page);
    if (is_full(source, page))
        add_interval(writer, base_address, base_address + (1ull << CK_PAGE_SHIFT(level)));
    else
        add_bitmap(writer, source_bitmap(source, page), base_address, CK_GRANULE_SHIFT(level));
}

/* Repeat each of 16 bits four times. */
static uint64_t spread_bits(uint64_t bits)
{
    bits = (bits | bits << 24) & 0x000000FF000000FFull;
    bits = (bits | bits << 12) & 0x000F000F000F000Full;
    bits = (bits | bits << 6) & 0x0303030303030303ull;
    bits = (bits | bits << 3) & 0x1111111111111111ull;
    return bits * 0xF;
}

/* Convert a quarter of a level-0 bitmap to one bit per byte. */
static void spread_quarter(uint64_t *byte_bits, const uint64_t *bitmap, unsigned quarter)
{
    const uint64_t *words = bitmap + quarter * (WORDS / QUARTERS);
    for (size_t i = 0; i < WORDS; i++)
        byte_bits[i] = spread_bits(words[i / 4] >> (i % 4 * 16) & 0xFFFF);
}

/* Add the ranges of a level-0 page (one bit for 4 bytes) combined with the level-1 pages (one bit for each byte) of the
 * same memory. */
static void add_mixed_window(range_writer *writer, page_source *source, const sort_entry *pages, size_t count)
{
    uint64_t base_address = address_of(source, pages[0].page);
    size_t next_page = 1;
    for (unsigned window_quarter = 0; window_quarter < QUARTERS;
         window_quarter++, base_address += 1ull << CK_PAGE_SHIFT(1)) {
        spread_quarter(source->quarter_words, source_bitmap(source, pages[0].page), window_quarter);
        if (next_page < count && address_of(source, pages[next_page].page) == base_address) {
            const uint64_t *byte_bits = source_bitmap(source, pages[next_page].page);
            bool is_full_page = is_full(source, pages[next_page++].page);
            for (size_t i = 0; i < WORDS; i++)
                source->quarter_words[i] |= is_full_page ? ~0ull : byte_bits[i];
        }
        add_bitmap(writer, source->quarter_words, base_address, 0);
    }
}

#define WINDOW(sort_key) ((sort_key) >> 3)

/* Add the pages of one window: the memory of one level-0 page, which up to four level-1 pages divide into quarters. The
 * lowest 3 bits of a sort key are quarter and level, and the other bits identify the window. The level-0 page is the
 * first, because its quarter and level are 0. */
static void add_window(range_writer *writer, page_source *source, const sort_entry *pages, size_t count)
{
    bool has_level_0_page = !(pages[0].sort_key & 1);
    if (has_level_0_page && (count == 1 || is_full(source, pages[0].page)))
        add_page_pieces(writer, source, pages[0].page);
    else if (has_level_0_page)
        add_mixed_window(writer, source, pages, count);
    else
        for (size_t i = 0; i < count; i++)
            add_page_pieces(writer, source, pages[i].page);
}

#define LAUNCH_AND_MODE(sort_key) ((sort_key) >> (CK_PAGE_BITS + 1))

static void emit_pages(range_writer *writer, page_source *source, const sort_entry *pages, size_t count)
{
    for (size_t begin = 0, end; begin < count; begin = end) {
        for (end = begin + 1; end < count && WINDOW(pages[end].sort_key) == WINDOW(pages[begin].sort_key);)
            end++;
        if (!begin || LAUNCH_AND_MODE(pages[begin].sort_key) != LAUNCH_AND_MODE(pages[begin - 1].sort_key)) {
            emit_pending_ranges(writer);
            writer->range.launch = CK_KEY_LAUNCH(source->pages[pages[begin].page].key);
            writer->range.mode = CK_KEY_MODE(source->pages[pages[begin].page].key);
        }
        add_window(writer, source, pages + begin, end - begin);
    }
    emit_pending_ranges(writer);
}

bool pages_to_ranges(const ck_page *pages, void *bitmaps, size_t count, range_sink sink, void *context)
{
    if (!count)
        return true;
    sort_entry *entries = malloc(2 * count * sizeof *entries);
    if (!entries)
        return false;
    size_t page_count = 0;
    for (size_t i = 0; i < count; i++)
        if (pages[i].key)
            entries[page_count++] = (sort_entry){sort_key_of(pages[i].key), (uint32_t)i};
    page_source source = {.pages = pages, .bitmaps = bitmaps};
    range_writer writer = {.sink = sink, .sink_context = context};
    if (page_count) {
        sort_entry *sorted_entries = radix_sort(entries, entries + count, page_count);
        emit_pages(&writer, &source, sorted_entries, merge_pages_of_same_key(&source, sorted_entries, page_count));
    }
    free(entries);
    return true;
}
