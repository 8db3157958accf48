/* The lock around CUDA calls on arenas. */
#ifndef CK_READER_LOCK_H
#define CK_READER_LOCK_H

#include <stdbool.h>
#include <stdint.h>

/* The thread that holds the reader lock may create, read and clear arenas. Its CUDA calls are not recorded.
 *
 * Return false if another thread holds the reader lock for longer than ``timeout_ns``. The holder makes CUDA calls, and
 * a waiting thread may itself be inside a call that the holder depends on. Without a timeout both could deadlock. */
bool reader_lock_acquire(int64_t timeout_ns);
void reader_lock_release(void);

/* Unlock the reader lock in the child of a fork, which has no other threads. */
void reader_lock_reset(void);

/* Sleep for 0.2 ms. */
void sleep_briefly(void);

#endif
