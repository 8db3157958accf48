/* The trace of this process: segments in memory-mapped files, so that written records survive any process death.
 *
 * The format is that of ``cudakit/trace/trace_file.py``, in files ``PID-NNNNNN.trace``; the last word of the header is
 * the end of the valid data. The lock is held in all calls.
 */
#ifndef CK_SPOOL_H
#define CK_SPOOL_H

#include <stddef.h>
#include <stdint.h>

#include "write/record.h"

/* Set the directory; the first record creates the first file.
 *
 * The reader of the directory holds a lock on the file ``losses`` in it (cudakit/trace/losses.py). When a segment is
 * begun and the lock is free, the reader was killed: the directory is deleted, and later records are dropped. */
void spool_open(const char *directory);

/* Start a new trace in the child of a fork; the existing segments belong to the parent. */
void spool_forked(void);

/* Close the segment; the next record begins another one. */
void spool_close(void);

/* Append records that belong together: a reader sees all or none of them. Records that cannot be written are counted in
 * the file ``losses``. */
void spool_records(const record *records, size_t count);

/* Return the id of a string, writing a new string to the trace. */
uint32_t spool_text(const char *text);

/* Write a new stack, innermost frame first; function and file are string ids. Return its id. */
typedef struct {
    uint32_t function, file, line;
} spool_frame;
uint32_t spool_stack(const spool_frame *frames, uint32_t depth);

/* Return the number of records lost because no file could be written, and set ``why`` to the errno. */
uint64_t spool_lost(int *error_number);

/* Return the number of records written. */
uint64_t spool_written(void);

#endif
