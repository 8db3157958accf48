/* Where in the program a call is made: its Python stack, written down once. */
#ifndef CK_SITES_H
#define CK_SITES_H

#include <stdint.h>

#include "../walker.h"

#define MAX_FRAMES 64

typedef struct {
    int depth;
    uint64_t hash; /* of all frames */
    uint64_t code[MAX_FRAMES], offset[MAX_FRAMES];
} site;

/* Set the part that reads frames; NULL: there are no stacks. */
void sites_use(const struct ck_walker *walker);

/* Read the stack of the calling thread. */
void sites_here(site *here);

/* Number a stack, and write it down when it is new; 0 where there is none. The lock is held. */
uint32_t sites_number(const site *here);

/* Forget the numbers: a process that was forked off has a trace of its own. */
void sites_clear(void);

#endif
