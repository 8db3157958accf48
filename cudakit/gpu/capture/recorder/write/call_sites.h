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
void call_site_here(call_site *here);

/* Return the id of a stack, writing a new stack to the trace; 0 for an empty one. The lock is held. */
uint32_t call_site_id(const call_site *here);

/* Forget all ids: a forked process has its own trace. */
void call_sites_clear(void);

#endif
