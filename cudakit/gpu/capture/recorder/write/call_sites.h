/* Call sites: the Python stack of a CUDA call, each distinct stack written once. */
#ifndef CK_CALL_SITES_H
#define CK_CALL_SITES_H

#include <stdint.h>

#include "walker.h"

#define MAX_FRAMES 64

typedef struct {
    int depth;
    uint64_t hash; /* of all frames */
    uint64_t code[MAX_FRAMES], offset[MAX_FRAMES];
} call_site;

/* Set the functions that read frames; NULL: record no stacks. */
void call_sites_set_walker(const struct ck_walker *walker);

/* Read the stack of the calling thread. */
void call_site_read(call_site *stack);

/* Return the id of a stack, writing a new stack to the trace. For an empty one return that of the backward pass that
 * this thread works for, or 0 if that is not certain. The lock is held. */
uint32_t call_site_id(const call_site *stack);

/* Register a backward pass that the calling thread starts, until backward_end. Autograd's threads work for it; they
 * have no Python frames of their own. Return NULL if it belongs to a pass that this thread started before, or if no
 * memory is left. Takes the lock. */
typedef struct backward_pass backward_pass;
backward_pass *backward_begin(void);
void backward_end(backward_pass *pass); /* NULL: does nothing */

/* Forget all ids and backward passes: a forked process has its own trace, and none of autograd's threads. */
void call_sites_clear(void);

#endif
