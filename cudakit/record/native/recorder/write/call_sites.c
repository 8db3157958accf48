#define _GNU_SOURCE
#include "write/call_sites.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "containers.h"
#include "recorder.h"
#include "write/spool.h"

/* Name of the innermost frame in stacks of backward passes. cudakit/stacks.py has the same name. */
#define BACKWARD_FRAME "backward pass (autograd thread)"
#define AUTOGRAD_THREAD "pt_autograd_" /* prefix of the thread names that torch gives to autograd's threads */
#define THREAD_NAME_BYTES 16

struct backward_pass {
    call_site start_site;
    pthread_t thread;
    const open_ranges *ranges; /* open ranges of the thread, which is blocked in the pass */
    backward_pass *next_pass;
};

static const struct ck_walker *walker;
static hash_table stack_ids; /* ids of written stacks, by hash */
static backward_pass *active_passes;
static bool ranges_are_recorded;

void call_sites_set_walker(const struct ck_walker *new_walker)
{
    walker = new_walker;
}

void call_site_read(call_site *stack)
{
    call_site_of_caller(stack, 0);
}

void call_site_of_caller(call_site *stack, int skipped_frames)
{
    uint64_t frame_keys[MAX_FRAMES];
    stack->program_call = walker ? walker->program_call() : 0;
    stack->depth = walker ? walker->walk(frame_keys, stack->code, stack->offset, MAX_FRAMES) : 0;
    int skipped_count = skipped_frames < stack->depth ? skipped_frames : stack->depth;
    stack->depth -= skipped_count;
    if (skipped_count) {
        memmove(stack->code, stack->code + skipped_count, (size_t)stack->depth * sizeof *stack->code);
        memmove(stack->offset, stack->offset + skipped_count, (size_t)stack->depth * sizeof *stack->offset);
    }
    uint64_t hash = 0;
    for (int i = skipped_count; i < skipped_count + stack->depth; i++)
        hash = (hash ^ frame_keys[i]) * 0x9E3779B97F4A7C15ull + (hash >> 29);
    stack->hash = hash ? hash : 1;
}

/* Write a stack and return its id. ``frames`` already contains the ``depth`` innermost frames. */
static uint32_t write_stack(const call_site *stack, spool_frame *frames, uint32_t depth)
{
    for (int i = 0; i < stack->depth && depth < MAX_FRAMES; i++) {
        struct ck_frame frame;
        if (walker->resolve(stack->code[i], stack->offset[i], &frame))
            continue;
        frames[depth].function = spool_text(frame.function);
        frames[depth].file = spool_text(frame.file);
        frames[depth].line = frame.line > 0 ? (uint32_t)frame.line : 0;
        depth++;
    }
    return spool_stack(frames, depth);
}

/* Return the id of a stack, with a frame for the backward pass on top if ``is_backward``. */
static uint32_t stack_id(const call_site *stack, bool is_backward)
{
    if (stack->depth <= 0)
        return 0;
    uint64_t hash = is_backward ? ~stack->hash : stack->hash;
    uint32_t id = hash_table_get(&stack_ids, hash);
    if (!id) {
        spool_frame frames[MAX_FRAMES];
        if (is_backward)
            frames[0] = (spool_frame){spool_text(BACKWARD_FRAME), 0, 0};
        id = write_stack(stack, frames, is_backward);
        if (id)
            hash_table_put(&stack_ids, hash, id);
    }
    return id;
}

/* Return whether torch's autograd started the calling thread. A thread gets its name before its first CUDA call, so the
 * name is read once. */
static bool is_autograd_thread(void)
{
    static __thread enum { NAME_UNREAD, AUTOGRAD, OTHER_THREAD } thread_kind;
    if (thread_kind == NAME_UNREAD) {
        char name[THREAD_NAME_BYTES] = "";
        const bool is_autograd =
            !prctl(PR_GET_NAME, name) && !strncmp(name, AUTOGRAD_THREAD, strlen(AUTOGRAD_THREAD));
        thread_kind = is_autograd ? AUTOGRAD : OTHER_THREAD;
    }
    return thread_kind == AUTOGRAD;
}

/* Return the stack of the call that started the running backward pass, or NULL. If several passes are running, the pass
 * of a thread is unknown. If one pass is running, the thread that started it is blocked, so that the code objects of
 * its frames are alive while the recorder lock is held. */
static const call_site *backward_stack(void)
{
    const backward_pass *innermost_pass = active_passes;
    return innermost_pass && !innermost_pass->next_pass && is_autograd_thread() ? &innermost_pass->start_site
                                                                                : NULL;
}

uint32_t call_site_id(const call_site *stack)
{
    if (stack->depth > 0)
        return stack_id(stack, false);
    stack = backward_stack();
    return stack ? stack_id(stack, true) : 0;
}

uint32_t call_site_program_call(const call_site *stack)
{
    if (stack->depth <= 0)
        stack = backward_stack();
    return stack ? stack->program_call : 0;
}

const open_ranges *backward_ranges(bool *is_backward_thread)
{
    const backward_pass *innermost_pass = active_passes;
    if (!innermost_pass || innermost_pass->next_pass)
        return NULL;
    *is_backward_thread = is_autograd_thread();
    return innermost_pass->ranges;
}

void backward_record_ranges(void)
{
    ranges_are_recorded = true;
}

/* Record the begin or the end of a pass that the calling thread started. The recorder lock is held. */
static void record_range(uint16_t kind, const backward_pass *pass)
{
    if (!ranges_are_recorded)
        return;
    record rec = record_begin(kind, 0, 0, stack_id(&pass->start_site, false));
    if (kind == KIND_RANGE_PUSH)
        rec.range_push.name = spool_text("backward pass");
    *(kind == KIND_RANGE_PUSH ? &rec.range_push.domain : &rec.range_pop.domain) = spool_text("cudakit");
    record_append(&rec);
}

/* Return whether a thread has not already started a backward pass, so that a new pass is not nested. */
static bool starts_new_pass(pthread_t thread)
{
    const backward_pass *innermost_pass = active_passes;
    while (innermost_pass && !pthread_equal(innermost_pass->thread, thread))
        innermost_pass = innermost_pass->next_pass;
    return !innermost_pass;
}

backward_pass *backward_begin(void)
{
    backward_pass *new_pass = malloc(sizeof *new_pass);
    if (!new_pass)
        return NULL;
    call_site_read(&new_pass->start_site);
    new_pass->thread = pthread_self();
    new_pass->ranges = &this_thread.open_ranges;
    pthread_mutex_lock(&recorder_lock);
    bool is_new = starts_new_pass(new_pass->thread);
    if (is_new) {
        ranges_end_copies();
        new_pass->next_pass = active_passes;
        active_passes = new_pass;
        record_range(KIND_RANGE_PUSH, new_pass);
    }
    pthread_mutex_unlock(&recorder_lock);
    if (is_new)
        return new_pass;
    free(new_pass);
    return NULL;
}

void backward_end(backward_pass *pass)
{
    if (!pass)
        return;
    pthread_mutex_lock(&recorder_lock);
    backward_pass **link = &active_passes;
    while (*link && *link != pass)
        link = &(*link)->next_pass;
    if (*link) { /* the child of a fork has no registered passes */
        *link = pass->next_pass;
        ranges_end_copies();
        record_range(KIND_RANGE_POP, pass);
    }
    pthread_mutex_unlock(&recorder_lock);
    free(pass);
}

void call_sites_clear(void)
{
    hash_table_clear(&stack_ids);
    active_passes = NULL;
}
