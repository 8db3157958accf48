/* The trace of this process: a chain of files, called segments. They are memory-mapped, so that written records
 * survive when the process is killed.
 *
 * ``cudakit/trace/trace_file.py`` documents the format. Files are named ``PID-NNNNNN.trace``. The last word of the
 * header is the end offset of the valid data. Callers hold the recorder lock.
 */
#ifndef CK_SPOOL_H
#define CK_SPOOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "write/record.h"

/* Set the directory of the trace; the first record creates the first file.
 *
 * The process that reads the trace holds a lock on the file ``losses`` in the directory (cudakit/trace/spool.py). If
 * this lock is free when a segment begins, the reader was killed: the directory is deleted, and later records are
 * dropped. */
void spool_open(const char *directory);

/* Begin a new trace in the child of a fork: the existing segments belong to the parent. */
void spool_forked(void);

/* Close the current segment; the next record begins a new one. */
void spool_close(void);

/* Allocate the pages of the segment that the next records will fill, so that the threads that write records need not
 * wait for the file system. The recorder lock is not held. */
void spool_allocate_ahead(void);

/* Append records so that a reader sees all or none of them. Records that cannot be written are counted in the file
 * ``losses``. */
void spool_records(const record *records, size_t count);

/* Return the id of a string; a string without an id is written to the trace first. Return 0 on failure. */
uint32_t spool_text(const char *text);

/* Return whether a string has an id; true for the empty string. */
bool spool_has_text(const char *text);

/* Write a call stack, innermost frame first, and return its id, or 0 on failure. ``function`` and ``file`` are string
 * ids. */
typedef struct {
    uint32_t function, file, line;
} spool_frame;
uint32_t spool_stack(const spool_frame *frames, uint32_t depth);

/* Append a line to the file ``PID.KIND`` in the directory: a message for the reader (cudakit/record/protocol.py). */
void spool_notice(const char *kind, const char *line);

/* Return the number of records that could not be written, and set ``error_number`` to the errno of the last
 * failure. */
uint64_t spool_lost(int *error_number);

/* Return the number of written records. */
uint64_t spool_written(void);

#endif
