#include "exact/arena_memory.h"

#include "containers.h"
#include "model/graphs.h"
#include "recorder.h"

arena_stream *arena_streams_get(arena_streams *streams, Sanitizer_StreamHandle stream)
{
    for (size_t i = streams->count; i-- > 0;)
        if (streams->all[i].stream == stream)
            return streams->all + i;
    arena_stream *all = array_reserve(streams->all, &streams->capacity, streams->count + 1, sizeof *all, 16);
    if (!all)
        return NULL;
    streams->all = all;
    streams->all[streams->count] = (arena_stream){.stream = stream};
    return streams->all + streams->count++;
}

void arena_streams_enqueued(arena_streams *streams, Sanitizer_StreamHandle stream)
{
    arena_stream *entry = arena_streams_get(streams, stream);
    if (!entry)
        return;
    if (entry->enqueued++ && entry->thread != this_thread.id)
        entry->thread = SEVERAL_THREADS;
    else
        entry->thread = this_thread.id;
}

/* Launches that other threads enqueued may be behind the point that this thread waited for; only a marker
 * shows when those are complete. */
void arena_streams_synchronized(arena_streams *streams, Sanitizer_StreamHandle stream)
{
    for (arena_stream *entry = streams->all; entry < streams->all + streams->count; entry++)
        if ((!stream || entry->stream == stream) && entry->thread == this_thread.id)
            entry->done = entry->enqueued;
}

void arena_streams_forget(arena_streams *streams, Sanitizer_StreamHandle stream)
{
    for (arena_stream *entry = streams->all; entry < streams->all + streams->count; entry++)
        if (entry->stream == stream)
            entry->stream = NULL;
}

bool arena_streams_pending(const arena_streams *streams, Sanitizer_StreamHandle stream)
{
    for (const arena_stream *entry = streams->all; entry < streams->all + streams->count; entry++)
        if ((!stream || entry->stream == stream) && entry->done < entry->enqueued)
            return true;
    return false;
}

/* Wait for a pending marker even if the host has synchronised since: the marker would otherwise be written
 * to a reused arena. */
static bool is_complete(const arena_stream *entry, const arena_top *top)
{
    if (entry->marked)
        return entry->marked == entry->enqueued && top && top->markers[entry->marker];
    return entry->done == entry->enqueued;
}

bool arena_streams_complete(const arena_streams *streams, const arena_top *top)
{
    bool done = true;
    pthread_mutex_lock(&recorder_lock);
    for (size_t i = 0; i < streams->count; i++)
        done = done && is_complete(streams->all + i, top);
    pthread_mutex_unlock(&recorder_lock);
    return done;
}

/* --- calls into CUDA: another thread may reallocate the entries meanwhile, but indices stay valid --- */

static bool copy_entry(const arena_streams *streams, size_t i, arena_stream *entry)
{
    pthread_mutex_lock(&recorder_lock);
    bool exists = i < streams->count;
    if (exists)
        *entry = streams->all[i];
    pthread_mutex_unlock(&recorder_lock);
    return exists;
}

/* Captured work is not executed. */
static bool needs_marker(const arena_streams *streams, const arena_stream *entry)
{
    return entry->stream && entry->done < entry->enqueued && entry->marked < entry->enqueued &&
           streams->markers < MAX_MARKERS && !graphs_is_capturing();
}

void arena_streams_mark(arena_streams *streams, const arena_memory *arena, Sanitizer_StreamHandle only)
{
    arena_stream entry;
    for (size_t i = 0; copy_entry(streams, i, &entry); i++) {
        if ((only && entry.stream != only) || !needs_marker(streams, &entry))
            continue;
        uint32_t marker = streams->markers++;
        if (!arena_enqueue_marker(arena, marker, entry.stream))
            continue;
        pthread_mutex_lock(&recorder_lock);
        streams->all[i].marker = marker;
        streams->all[i].marked = entry.enqueued;
        pthread_mutex_unlock(&recorder_lock);
    }
}

bool arena_streams_wait_unmarked(arena_streams *streams)
{
    bool waited = true;
    arena_stream entry;
    for (size_t i = 0; copy_entry(streams, i, &entry); i++) {
        if (!entry.stream || entry.done == entry.enqueued || entry.marked == entry.enqueued)
            continue;
        waited = !sanitizer.stream_synchronize(entry.stream) && waited;
        pthread_mutex_lock(&recorder_lock);
        streams->all[i].done = entry.enqueued;
        pthread_mutex_unlock(&recorder_lock);
    }
    return waited;
}
