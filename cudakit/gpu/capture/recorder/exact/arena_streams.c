#include "exact/arena_memory.h"

#include "containers.h"
#include "model/graphs.h"
#include "recorder.h"

arena_stream *arena_streams_get(arena_streams *streams, Sanitizer_StreamHandle stream)
{
    for (size_t i = streams->count; i-- > 0;)
        if (streams->entries[i].stream == stream)
            return streams->entries + i;
    arena_stream *entries =
        array_reserve(streams->entries, &streams->capacity, streams->count + 1, sizeof *entries, 16);
    if (!entries)
        return NULL;
    streams->entries = entries;
    streams->entries[streams->count] = (arena_stream){.stream = stream};
    return streams->entries + streams->count++;
}

void arena_streams_enqueued(arena_streams *streams, Sanitizer_StreamHandle stream)
{
    arena_stream *stream_entry = arena_streams_get(streams, stream);
    if (!stream_entry)
        return;
    if (stream_entry->enqueued_launches++ && stream_entry->launching_thread != this_thread.id)
        stream_entry->launching_thread = SEVERAL_THREADS;
    else
        stream_entry->launching_thread = this_thread.id;
}

/* If other threads launched on the stream, too, their launches may be behind the point that this thread waited for.
 * Then only a marker shows when all launches are complete. */
void arena_streams_synchronized(arena_streams *streams, Sanitizer_StreamHandle stream)
{
    for (arena_stream *stream_entry = streams->entries; stream_entry < streams->entries + streams->count;
         stream_entry++)
        if ((!stream || stream_entry->stream == stream) && stream_entry->launching_thread == this_thread.id)
            stream_entry->complete_launches = stream_entry->enqueued_launches;
}

void arena_streams_forget(arena_streams *streams, Sanitizer_StreamHandle stream)
{
    for (arena_stream *stream_entry = streams->entries; stream_entry < streams->entries + streams->count;
         stream_entry++)
        if (stream_entry->stream == stream)
            stream_entry->stream = NULL;
}

bool arena_streams_pending(const arena_streams *streams, Sanitizer_StreamHandle stream)
{
    for (const arena_stream *stream_entry = streams->entries; stream_entry < streams->entries + streams->count;
         stream_entry++)
        if ((!stream || stream_entry->stream == stream) &&
            stream_entry->complete_launches < stream_entry->enqueued_launches)
            return true;
    return false;
}

/* Return whether the launches of a stream are complete. A stream with a marker is complete only when the marker is
 * set, even if the host has synchronized with the stream: the marker would otherwise be written to a reused arena. */
static bool is_complete(const arena_stream *entry, const arena_top *top)
{
    if (entry->marked_launches)
        return entry->marked_launches == entry->enqueued_launches && top && top->markers[entry->marker];
    return entry->complete_launches == entry->enqueued_launches;
}

bool arena_streams_complete(const arena_streams *streams, const arena_top *top)
{
    bool all_complete = true;
    pthread_mutex_lock(&recorder_lock);
    for (size_t i = 0; i < streams->count; i++)
        all_complete = all_complete && is_complete(streams->entries + i, top);
    pthread_mutex_unlock(&recorder_lock);
    return all_complete;
}

/* --- CUDA calls, during which other threads may reallocate the entries; indices stay valid --- */

static bool copy_entry(const arena_streams *streams, size_t i, arena_stream *entry)
{
    pthread_mutex_lock(&recorder_lock);
    bool exists = i < streams->count;
    if (exists)
        *entry = streams->entries[i];
    pthread_mutex_unlock(&recorder_lock);
    return exists;
}

/* Return whether a marker must be enqueued on a stream. During a capture, no work may be enqueued. */
static bool needs_marker(const arena_streams *streams, const arena_stream *entry)
{
    return entry->stream && entry->complete_launches < entry->enqueued_launches &&
           entry->marked_launches < entry->enqueued_launches && streams->marker_count < MAX_MARKERS &&
           !graphs_is_capturing();
}

void arena_streams_mark(arena_streams *streams, const arena_memory *arena, Sanitizer_StreamHandle only_stream)
{
    arena_stream stream_entry;
    for (size_t i = 0; copy_entry(streams, i, &stream_entry); i++) {
        if ((only_stream && stream_entry.stream != only_stream) || !needs_marker(streams, &stream_entry))
            continue;
        uint32_t marker = streams->marker_count++;
        if (!arena_enqueue_marker(arena, marker, stream_entry.stream))
            continue;
        pthread_mutex_lock(&recorder_lock);
        streams->entries[i].marker = marker;
        streams->entries[i].marked_launches = stream_entry.enqueued_launches;
        pthread_mutex_unlock(&recorder_lock);
    }
}

bool arena_streams_wait_unmarked(arena_streams *streams)
{
    bool all_synchronized = true;
    arena_stream stream_entry;
    for (size_t i = 0; copy_entry(streams, i, &stream_entry); i++) {
        if (!stream_entry.stream || stream_entry.complete_launches == stream_entry.enqueued_launches ||
            stream_entry.marked_launches == stream_entry.enqueued_launches)
            continue;
        all_synchronized = !sanitizer.stream_synchronize(stream_entry.stream) && all_synchronized;
        pthread_mutex_lock(&recorder_lock);
        streams->entries[i].complete_launches = stream_entry.enqueued_launches;
        pthread_mutex_unlock(&recorder_lock);
    }
    return all_synchronized;
}
