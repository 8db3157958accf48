/* Call sites: the Python call stacks of CUDA calls. Each distinct stack is written to the trace once. */
#ifndef CK_CALL_SITES_H
#define CK_CALL_SITES_H

#include <stdbool.h>
#include <stdint.h>

#include "walker.h"

#define MAX_FRAMES 64

typedef struct {
    int depth;             /* number of frames */
    uint32_t program_call; /* number of the program call (walker.h) */

    uint64_t hash; /* hash of all frames */
    uint64_t code[MAX_FRAMES], offset[MAX_FRAMES];
} call_site;

/* Set the functions that read Python frames; NULL records no stacks. */
void call_sites_set_walker(const struct ck_walker *walker);

/* Read the Python stack of the calling thread. */
void call_site_read(call_site *stack);

/* Read the stack of the calling thread without its innermost frames, which belong to cudakit. */
void call_site_of_caller(call_site *stack, int skipped_frames);

/* Return the id of a stack; a stack without an id is written to the trace first. For an empty stack, return the id of
 * the stack of the backward pass that this thread works for (model/ranges.h), or 0 if the pass is not certain. The recorder lock is
 * held. */
uint32_t call_site_id(const call_site *stack);

/* Return the number of the program call to which the work of a stack belongs, or 0 if it is unknown. Work of autograd's
 * threads belongs to the program call that waits for the backward pass. The recorder lock is held. */
uint32_t call_site_program_call(const call_site *stack);

/* Set the stack that work of autograd's threads gets, which have no Python frames; NULL: none. The recorder lock is
 * held. */
void call_sites_set_autograd_site(const call_site *site);

/* Return whether torch's autograd started the calling thread. */
bool is_autograd_thread(void);

/* Remove all ids: a forked process has its own trace, and none of autograd's threads. */
void call_sites_clear(void);

#endif
