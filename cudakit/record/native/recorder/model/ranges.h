/* Writes records of the named ranges and marks of NVTX, stores the open ranges of each thread, and gives the ranges and
 * the call stack of a backward pass to the threads that execute it. */
#ifndef CK_RANGES_H
#define CK_RANGES_H

#include <stdbool.h>
#include <stdint.h>

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

/* What another part of the recorder does when ranges with certain names begin and end. ``is_observed`` is called with
 * the recorder lock held, the others without. */
typedef struct {
    bool (*is_observed)(const char *name);
    void (*began)(void);
    void (*ended)(void);
} range_observer;

/* Set the observer, before ranges are recorded. */
void ranges_set_observer(const range_observer *observer);

/* Register a backward pass that the calling thread starts, until backward_end(). Autograd's threads, which have no
 * Python frames, execute the pass: their records get the call stack and the open ranges of the calling thread. Return
 * NULL if the pass is nested in another pass of this thread, or if no memory is left. Takes the recorder lock. */
typedef struct backward_pass backward_pass;
backward_pass *backward_begin(void);
void backward_end(backward_pass *pass); /* does nothing if ``pass`` is NULL */

/* From now on, also record each backward pass as a range of the domain "cudakit". */
void backward_record_ranges(void);

/* Forget the names, the copies of ranges and the backward passes: a forked process has its own trace, and none of
 * autograd's threads. */
void ranges_clear(void);

#endif
