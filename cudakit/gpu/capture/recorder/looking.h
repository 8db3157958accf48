/* Who makes, reads or clears arenas: one thread at a time. */
#ifndef CK_LOOKING_H
#define CK_LOOKING_H

#include <stdbool.h>
#include <stdint.h>

/* Begin, if no other thread does for so long; what this thread calls of CUDA until the end is not recorded.
 * Nobody waits for that without an end: who looks calls CUDA, and who waits may be in a call of CUDA that the
 * other one needs to end. */
bool looking_begin(int64_t patience_ns);
void looking_end(void);

/* A fork has no other threads. */
void looking_clear(void);

/* The time, and a short while of it. */
int64_t looking_now_ns(void);
void looking_pause(void);

#endif
