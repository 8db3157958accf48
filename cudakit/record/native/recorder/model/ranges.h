/* Writes records of the named ranges and marks of NVTX, and stores the open ranges of each thread. */
#ifndef CK_RANGES_H
#define CK_RANGES_H

#include <stdbool.h>
#include <stdint.h>

/* Maximum number of open ranges of a thread that autograd's threads get copies of. Further open ranges are recorded
 * without copies. */
#define MAX_OPEN_RANGES 32

/* The open ranges of a thread, outermost first; ``range_count`` includes ranges beyond the array. */
typedef struct {
    struct {
        uint32_t name, domain; /* text ids */
        bool is_profiled;      /* the process is profiled while the range is open (profile/window.h) */
    } ranges[MAX_OPEN_RANGES];
    uint32_t range_count;
} open_ranges;

/* Begin and end a range of the calling thread. Return its depth among the ranges of its domain, from 0; ending returns
 * -1 if no range of the domain is open. ``domain`` is empty for NVTX's default domain. Both functions take the recorder
 * lock. */
int range_push(const char *name, const char *domain);
int range_pop(const char *domain);

/* Begin a range of the process, which any thread may end, and return its number, which is not 0. Takes the recorder
 * lock. */
uint64_t range_start(const char *name, const char *domain);
void range_end(uint64_t number);

/* Record a mark. Takes the recorder lock. */
void range_mark(const char *name, const char *domain);

/* Autograd's threads work inside the ranges of the thread that started the backward pass: before the first record of
 * such a thread, write copies of these ranges for it. The recorder lock is held. */
void ranges_copy_to_backward_thread(void);

/* End all copies of ranges: the backward pass has ended, or a second backward pass begins. With two passes, it is
 * unknown for which pass a thread works. The recorder lock is held. */
void ranges_end_copies(void);

/* Forget the names and the copies of ranges: a forked process has its own trace. */
void ranges_clear(void);

#endif
