#include "exact/arena_memory.h"

#include <stdlib.h>

#include "recorder.h"

static uint64_t device_address(const arena_memory *arena, uint64_t offset)
{
    return arena->base + offset;
}

static bool copy_to_host(const arena_memory *arena, void *into, uint64_t offset, size_t bytes)
{
    return !bytes || !sanitizer.to_host(into, (void *)device_address(arena, offset), bytes, arena->stream);
}

static bool zero(const arena_memory *arena, uint64_t offset, uint64_t bytes)
{
    return !bytes || !sanitizer.memset((void *)device_address(arena, offset), 0, bytes, arena->stream);
}

static uint32_t min_u32(uint32_t count, uint32_t limit)
{
    return count < limit ? count : limit;
}

/* --- creation --------------------------------------------------------------------------------- */

uint64_t arena_bytes(unsigned entries_log2)
{
    return CK_ARENA_BYTES(entries_log2, CK_MAX_PAGES(entries_log2)) + CK_ALIGNMENT;
}

static bool set_header(const arena_memory *arena)
{
    ck_header header = {
        .format = CK_FORMAT,
        .pages = arena->pages,
        .pages_at = (uint32_t)CK_PAGES_AT(arena->entries_log2),
        .chunks_at = (uint32_t)CK_CHUNKS_AT(arena->entries_log2),
    };
    return !sanitizer.to_device((void *)arena->base, &header, sizeof header, arena->stream) &&
           !sanitizer.stream_synchronize(arena->stream);
}

bool arena_create(arena_memory *created, CUcontext context, Sanitizer_StreamHandle stream, unsigned entries_log2)
{
    arena_memory arena = {
        .context = context,
        .stream = stream,
        .entries_log2 = entries_log2,
        .pages = (uint32_t)CK_MAX_PAGES(entries_log2),
        .size_bytes = arena_bytes(entries_log2),
    };
    if (sanitizer.alloc(context, &arena.allocated, arena.size_bytes))
        return false;
    arena.base = ((uint64_t)(uintptr_t)arena.allocated + CK_ALIGNMENT - 1) & ~(CK_ALIGNMENT - 1);
    if (arena.base < CK_LOWEST_BASE || !zero(&arena, 0, CK_ARENA_BYTES(entries_log2, arena.pages)) ||
        !set_header(&arena)) {
        arena_free(&arena);
        return false;
    }
    *created = arena;
    return true;
}

void arena_free(arena_memory *arena)
{
    if (arena->allocated)
        sanitizer.free(arena->context, arena->allocated);
    arena->allocated = NULL;
}

/* --- copies to the host ----------------------------------------------------------------------- */

bool arena_copy_top(const arena_memory *arena, arena_top *into)
{
    return copy_to_host(arena, into, 0, sizeof *into);
}

/* Return the number of pages from ``page`` on, before ``end``, whose bitmaps are contiguous in their chunk. */
static uint32_t contiguous_pages(uint32_t page, uint32_t end)
{
    return min_u32(end - page, CK_CHUNK_PAGES - page % CK_CHUNK_PAGES);
}

/* Copying a few bitmaps is faster than first checking which of them are full. */
#define MIN_PAGES_FOR_SUMMARIES 128

static bool find_full_pages(const arena_memory *arena, page_set *into)
{
    const uint32_t count = into->count < MIN_PAGES_FOR_SUMMARIES ? 0 : (uint32_t)into->count;
    unsigned char *summaries = into->bitmaps; /* not filled yet; used as scratch memory */
    for (uint32_t page = 0, run; page < count; page += run) {
        run = contiguous_pages(page, count);
        if (!copy_to_host(arena, summaries + page * CK_SUMMARY_BYTES, CK_SUMMARY_AT(arena->entries_log2, page),
                          run * CK_SUMMARY_BYTES))
            return false;
    }
    for (uint32_t page = 0; page < count; page++) {
        const uint64_t *summary = (const uint64_t *)(summaries + page * CK_SUMMARY_BYTES);
        uint64_t all = ~0ull;
        for (size_t i = 0; i < CK_SUMMARY_BYTES / sizeof all; i++)
            all &= summary[i];
        into->pages[page].full = all == ~0ull;
    }
    return true;
}

