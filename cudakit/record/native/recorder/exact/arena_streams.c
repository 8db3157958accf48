#include "exact/arena_memory.h"

#include "containers.h"
#include "model/graphs.h"
#include "recorder.h"

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
           !graphs_is_capturing();
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
