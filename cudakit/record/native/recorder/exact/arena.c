#include "exact/arena.h"

#include <stdlib.h>

#include "containers.h"
#include "model/stream_order.h"
#include "recorder.h"

static uint64_t device_address(const arena_memory *arena, uint64_t offset)
{
    return arena->base_address + offset;
}

static bool copy_to_host(const arena_memory *arena, void *destination, uint64_t offset, size_t size_bytes)
{
    return !size_bytes ||
           !sanitizer.copy_to_host(destination, (void *)device_address(arena, offset), size_bytes, arena->stream);
}

static bool clear_bytes(const arena_memory *arena, uint64_t offset, uint64_t size_bytes)
{
    return !size_bytes || !sanitizer.memset((void *)device_address(arena, offset), 0, size_bytes, arena->stream);
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
        .page_capacity = arena->page_count,
        .pages_offset = (uint32_t)CK_PAGES_OFFSET(arena->entries_log2),
        .chunks_offset = (uint32_t)CK_CHUNKS_OFFSET(arena->entries_log2),
    };
    return !sanitizer.copy_to_device((void *)arena->base_address, &header, sizeof header, arena->stream) &&
           !sanitizer.stream_synchronize(arena->stream);
}

bool arena_create(arena_memory *arena, CUcontext context, Sanitizer_StreamHandle stream, unsigned entries_log2)
{
    arena_memory new_arena = {
        .context = context,
        .stream = stream,
        .entries_log2 = entries_log2,
        .page_count = (uint32_t)CK_MAX_PAGES(entries_log2),
        .size_bytes = arena_bytes(entries_log2),
    };
    if (sanitizer.alloc(context, &new_arena.device_memory, new_arena.size_bytes))
        return false;
    new_arena.base_address =
        ((uint64_t)(uintptr_t)new_arena.device_memory + CK_ALIGNMENT - 1) & ~(CK_ALIGNMENT - 1);
    if (new_arena.base_address < CK_LOWEST_BASE ||
        !clear_bytes(&new_arena, 0, CK_ARENA_BYTES(entries_log2, new_arena.page_count)) ||
        !set_header(&new_arena)) {
        arena_free(&new_arena);
        return false;
    }
    *arena = new_arena;
    return true;
}

void arena_free(arena_memory *arena)
{
    if (arena->device_memory)
        sanitizer.free(arena->context, arena->device_memory);
    arena->device_memory = NULL;
}

/* --- copies to the host ----------------------------------------------------------------------- */

bool arena_copy_top(const arena_memory *arena, arena_top *top)
{
    return copy_to_host(arena, top, 0, sizeof *top);
}

/* Return the number of pages, from ``page`` up to ``end``, whose bitmaps are contiguous because they are in one
 * chunk. */
static uint32_t contiguous_pages(uint32_t page, uint32_t end)
{
    return min_u32(end - page, CK_CHUNK_PAGES - page % CK_CHUNK_PAGES);
}

/* With fewer pages than this, copying all bitmaps is faster than copying the summaries first. */
#define MIN_PAGES_FOR_SUMMARIES 128

/* Copy the summaries of the pages, and set ``is_full`` of the pages whose bits are all set. */
static bool find_full_pages(const arena_memory *arena, page_set *pages)
{
    const uint32_t page_count = pages->page_count < MIN_PAGES_FOR_SUMMARIES ? 0 : (uint32_t)pages->page_count;
    unsigned char *summaries =
        pages->bitmaps; /* the bitmaps are not copied yet, so their memory holds the summaries */
    for (uint32_t page = 0, run_pages; page < page_count; page += run_pages) {
        run_pages = contiguous_pages(page, page_count);
        if (!copy_to_host(arena, summaries + page * CK_SUMMARY_BYTES, CK_SUMMARY_OFFSET(arena->entries_log2, page),
                          run_pages * CK_SUMMARY_BYTES))
            return false;
    }
    for (uint32_t page = 0; page < page_count; page++) {
        const uint64_t *summary_words = (const uint64_t *)(summaries + page * CK_SUMMARY_BYTES);
        uint64_t common_bits = ~0ull;
        for (size_t i = 0; i < CK_SUMMARY_BYTES / sizeof common_bits; i++)
            common_bits &= summary_words[i];
        pages->pages[page].is_full = common_bits == ~0ull;
    }
    return true;
}

static bool copy_bitmap_run(const arena_memory *arena, page_set *pages, uint32_t begin, uint32_t end)
{
    for (uint32_t run_pages; begin < end; begin += run_pages) {
        run_pages = contiguous_pages(begin, end);
        if (!copy_to_host(arena, pages->bitmaps + (size_t)begin * CK_BITMAP_BYTES,
                          CK_BITMAP_OFFSET(arena->entries_log2, begin), (size_t)run_pages * CK_BITMAP_BYTES))
            return false;
    }
    return true;
}

/* Bitmaps of full pages are not needed. But a second copy costs as much as copying this number of bitmaps, so shorter
 * runs of full pages are copied as well. */
#define MIN_FULL_RUN 32