static bool copy_bitmap_run(const arena_memory *arena, page_set *into, uint32_t begin, uint32_t end)
{
    for (uint32_t run; begin < end; begin += run) {
        run = contiguous_pages(begin, end);
        if (!copy_to_host(arena, into->bitmaps + (size_t)begin * CK_BITMAP_BYTES,
                          CK_BITMAP_AT(arena->entries_log2, begin), (size_t)run * CK_BITMAP_BYTES))
            return false;
    }
    return true;
}

/* Bitmaps of full pages are not needed, but a separate copy costs as much as copying this many of them. */
#define MIN_FULL_RUN 32

static bool copy_bitmaps_of_pages(const arena_memory *arena, page_set *into)
{
    const uint32_t count = (uint32_t)into->count;
    for (uint32_t begin = 0, end, full; begin < count; begin = end + full) {
        for (end = begin, full = 0; end + full < count && full < MIN_FULL_RUN;) {
            if (into->pages[end + full].full)
                full++;
            else
                end += full + 1, full = 0;
        }
        while (end + full < count && into->pages[end + full].full)
            full++;
        if (!copy_bitmap_run(arena, into, begin, end))
            return false;
    }
    return true;
}

static bool copy_pages(const arena_memory *arena, uint32_t count, page_set *into)
{
    into->count = 0;
    if (!page_set_reserve(into, count))
        return false;
    into->count = count;
    return copy_to_host(arena, into->pages, CK_PAGES_AT(arena->entries_log2), count * sizeof(ck_page)) &&
           find_full_pages(arena, into) && copy_bitmaps_of_pages(arena, into);
}

/* Copy tensor maps and boxes; most launches have none. */
static bool copy_boxes(const arena_memory *arena, uint32_t maps, uint32_t boxes, arena_copy *into)
{
    if (!into->maps)
        into->maps = malloc(CK_MAX_MAPS * sizeof *into->maps);
    if (boxes > into->box_capacity) {
        free(into->boxes);
        into->boxes = malloc(boxes * sizeof *into->boxes);
        into->box_capacity = into->boxes ? boxes : 0;
    }
    return into->maps && (into->boxes || !boxes) &&
           copy_to_host(arena, into->maps, CK_MAPS_AT(arena->entries_log2), maps * sizeof(ck_map)) &&
           copy_to_host(arena, into->boxes, CK_BOXES_AT(arena->entries_log2), boxes * sizeof(ck_box));
}

bool arena_copy_all(const arena_memory *arena, arena_copy *into)
{
    if (!arena_copy_top(arena, &into->top))
        return false;
    const ck_header *header = &into->top.header;
    const uint32_t maps = min_u32(header->maps, CK_MAX_MAPS), boxes = min_u32(header->boxes, CK_MAX_BOXES);
    return (!header->lost || copy_to_host(arena, into->lost, CK_LOST_AT, sizeof into->lost)) &&
           copy_boxes(arena, maps, boxes, into) &&
           copy_pages(arena, min_u32(header->cursor, arena->pages), &into->pages);
}

/* --- clearing --------------------------------------------------------------------------------- */

static bool zero_bitmaps(const arena_memory *arena, uint32_t count)
{
    for (uint32_t page = 0, run; page < count; page += run) {
        run = contiguous_pages(page, count);
        if (!zero(arena, CK_SUMMARY_AT(arena->entries_log2, page), run * CK_SUMMARY_BYTES) ||
            !zero(arena, CK_BITMAP_AT(arena->entries_log2, page), (uint64_t)run * CK_BITMAP_BYTES))
            return false;
    }
    return true;
}

bool arena_clear(const arena_memory *arena, const ck_header *used)
{
    const unsigned log2 = arena->entries_log2;
    const uint32_t pages = min_u32(used->cursor, arena->pages);
    const uint64_t keys = used->maps || used->boxes ? CK_MAPS_AT(log2) - CK_MAP_KEYS_AT(log2) : 0;
    return zero(arena, 0, CK_PAGES_AT(log2)) && zero(arena, CK_MAP_KEYS_AT(log2), keys) &&
           zero(arena, CK_PAGES_AT(log2), pages * sizeof(ck_page)) && zero_bitmaps(arena, pages) &&
           set_header(arena);
}

bool arena_enqueue_marker(const arena_memory *arena, uint32_t marker, Sanitizer_StreamHandle stream)
{
    void *word = (void *)device_address(arena, sizeof(ck_header) + marker * sizeof(uint32_t));
    return !sanitizer.memset(word, 1, sizeof(uint32_t), stream);
}
