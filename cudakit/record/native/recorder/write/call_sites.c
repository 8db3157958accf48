#define _GNU_SOURCE
#include "write/call_sites.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "containers.h"
#include "write/spool.h"

/* Name of the innermost frame in stacks of backward passes. cudakit/stacks.py has the same name. */
#define BACKWARD_FRAME "backward pass (autograd thread)"
#define AUTOGRAD_THREAD "pt_autograd_" /* prefix of the thread names that torch gives to autograd's threads */
#define THREAD_NAME_BYTES 16

static const struct ck_walker *walker;
static hash_table stack_ids; /* ids of written stacks, by hash */
/* The stack that work of autograd's threads gets; NULL: none. Protected by the recorder lock. */
static const call_site *autograd_site;

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

/* A thread gets its name before its first CUDA call, so the name is read once. */
bool is_autograd_thread(void)
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

void call_sites_set_autograd_site(const call_site *site)
{
    autograd_site = site;
}

/* Return the stack that the work of this thread gets instead of an empty one, or NULL. */
static const call_site *backward_stack(void)
{
    return autograd_site && is_autograd_thread() ? autograd_site : NULL;
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

void call_sites_clear(void)
{
    hash_table_clear(&stack_ids);
    autograd_site = NULL;
}
