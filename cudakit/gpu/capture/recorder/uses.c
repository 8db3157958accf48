#include "uses.h"

#include <stdlib.h>

#include "graphs.h"
#include "recorder.h"

stream_use *uses_of(stream_uses *uses, Sanitizer_StreamHandle stream)
{
    for (size_t i = uses->count; i-- > 0;)
        if (uses->all[i].stream == stream)
            return uses->all + i;
    if (uses->count == uses->room) {
        size_t room = uses->room ? 2 * uses->room : 16;
        stream_use *moved = realloc(uses->all, room * sizeof *moved);
        if (!moved)
            return NULL;
        uses->all = moved;
        uses->room = room;
    }
    uses->all[uses->count] = (stream_use){.stream = stream};
    return uses->all + uses->count++;
}

void uses_enqueued(stream_uses *uses, Sanitizer_StreamHandle stream)
{
    stream_use *use = uses_of(uses, stream);
    if (!use)
        return;
    if (use->enqueued++ && use->thread != this_thread.id)
        use->thread = SEVERAL_THREADS;
    else
        use->thread = this_thread.id;
}

/* Of what other threads have put into the stream, some may have come behind that for which this one waited:
 * there only a marker tells. */
void uses_waited(stream_uses *uses, Sanitizer_StreamHandle stream)
{
    for (stream_use *use = uses->all; use < uses->all + uses->count; use++)
        if ((!stream || use->stream == stream) && use->thread == this_thread.id)
            use->done = use->enqueued;
}

void uses_forget(stream_uses *uses, Sanitizer_StreamHandle stream)
{
    for (stream_use *use = uses->all; use < uses->all + uses->count; use++)
        if (use->stream == stream)
            use->stream = NULL;
}

bool uses_wait_for(const stream_uses *uses, Sanitizer_StreamHandle stream)
{
    for (const stream_use *use = uses->all; use < uses->all + uses->count; use++)
        if ((!stream || use->stream == stream) && use->done < use->enqueued)
            return true;
    return false;
}

/* A marker that is on its way is awaited also where the host has waited since: it would come into an arena that
 * is used again. */
static bool is_done(const stream_use *use, const arena_top *top)
{
    if (use->marked)
        return use->marked == use->enqueued && top && top->markers[use->marker];
    return use->done == use->enqueued;
}

bool uses_are_done(const stream_uses *uses, const arena_top *top)
{
    bool done = true;
    pthread_mutex_lock(&recorder_lock);
    for (size_t i = 0; i < uses->count; i++)
        done = done && is_done(uses->all + i, top);
    pthread_mutex_unlock(&recorder_lock);
    return done;
}

/* --- with CUDA: another thread may move the uses meanwhile, but their numbers stay ---------------------- */

static bool copy_of(const stream_uses *uses, size_t i, stream_use *use)
{
    pthread_mutex_lock(&recorder_lock);
    bool there = i < uses->count;
    if (there)
        *use = uses->all[i];
    pthread_mutex_unlock(&recorder_lock);
    return there;
}

/* What is captured runs never. */
static bool wants_marker(const stream_uses *uses, const stream_use *use)
{
    return use->stream && use->done < use->enqueued && use->marked < use->enqueued &&
           uses->markers < MAX_MARKERS && !graphs_are_captured();
}

void uses_mark(stream_uses *uses, const arena_memory *in, Sanitizer_StreamHandle only)
{
    stream_use use;
    for (size_t i = 0; copy_of(uses, i, &use); i++) {
        if ((only && use.stream != only) || !wants_marker(uses, &use))
            continue;
        uint32_t marker = uses->markers++;
        if (!arena_mark(in, marker, use.stream))
            continue;
        pthread_mutex_lock(&recorder_lock);
        uses->all[i].marker = marker;
        uses->all[i].marked = use.enqueued;
        pthread_mutex_unlock(&recorder_lock);
    }
}

bool uses_wait(stream_uses *uses)
{
    bool waited = true;
    stream_use use;
    for (size_t i = 0; copy_of(uses, i, &use); i++) {
        if (!use.stream || use.done == use.enqueued || use.marked == use.enqueued)
            continue;
        waited = !sanitizer.stream_synchronize(use.stream) && waited;
        pthread_mutex_lock(&recorder_lock);
        uses->all[i].done = use.enqueued;
        pthread_mutex_unlock(&recorder_lock);
    }
    return waited;
}