/* Copy the bitmaps of the pages that are not full. */
static bool copy_bitmaps_of_pages(const arena_memory *arena, page_set *pages)
{
    const uint32_t page_count = (uint32_t)pages->page_count;
    for (uint32_t begin = 0, end, full_run; begin < page_count; begin = end + full_run) {
        for (end = begin, full_run = 0; end + full_run < page_count && full_run < MIN_FULL_RUN;) {
            if (pages->pages[end + full_run].is_full)
                full_run++;
            else
                end += full_run + 1, full_run = 0;
        }
        while (end + full_run < page_count && pages->pages[end + full_run].is_full)
            full_run++;
        if (!copy_bitmap_run(arena, pages, begin, end))
            return false;
    }
    return true;
}

static bool copy_pages(const arena_memory *arena, uint32_t count, page_set *pages)
{
    pages->page_count = 0;
    if (!page_set_reserve(pages, count))
        return false;
    pages->page_count = count;
    return copy_to_host(arena, pages->pages, CK_PAGES_OFFSET(arena->entries_log2), count * sizeof(ck_page)) &&
           find_full_pages(arena, pages) && copy_bitmaps_of_pages(arena, pages);
}

/* Copy the tensor maps and boxes, of which most arenas have none. */
static bool copy_boxes(const arena_memory *arena, uint32_t maps, uint32_t boxes, arena_copy *copy)
{
    if (!copy->maps)
        copy->maps = malloc(CK_MAX_MAPS * sizeof *copy->maps);
    if (boxes > copy->box_capacity) {
        free(copy->boxes);
        copy->boxes = malloc(boxes * sizeof *copy->boxes);
        copy->box_capacity = copy->boxes ? boxes : 0;
    }
    return copy->maps && (copy->boxes || !boxes) &&
           copy_to_host(arena, copy->maps, CK_MAPS_OFFSET(arena->entries_log2), maps * sizeof(ck_map)) &&
           copy_to_host(arena, copy->boxes, CK_BOXES_OFFSET(arena->entries_log2), boxes * sizeof(ck_box));
}

bool arena_copy_all(const arena_memory *arena, arena_copy *copy)
{
    if (!arena_copy_top(arena, &copy->top))
        return false;
    const ck_header *header = &copy->top.header;
    const uint32_t map_count = min_u32(header->requested_maps, CK_MAX_MAPS),
                   box_count = min_u32(header->requested_boxes, CK_MAX_BOXES);
    return (!header->lost_launches ||
            copy_to_host(arena, copy->lost_bits, CK_LOST_OFFSET, sizeof copy->lost_bits)) &&
           copy_boxes(arena, map_count, box_count, copy) &&
           copy_pages(arena, min_u32(header->requested_pages, arena->page_count), &copy->pages);
}

/* --- clearing --------------------------------------------------------------------------------- */

static bool clear_bitmaps(const arena_memory *arena, uint32_t count)
{
    for (uint32_t page = 0, run_pages; page < count; page += run_pages) {
        run_pages = contiguous_pages(page, count);
        if (!clear_bytes(arena, CK_SUMMARY_OFFSET(arena->entries_log2, page), run_pages * CK_SUMMARY_BYTES) ||
            !clear_bytes(arena, CK_BITMAP_OFFSET(arena->entries_log2, page),
                         (uint64_t)run_pages * CK_BITMAP_BYTES))
            return false;
    }
    return true;
}

bool arena_clear(const arena_memory *arena, const ck_header *copied_header)
{
    const unsigned entries_log2 = arena->entries_log2;
    const uint32_t page_count = min_u32(copied_header->requested_pages, arena->page_count);
    const uint64_t key_count = copied_header->requested_maps || copied_header->requested_boxes
                                   ? CK_MAPS_OFFSET(entries_log2) - CK_MAP_KEYS_OFFSET(entries_log2)
                                   : 0;
    return clear_bytes(arena, 0, CK_PAGES_OFFSET(entries_log2)) &&
           clear_bytes(arena, CK_MAP_KEYS_OFFSET(entries_log2), key_count) &&
           clear_bytes(arena, CK_PAGES_OFFSET(entries_log2), page_count * sizeof(ck_page)) &&
           clear_bitmaps(arena, page_count) && set_header(arena);
}

bool arena_enqueue_marker(const arena_memory *arena, uint32_t marker, Sanitizer_StreamHandle stream)
{
    void *marker_word = (void *)device_address(arena, sizeof(ck_header) + marker * sizeof(uint32_t));
    return !sanitizer.memset(marker_word, 1, sizeof(uint32_t), stream);
}

/* --- streams ----------------------------------------------------------------------------------- */

arena_stream *arena_streams_get(arena_streams *streams, Sanitizer_StreamHandle stream)
{
    for (size_t i = streams->stream_count; i-- > 0;)
        if (streams->streams[i].stream == stream)
            return streams->streams + i;
    arena_stream *new_streams = array_reserve(streams->streams, &streams->stream_capacity,
                                              streams->stream_count + 1, sizeof *new_streams, 16);
    if (!new_streams)
        return NULL;
    streams->streams = new_streams;
    streams->streams[streams->stream_count] = (arena_stream){.stream = stream};
    return streams->streams + streams->stream_count++;
}

