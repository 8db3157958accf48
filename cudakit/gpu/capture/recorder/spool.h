/* The trace of this process: segments mapped from files, so that what is written survives any death of it.
 *
 * The format is that of ``cudakit/trace/log.py``, in files ``PID-NNNNNN.trace``; the header's last word
 * says up to where a segment can be read. Callers hold the lock of the recorder.
 */
#ifndef CK_SPOOL_H
#define CK_SPOOL_H

#include <stddef.h>
#include <stdint.h>

#include "record.h"

/* Set the directory; files are made when the first record comes. */
void spool_open(const char *directory);

/* Begin anew for a process that was forked off; what the parent wrote is the parent's. */
void spool_forked(void);

/* Close the segment; what comes next begins another one. */
void spool_close(void);

/* Append records that belong together: all or none of them are read. */
void spool_records(const record *records, size_t count);

/* Give a string its number, and write it down when it is new. */
uint32_t spool_text(const char *text);

/* A stack that is new: frames, innermost first, as numbers of strings and a line. Return its number. */
typedef struct {
    uint32_t function, file, line;
} spool_frame;
uint32_t spool_stack(const spool_frame *frames, uint32_t depth);

/* Records that were lost because no file could be written, and why (errno). */
uint64_t spool_lost(int *why);

/* Records that were written. */
uint64_t spool_written(void);

#endif