void arena_streams_count_launch(arena_streams *streams, Sanitizer_StreamHandle stream)
{
    arena_stream *stream_entry = arena_streams_get(streams, stream);
    if (!stream_entry)
        return;
    if (stream_entry->enqueued_launch_count++ && stream_entry->launching_thread != this_thread.id)
        stream_entry->launching_thread = SEVERAL_THREADS;
    else
        stream_entry->launching_thread = this_thread.id;
}

/* If other threads launched on the stream, too, their launches may be behind the point that this thread waited for.
 * Then only a marker shows when all launches are complete. */
void arena_streams_mark_complete(arena_streams *streams, Sanitizer_StreamHandle stream)
{
    for (arena_stream *stream_entry = streams->streams; stream_entry < streams->streams + streams->stream_count;
         stream_entry++)
        if ((!stream || stream_entry->stream == stream) && stream_entry->launching_thread == this_thread.id)
            stream_entry->complete_launch_count = stream_entry->enqueued_launch_count;
}

void arena_streams_forget(arena_streams *streams, Sanitizer_StreamHandle stream)
{
    for (arena_stream *stream_entry = streams->streams; stream_entry < streams->streams + streams->stream_count;
         stream_entry++)
        if (stream_entry->stream == stream)
            stream_entry->stream = NULL;
}

bool arena_streams_have_pending(const arena_streams *streams, Sanitizer_StreamHandle stream)
{
    for (const arena_stream *stream_entry = streams->streams;
         stream_entry < streams->streams + streams->stream_count; stream_entry++)
        if ((!stream || stream_entry->stream == stream) &&
            stream_entry->complete_launch_count < stream_entry->enqueued_launch_count)
            return true;
    return false;
}

/* Return whether the launches of a stream are complete. A stream with a marker is complete only when the marker is
 * set, even if the host has synchronized with the stream: the marker would otherwise be written to a reused arena. */
static bool is_stream_complete(const arena_stream *entry, const arena_top *top)
{
    if (entry->marked_launch_count)
        return entry->marked_launch_count == entry->enqueued_launch_count && top &&
               top->markers[entry->marker_index];
    return entry->complete_launch_count == entry->enqueued_launch_count;
}

bool arena_streams_are_complete(const arena_streams *streams, const arena_top *top)
{
    bool all_complete = true;
    pthread_mutex_lock(&recorder_lock);
    for (size_t i = 0; i < streams->stream_count; i++)
        all_complete = all_complete && is_stream_complete(streams->streams + i, top);
    pthread_mutex_unlock(&recorder_lock);
    return all_complete;
}

/* --- CUDA calls, during which other threads may reallocate the entries; indices stay valid --- */

static bool copy_entry(const arena_streams *streams, size_t i, arena_stream *entry)
{
    pthread_mutex_lock(&recorder_lock);
    bool exists = i < streams->stream_count;
    if (exists)
        *entry = streams->streams[i];
    pthread_mutex_unlock(&recorder_lock);
    return exists;
}

/* Return whether a marker must be enqueued on a stream. During a capture, no work may be enqueued. */
static bool needs_marker(const arena_streams *streams, const arena_stream *entry)
{
    return entry->stream && entry->complete_launch_count < entry->enqueued_launch_count &&
           entry->marked_launch_count < entry->enqueued_launch_count && streams->marker_count < MAX_MARKERS &&
           !order_is_capturing();
}

void arena_streams_enqueue_markers(arena_streams *streams, const arena_memory *arena,
                                   Sanitizer_StreamHandle only_stream)
{
    arena_stream stream_entry;
    for (size_t i = 0; copy_entry(streams, i, &stream_entry); i++) {
        if ((only_stream && stream_entry.stream != only_stream) || !needs_marker(streams, &stream_entry))
            continue;
        uint32_t marker_index = streams->marker_count++;
        if (!arena_enqueue_marker(arena, marker_index, stream_entry.stream))
            continue;
        pthread_mutex_lock(&recorder_lock);
        streams->streams[i].marker_index = marker_index;
        streams->streams[i].marked_launch_count = stream_entry.enqueued_launch_count;
        pthread_mutex_unlock(&recorder_lock);
    }
}

bool arena_streams_synchronize_unmarked(arena_streams *streams)
{
    bool all_synchronized = true;
    arena_stream stream_entry;
    for (size_t i = 0; copy_entry(streams, i, &stream_entry); i++) {
        if (!stream_entry.stream || stream_entry.complete_launch_count == stream_entry.enqueued_launch_count ||
            stream_entry.marked_launch_count == stream_entry.enqueued_launch_count)
            continue;
        all_synchronized = !sanitizer.stream_synchronize(stream_entry.stream) && all_synchronized;
        pthread_mutex_lock(&recorder_lock);
        streams->streams[i].complete_launch_count = stream_entry.enqueued_launch_count;
        pthread_mutex_unlock(&recorder_lock);
    }
    return all_synchronized;
}
